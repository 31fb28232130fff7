"""Alignment scores: how well decoder state s_t fits encoder state h_i (Lecture, "Different Alignment Score Functions").

Each returns plain logits (B, T, S), before the softmax over the S encoder states. Shapes: B batch, T decoder states,
S encoder states, d width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def dot_scores(query: Tensor, key: Tensor) -> Tensor:
    """Compute s_t · h_i.

    Args:
        query: s, (B, T, d).
        key: h, (B, S, d).

    Returns:
        (B, T, S).
    """
    return query @ key.transpose(1, 2)


def scaled_dot_scores(query: Tensor, key: Tensor) -> Tensor:
    """Compute s_t · h_i / √d; shapes as :func:`dot_scores`."""
    # Scaling the query is cheaper, and keeps the product from overflowing in half precision.
    return dot_scores(query * query.shape[-1] ** -0.5, key)


def unit_vectors(x: Tensor) -> Tensor:
    """Return x / |x| along the last axis, 0 for zero vectors; half inputs, whose squares overflow, go by float32."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    if x.dtype == torch.float16:  # the gradient at a zero vector has the factor 1 / eps, which overflows: make it 0
        wide = wide.masked_fill((x == 0).all(-1, keepdim=True), 0.0)
    return F.normalize(wide, dim=-1, eps=1e-8).to(x.dtype)


def general_scores(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """Compute s_tᵀ W h_i.

    Args:
        query: s, (B, T, n).
        key: h, (B, S, d).
        weight: W, (n, d).

    Returns:
        (B, T, S).
    """
    return dot_scores(query @ weight, key)


def additive_scores(query: Tensor, key: Tensor, vector: Tensor) -> Tensor:
    """Compute the concatenation-based score w_1 · tanh(W_2 [s_t; h_i] + b_2).

    W_2 [s_t; h_i] is the sum of W_2's s columns applied to s_t and its h columns applied to h_i, so every state is
    projected once instead of once per pair. The (B, T, S, A) hidden layer is held in memory.

    Args:
        query: s projected by W_2's s columns, plus the bias b_2, (B, T, A).
        key: h projected by W_2's h columns, (B, S, A).
        vector: w_1, (A,). A bias b_1 would be the same for all i and cancel in the softmax.

    Returns:
        (B, T, S).
    """
    return torch.tanh(query.unsqueeze(2) + key.unsqueeze(1)) @ vector
