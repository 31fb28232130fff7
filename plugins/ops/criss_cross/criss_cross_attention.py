"""Region "criss-cross": attention to the keys in the row and in the column of each query.

Criss-cross attention (CCNet) and bilateral criss-cross attention are this operator, without and with position
logits. It is batched matrix products around one softmax, on every device (``products``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arguments import check_dim, check_tensors, finite
from ..operator import Operator
from . import products, reference
from .operands import Options, Terms


def criss_cross_attention(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    position_logits: Tensor | None = None,
    *,
    scale: float = 1.0,
) -> Tensor:
    """Attend from every position of a map to its column and its row (Huang et al. 2019; Thesis, section 3.4.4).

    The weight of key k for query q = (h, w) is the softmax over the H + W - 1 positions of column w and row h of

        scale * query[q]·key[k] + position_logits[q, k]

    with an absent term 0. The query's own position, in both, counts once: in the row. Its entry in the column, number
    h, is read as -inf and gets no gradient. A logit of -inf masks; a query whose keys are all masked gets zeros.
    The memory beyond arguments and results is that of the weights, H + W numbers per query and head, kept for the
    gradient, which needs as much again; half inputs add a map of weights in float32. Strided views are read without
    a copy where the last axis is contiguous; on the CPU, half inputs are copied to float32.

    Args:
        query: (B, M, H, W, d); None, together with ``key``, for position logits alone.
        key: (B, M, H, W, d).
        value: (B, M, H, W, dv).
        position_logits: (B, M, H, W, H + W), of size 1 where it does not depend on batch or head: first of the H rows
            of the query's column, then of the W columns of its row; None for content alone.
        scale: Factor of the content term.

    Returns:
        (B, M, H, W, dv), heads innermost in memory but for the width; may be changed in place.

    Raises:
        ValueError: a shape or a device does not fit, or the map has no position.
        TypeError: the tensors are not floating or not of one dtype.
    """
    terms = Terms(query, key, value, position_logits)
    _check(*terms)
    return ATTEND(terms, Options(finite("scale", scale)))


def _check(query: Tensor | None, key: Tensor | None, value: Tensor, position_logits: Tensor | None) -> None:
    check_tensors("value", value=value, query=query, key=key, position_logits=position_logits)
    check_dim("value", value, "(B, M, H, W, dv)")
    B, M, H, W, _ = value.shape
    if H * W == 0:
        raise ValueError(f"value must have at least one position, got shape {tuple(value.shape)}")
    if (query is None) != (key is None):
        raise ValueError("query and key must be given together, or both be None for position logits alone")
    if query is None and position_logits is None:
        raise ValueError("query and key, or position_logits, must be given")
    if query is not None and key is not None:
        check_dim("query", query, "(B, M, H, W, d)")
        if query.shape[:4] != (B, M, H, W):
            raise ValueError(f"query must have value's first axes {(B, M, H, W)}, got shape {tuple(query.shape)}")
        if key.shape != query.shape:
            raise ValueError(f"key must have query's shape {tuple(query.shape)}, got {tuple(key.shape)}")
    if position_logits is not None:
        shape = (B, M, H, W, H + W)
        check_dim("position_logits", position_logits, "(B, M, H, W, H + W)")
        fits = position_logits.shape[2:] == shape[2:]
        if not fits or any(n != 1 and n != m for n, m in zip(position_logits.shape[:2], shape[:2])):
            raise ValueError(
                f"position_logits must have shape {shape}, H + W logits per position of value, or size 1 in either of "
                f"the first two axes, got {tuple(position_logits.shape)}"
            )


# --- the operator -------------------------------------------------------------------------------------------------


def _empty(like: Tensor, width: int) -> Tensor:
    """Uninitialised (B, M, H, W, width), stored as (B, H, W, M, width) for the projection behind it.

    Not a view: its owner may add to it in place.
    """
    B, M, H, W, _ = like.shape
    return like.new_empty_strided((B, M, H, W, width), (H * W * M * width, width, W * M * width, M * width, 1))


def _results(terms: Terms, options: Options) -> tuple[Tensor, Tensor]:
    """Uninitialised output and weights."""
    _, _, H, W, dv = terms.value.shape
    return _empty(terms.value, dv), _empty(terms.value, products.aligned(H) + products.aligned(W))


def _gradient(name: str, term: Tensor) -> Tensor:
    """An uninitialised gradient, laid out as its term where this has a contiguous width."""
    return torch.empty_like(term) if term.stride(-1) == 1 else _empty(term, term.shape[-1])


def _products(terms: Any, options: Options) -> tuple[int, int]:
    """Operations of one content product and of one value product; the own position counts in both parts."""
    B, M, H, W, dv = terms.value
    pairs = 2 * B * M * H * W * (H + W)
    return (0 if terms.query is None else pairs * terms.query[4]), pairs * dv


ATTEND = Operator(
    "criss_cross_attention",
    Terms,
    Options,
    ("output", "weights"),
    keeps=("weights",),
    fake=_results,
    fake_gradient=_gradient,
    reference=lambda terms, options: reference.criss_cross_attention(*terms, *options),
    table=[products.BACKEND],
    operations=lambda terms, options: sum(_products(terms, options)),
    # Gradients of query and key; gradients of weights and value.
    backward_operations=lambda terms, options, needs: 2 * sum(_products(terms, options)),
    nothing=0.0,
)
