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

import torch
from torch import Tensor

from ..ops.common.axes import unfold
from .cached import cached
from .sine_position import sine_encoding


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
