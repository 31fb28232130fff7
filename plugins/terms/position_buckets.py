"""Relative positions in buckets, one each for near offsets and wider ones for distant offsets (Raffel et al. 2020).

Along one axis, and on a map as rows' and columns' logits, which ``global_attention`` adds without a table of pairs.
The paper (section 2.1) gives the idea; the numbers are those of the T5 code, so that its weights serve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .map_size import check_size
from .relative_position import axis_offsets


def relative_buckets(offsets: Tensor, buckets: int = 32, max_distance: int = 128, *, causal: bool = False) -> Tensor:
    """Number the buckets of offsets.

    With n buckets a direction, distances below n/2 have a bucket each; from there to ``max_distance`` buckets grow
    by equal ratios, n/2 + ⌊n/2 * ln(2 distance / n) / ln(2 max_distance / n)⌋; the last one has all that is further.

    Args:
        offsets: k - q, integers of any shape.
        buckets: Their number; half of them, the lower ones, for keys at and before the query, half for keys after it.
        max_distance: The distance from which all offsets share the last bucket.
        causal: All buckets are of keys at and before the query; keys after it are in bucket 0.

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
    # In this order of float32 operations, which T5's weights were trained with.
    growth = torch.log(distance.clamp(min=near).float() / near) / math.log(max_distance / near) * (directed - near)
    bucket = torch.where(distance < near, distance, (near + growth.long()).clamp(max=directed - 1))
    return bucket if causal else bucket + directed * (offsets > 0)


def bucket_logits(
    table: Tensor, queries: int, keys: int, max_distance: int = 128, *, causal: bool = False, start: int = 0
) -> Tensor:
    """Position logits of a sequence, from one logit for every bucket and head.

    Args:
        table: (buckets, M).
        queries: T.
        keys: S.
        max_distance: As in :func:`relative_buckets`.
        causal: Likewise. This masks nothing.
        start: The first query's position among the keys.

    Returns:
        (M, T, S), the table's dtype.

    Raises:
        ValueError: ``table`` has no two axes, or as :func:`relative_buckets`.
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
    """Logits of both axes of a map, for ``global_attention``: buckets of k - q in rows, and in columns.

    Args:
        row_table: (buckets, M).
        column_table: (buckets, M).
        size: (H, W).
        max_distance: As in :func:`relative_buckets`, in pixels.

    Returns:
        ``row_logits`` (1, M, H, 1, H) and ``column_logits`` (1, M, 1, W, W).

    Raises:
        ValueError: as :func:`bucket_logits`, or ``size`` is not two ints of at least 1.
    """
    H, W = check_size("size", size)
    rows = bucket_logits(row_table, H, H, max_distance)
    columns = bucket_logits(column_table, W, W, max_distance)
    return rows.unsqueeze(0).unsqueeze(3), columns.unsqueeze(0).unsqueeze(2)
