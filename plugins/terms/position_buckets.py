"""Bucketed relative positions: one bucket per near offset, wider buckets for distant offsets (Raffel et al. 2020).

On a map, rows and columns are bucketed separately, and ``global_attention`` adds both logits without a table of pairs.
The idea is from the paper (section 2.1); bucket bounds follow the T5 code, so that T5 weights can be loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .map_size import check_size
from .relative_position import axis_offsets


def relative_buckets(offsets: Tensor, buckets: int = 32, max_distance: int = 128, *, causal: bool = False) -> Tensor:
    """Return the bucket of each offset.

    With n buckets per direction, each distance below n/2 has its own bucket. From there to ``max_distance`` bucket
    sizes grow geometrically: n/2 + ⌊n/2 * ln(2 distance / n) / ln(2 max_distance / n)⌋. Larger distances share the last
    bucket.

    Args:
        offsets: k - q, integers of any shape.
        buckets: Number of buckets. The lower half is for keys at and before the query, the upper half for keys after.
        max_distance: Distance from which all offsets share the last bucket.
        causal: Use all buckets for keys at and before the query; keys after it are in bucket 0.

    Returns:
        int64, the shape of ``offsets``.

    Raises:
        ValueError: ``buckets`` is not an even number of at least 4 (2 with ``causal``), or ``max_distance`` is not
            larger than half the buckets of a direction.
        TypeError: ``offsets`` are not integers.
    """
    if offsets.is_floating_point():
        raise TypeError(f"offsets must be integers, got {offsets.dtype}")
    least = 2 if causal else 4
    if buckets < least or buckets % 2:
        raise ValueError(f"buckets must be an even number of at least {least}, got {buckets}")
    directed = buckets if causal else buckets // 2
    near = directed // 2
    if max_distance <= near:
        raise ValueError(f"max_distance must be more than the {near} distances of one bucket each, got {max_distance}")
    distance = (-offsets).clamp(min=0) if causal else offsets.abs()
    # The same float32 operations in the same order as in T5, whose weights were trained with their rounding.
    growth = torch.log(distance.clamp(min=near).float() / near) / math.log(max_distance / near) * (directed - near)
    bucket = torch.where(distance < near, distance, (near + growth.long()).clamp(max=directed - 1))
    return bucket if causal else bucket + directed * (offsets > 0)


def bucket_logits(
    table: Tensor, queries: int, keys: int, max_distance: int = 128, *, causal: bool = False, start: int = 0
) -> Tensor:
    """Lay out one logit per bucket and head as the position logits of a sequence.

    Args:
        table: (buckets, M).
        queries: T.
        keys: S.
        max_distance: See :func:`relative_buckets`.
        causal: See :func:`relative_buckets`. No key is masked.
        start: The first query's position among the keys.

    Returns:
        (M, T, S), the table's dtype.

    Raises:
        ValueError: ``table`` is not two-dimensional, or for the reasons of :func:`relative_buckets`.
    """
    if table.dim() != 2:
        raise ValueError(f"table must have shape (buckets, M), got {tuple(table.shape)}")
    offsets = axis_offsets(queries, keys, device=table.device)
    bucket = relative_buckets(offsets - start, table.shape[0], max_distance, causal=causal)
    q, k = (torch.arange(n, device=table.device) for n in (queries, keys))
    pairs = bucket[k - q.unsqueeze(1) + queries - 1]
    return table.t().index_select(1, pairs.flatten()).view(-1, queries, keys)


def bucket_map_logits(
    row_table: Tensor, column_table: Tensor, size: Sequence[int], max_distance: int = 128
) -> tuple[Tensor, Tensor]:
    """Lay out one logit per bucket and head as row and column logits of ``global_attention``.

    Args:
        row_table: (buckets, M).
        column_table: (buckets, M).
        size: (H, W).
        max_distance: See :func:`relative_buckets`; in pixels.

    Returns:
        ``row_logits`` (1, M, H, 1, H) and ``column_logits`` (1, M, 1, W, W).

    Raises:
        ValueError: for the reasons of :func:`bucket_logits`, or ``size`` is not two ints of at least 1.
    """
    H, W = check_size("size", size)
    rows = bucket_logits(row_table, H, H, max_distance)
    columns = bucket_logits(column_table, W, W, max_distance)
    return rows.unsqueeze(0).unsqueeze(3), columns.unsqueeze(0).unsqueeze(2)
