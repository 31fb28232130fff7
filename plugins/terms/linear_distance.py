"""Logits that fall linearly with the distance between query and key: ALiBi (Press et al. 2022), also on maps.

No parameter is learned and no length is fixed: head m subtracts slope_m * distance. On a map the distance is
Euclidean (Fuller et al. 2023, CROMA: "2D-ALiBi"), or the sum of rows and columns, |Δy| + |Δx|, which alone is a sum of
row and column logits: ``global_attention`` adds it in O(N) memory.

Slopes are positive and the logits are at most 0. Shapes: M heads, H rows, W columns, N = H * W row by row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .map_size import check_size
from .position_table import table_logits


def alibi_slopes(heads: int, *, device: torch.device | str | None = None) -> Tensor:
    """The published slopes: 2^(-8/M), 2^(-16/M) ... 2^(-8), the geometric series whose first term is its ratio.

    Where M is no power of 2: the series of the next lower power of 2, then every other term, from the first on, of the
    series of twice as many (the authors' code).

    Returns:
        (M,), float32.

    Raises:
        ValueError: ``heads`` is below 1.
    """
    if heads < 1:
        raise ValueError(f"heads must be at least 1, got {heads}")
    power = 1 << (heads.bit_length() - 1)
    exponents = [8 * n / power for n in range(1, power + 1)]
    exponents += [8 * n / (2 * power) for n in range(1, 2 * power, 2)][: heads - power]
    return torch.tensor([2**-exponent for exponent in exponents], device=device)


def distance_logits(slopes: Tensor, queries: int, keys: int, *, start: int = 0) -> Tensor:
    """-slope * |k - q| along one axis (Press et al. 2022, section 3), a ``position_logits`` of ``sequence_attention``.

    The paper's attention is causal; for keys after the query the distance counts alike.

    Args:
        slopes: (M,).
        queries: T.
        keys: S.
        start: The first query's position among the keys.

    Returns:
        (M, T, S), the dtype of ``slopes``.

    Raises:
        ValueError: ``slopes`` is not of one axis.
    """
    _check_slopes(slopes)
    q = torch.arange(start, start + queries, device=slopes.device)
    k = torch.arange(keys, device=slopes.device)
    return -slopes.view(-1, 1, 1) * (q.unsqueeze(1) - k).abs().to(slopes.dtype)


def manhattan_map_logits(slopes: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """-slope * (|Δy| + |Δx|) in two parts, for ``global_attention``.

    Args:
        slopes: (M,).
        size: (H, W).

    Returns:
        ``row_logits`` (1, M, H, 1, H) and ``column_logits`` (1, M, 1, W, W).

    Raises:
        ValueError: ``slopes`` is not of one axis, or ``size`` is not two ints of at least 1.
    """
    H, W = check_size("size", size)
    rows, columns = distance_logits(slopes, H, H), distance_logits(slopes, W, W)
    return rows.unsqueeze(0).unsqueeze(3), columns.unsqueeze(0).unsqueeze(2)


def manhattan_logits(slopes: Tensor, size: Sequence[int]) -> Tensor:
    """-slope * (|Δy| + |Δx|) of all pairs, (M, N, N): the sum of :func:`manhattan_map_logits`, for small windows."""
    H, W = check_size("size", size)
    rows, columns = distance_logits(slopes, H, H), distance_logits(slopes, W, W)
    return (rows[:, :, None, :, None] + columns[:, None, :, None, :]).reshape(-1, H * W, H * W)


def euclidean_logits(slopes: Tensor, size: Sequence[int]) -> Tensor:
    """-slope * √(Δy² + Δx²) of all pairs (Fuller et al. 2023).

    The root of a sum is no sum of rows and columns: there is no form without the (N, N) table.

    Args:
        slopes: (M,).
        size: (H, W).

    Returns:
        (M, N, N), the dtype of ``slopes``.

    Raises:
        ValueError: ``slopes`` is not of one axis, or ``size`` is not two ints of at least 1.
    """
    _check_slopes(slopes)
    H, W = check_size("size", size)
    y, x = (torch.arange(1 - s, s, device=slopes.device).to(_wide(slopes.dtype)) for s in (H, W))
    distance = (y.unsqueeze(1).square() + x.square()).sqrt().to(slopes.dtype)
    return table_logits(-distance.flatten().unsqueeze(1) * slopes, (H, W))


def _check_slopes(slopes: Tensor) -> None:
    if slopes.dim() != 1:
        raise ValueError(f"slopes must have shape (M,), got {tuple(slopes.shape)}")


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Squares of distances overflow half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
