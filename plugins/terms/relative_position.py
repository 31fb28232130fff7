"""Relative positions along one axis: each distinct offset is encoded and projected once, then expanded to pairs.

Q queries are at pixels 0, q_stride, 2 * q_stride ... and K keys at 0, kv_stride, ...; there are at most
(Q - 1) * q_stride + (K - 1) * kv_stride + 1 offsets k - q, fewer if the strides have a common divisor.

The terms of Zhu et al. (2019), Eq. 2, that such a table R provides, for one axis:
    ε2 = q·R[k - q]   relative_logits(query, R)
    ε4 = v·R[k - q]   spread(v·R)
and both together, ε2 + ε4 = (q + v)·R[k - q].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core.axes import unfold
from ..core.gradients import traced, transformed
from .sine_position import sine_encoding
from .size_cache import cached


def axis_offsets(
    queries: int, keys: int, q_stride: int = 1, kv_stride: int = 1, device: torch.device | None = None
) -> Tensor:
    """Return the D distinct offsets k - q in pixels, ascending."""
    step = math.gcd(q_stride, kv_stride)
    return torch.arange(-(queries - 1) * q_stride, (keys - 1) * kv_stride + 1, step, device=device)


@cached
def axis_encoding(
    queries: int,
    keys: int,
    q_stride: int,
    kv_stride: int,
    factor: float,
    width: int,
    wavelength: float,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Encode the distinct offsets, times ``factor``, by sines and cosines; see :func:`.sine_encoding`.

    Returns:
        (D, width). The result is shared; see :func:`.cached`.
    """
    offsets = axis_offsets(queries, keys, q_stride, kv_stride, device)
    offsets = offsets.to(torch.float64 if dtype == torch.float64 else torch.float32) * factor
    return sine_encoding(offsets, width, wavelength).to(dtype)


def spread(table: Tensor, queries: int, keys: int, q_stride: int = 1, kv_stride: int = 1) -> Tensor:
    """Lay out a table over offsets as a table over pairs.

    Args:
        table: (..., D), in the order of :func:`axis_offsets`.
        queries: Q.
        keys: K.
        q_stride: Pixels between queries.
        kv_stride: Pixels between keys.

    Returns:
        (..., Q, K); entry (q, k) is the table's entry for the offset k * kv_stride - q * q_stride.
    """
    step = math.gcd(q_stride, kv_stride)
    # The first offset decreases from query to query, so the windows are in reverse order.
    windows = unfold(table, -1, (keys - 1) * kv_stride // step + 1, q_stride // step)
    return windows[..., :: kv_stride // step].flip(-2)


def relative_logits(
    query: Tensor, table: Tensor, keys: int, axis: str, q_stride: int = 1, kv_stride: int = 1
) -> Tensor:
    """Compute the products of all queries with the encoded offsets to all rows or columns of keys.

    Args:
        query: (B, M, Hq, Wq, d).
        table: (M, d, D), projected encodings in the order of :func:`axis_offsets`.
        keys: Number of key rows or columns.
        axis: ``'row'`` or ``'column'``.
        q_stride: Pixels between queries.
        kv_stride: Pixels between keys.

    Returns:
        (B, M, Hq, Wq, keys).
    """
    if axis not in ("row", "column"):
        raise ValueError(f"axis must be 'row' or 'column', got '{axis}'")
    pairs = spread(table, query.shape[2 if axis == "row" else 3], keys, q_stride, kv_stride)
    return torch.einsum("bmhwd,mdhk->bmhwk" if axis == "row" else "bmhwd,mdwk->bmhwk", query, pairs)


# Up to this many rows and columns of queries, one product with both axes' tables replaces two with tables over pairs,
# each of which reads a copy of the queries. It computes twice as many numbers.
_FEW_LINES = 128


def both_axes_logits(query: Tensor, table: Tensor, keys: Sequence[int], scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Compute the products of all queries with the encoded offsets to all rows and to all columns of keys.

    Queries and keys have the same distance, so that the tables hold Hq + Hk - 1 and Wq + Wk - 1 offsets.

    Args:
        query: (B, M, Hq, Wq, d).
        table: (M, d, D), or (1, d, D) for all heads: projected encodings of the offsets of rows, ascending, then of
            those of columns.
        keys: (Hk, Wk).
        scale: Factor of the products.

    Returns:
        (B, M, Hq, Wq, Hk) and (B, M, Hq, Wq, Wk), which may share memory: do not write to them.
    """
    M, H, W = query.shape[1:4]
    if traced() or transformed() or forward_ad._current_level >= 0 or H + W > _FEW_LINES:
        scaled = (table if scale == 1 else table * scale).expand(M, -1, -1)
        rows, columns = scaled.split((H + keys[0] - 1, W + keys[1] - 1), 2)
        return relative_logits(query, rows, keys[0], "row"), relative_logits(query, columns, keys[1], "column")
    return _BothAxes.apply(query, table, scale, keys[0], keys[1])


class _BothAxes(torch.autograd.Function):
    """One product with all offsets, (M, B * Hq * Wq, D), of which rows and columns of keys are views.

    From a query to the next, the view begins one offset earlier.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, table: Tensor, scale: float, Hk: int, Wk: int) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.cast = scale, _cast(table, query)
        ctx.save_for_backward(query, table)
        (B, M, H, W, _), D = query.shape, table.shape[2]
        b, m, h, rows = H * W * D, B * H * W * D, W * D, H + Hk - 1
        ctx.views = (
            ((B, M, H, W, Hk), (b, m, h - 1, D, 1), H - 1),
            ((B, M, H, W, Wk), (b, m, h, D - 1, 1), rows + W - 1),
        )
        products = _product(_by_head(query), ctx.cast, scale)
        return products.as_strided(*ctx.views[0]), products.as_strided(*ctx.views[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        query, table = ctx.saved_tensors
        total: Tensor | None = None
        for grad, view in zip(grads, ctx.views):
            if grad is not None:
                if total is None:
                    (B, M, H, W, _), D = query.shape, table.shape[2]
                    total = grad.new_zeros(M, B * H * W, D, dtype=query.dtype)
                total.as_strided(*view).copy_(grad)
        if total is None:
            return None, None, None, None, None
        grad_query = grad_table = None
        if ctx.needs_input_grad[0]:
            cast = _cast(table, query) if torch.is_grad_enabled() else ctx.cast
            grad_query = _product(total, cast.mT, ctx.scale).view(M, B, H, W, query.shape[4]).transpose(0, 1)
        if ctx.needs_input_grad[1] and table.shape[0] == M:
            grad_table = _product(_by_head(query).mT, total, ctx.scale).to(table.dtype)
        elif ctx.needs_input_grad[1]:
            by_head = _product(total.mT, _by_head(query), ctx.scale)
            grad_table = by_head.sum(0, keepdim=True, dtype=table.dtype).mT
        return grad_query, grad_table, None, None, None


def _by_head(query: Tensor) -> Tensor:
    """View (B, M, H, W, d) as (M, B * H * W, d), copied where it is not channels-last."""
    return query.transpose(0, 1).flatten(1, 3)


def _cast(table: Tensor, query: Tensor) -> Tensor:
    return table.to(query.dtype).expand(query.shape[1], -1, -1)


def _product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return ``scale * a @ b``, in one launch unless ``scale`` is 0."""
    if scale == 1:
        return torch.bmm(a, b)
    if scale == 0:  # torch's product for ARM keeps NaN of an uninitialized result
        return scale * torch.bmm(a, b)
    return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0, alpha=scale)
