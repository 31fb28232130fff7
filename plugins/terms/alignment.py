"""Alignment scores: how well decoder state s_t fits encoder state h_i (Lecture, "Different Alignment Score Functions").

Each returns plain logits (B, T, S), before the softmax over the S encoder states. Shapes: B batch, T decoder states,
S encoder states, d width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def dot_scores(query: Tensor, key: Tensor) -> Tensor:
    """s_t · h_i.

    Args:
        query: s, (B, T, d).
        key: h, (B, S, d).

    Returns:
        (B, T, S).
    """
    return query @ key.transpose(1, 2)


def scaled_dot_scores(query: Tensor, key: Tensor) -> Tensor:
    """s_t · h_i / √d; shapes as :func:`dot_scores`."""
    # On the query: the smaller side, and half precision does not overflow in the product.
    return dot_scores(query * query.shape[-1] ** -0.5, key)


def unit_vectors(x: Tensor) -> Tensor:
    """x / |x| along the last axis, in float32 for half inputs, whose squares overflow; a zero vector stays zero."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    if x.dtype == torch.float16:  # the gradient of a zero vector, 1 / eps times another, is beyond its range: 0 here
        wide = wide.masked_fill((x == 0).all(-1, keepdim=True), 0.0)
    return F.normalize(wide, dim=-1, eps=1e-8).to(x.dtype)


def cosine_scores(query: Tensor, key: Tensor) -> Tensor:
    """cos(s_t, h_i), from -1 to 1, 0 where either is zero; shapes as :func:`dot_scores`."""
    return dot_scores(unit_vectors(query), unit_vectors(key))


def general_scores(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """s_tᵀ W h_i.

    Args:
        query: s, (B, T, n).
        key: h, (B, S, d).
        weight: W, (n, d).

    Returns:
        (B, T, S).
    """
    return dot_scores(query @ weight, key)


def additive_scores(query: Tensor, key: Tensor, vector: Tensor) -> Tensor:
    """w_1 · tanh(W_2 [s_t; h_i]), the concatenation-based score, of the two halves of W_2 [s_t; h_i].

    W_2 applied to a concatenation is a sum: its columns of s applied to s_t and its columns of h applied to h_i, so
    that every state is projected once and not once a pair. Holds the (B, T, S, A) hidden layer.

    Args:
        query: W_2's columns of s applied to s, with the bias b_2, (B, T, A).
        key: W_2's columns of h applied to h, (B, S, A).
        vector: w_1, (A,). Its bias b_1 is the same for all i: the softmax does not see it.

    Returns:
        (B, T, S).
    """
    return torch.tanh(query.unsqueeze(2) + key.unsqueeze(1)) @ vector
