"""Logits that decrease linearly with the distance between query and key: ALiBi (Press et al. 2022), also on maps.

Head m subtracts slope_m * distance; nothing is learned, and any length is accepted. On a map the distance is Euclidean
(Fuller et al. 2023, CROMA: "2D-ALiBi") or |Δy| + |Δx|. Only the latter splits into row and column logits, which
``global_attention`` adds in O(N) memory.

Slopes are positive and the logits are at most 0. Shapes: M heads, H rows, W columns, N = H * W row by row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .map_size import check_size
from .position_table import table_logits


def alibi_slopes(heads: int, *, device: torch.device | str | None = None) -> Tensor:
    """Return the published slopes 2^(-8/M), 2^(-16/M) ... 2^(-8), a geometric series whose ratio is its first term.

    If M is not a power of 2, use the series of the next lower power of 2, followed by the first, third, fifth ... term
    of the series with twice as many terms (the authors' code).

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
    """Compute -slope * |k - q| along one axis (Press et al. 2022, section 3).

    The result is a ``position_logits`` of ``sequence_attention``. The paper's attention is causal; here keys after the
    query are at the same distance as keys before it.

    Args:
        slopes: (M,).
        queries: T.
        keys: S.
        start: The first query's position among the keys.

    Returns:
        (M, T, S), the dtype of ``slopes``.

    Raises:
        ValueError: ``slopes`` is not one-dimensional.
    """
    _check_slopes(slopes)
    q = torch.arange(start, start + queries, device=slopes.device)
    k = torch.arange(keys, device=slopes.device)
    return -slopes.view(-1, 1, 1) * (q.unsqueeze(1) - k).abs().to(slopes.dtype)


def manhattan_map_logits(slopes: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Compute -slope * (|Δy| + |Δx|) as row and column logits of ``global_attention``.

    Args:
        slopes: (M,).
        size: (H, W).

    Returns:
        ``row_logits`` (1, M, H, 1, H) and ``column_logits`` (1, M, 1, W, W).

    Raises:
        ValueError: ``slopes`` is not one-dimensional, or ``size`` is not two ints of at least 1.
    """
    H, W = check_size("size", size)
    rows, columns = distance_logits(slopes, H, H), distance_logits(slopes, W, W)
    return rows.unsqueeze(0).unsqueeze(3), columns.unsqueeze(0).unsqueeze(2)


def manhattan_logits(slopes: Tensor, size: Sequence[int]) -> Tensor:
    """Compute -slope * (|Δy| + |Δx|) of all pairs, (M, N, N), for small windows; see :func:`manhattan_map_logits`."""
    H, W = check_size("size", size)
    rows, columns = distance_logits(slopes, H, H), distance_logits(slopes, W, W)
    return (rows[:, :, None, :, None] + columns[:, None, :, None, :]).reshape(-1, H * W, H * W)


def euclidean_logits(slopes: Tensor, size: Sequence[int]) -> Tensor:
    """Compute -slope * √(Δy² + Δx²) of all pairs (Fuller et al. 2023).

    The distance does not split into row and column logits, so the (N, N) logits are always held.

    Args:
        slopes: (M,).
        size: (H, W).

    Returns:
        (M, N, N), the dtype of ``slopes``.

    Raises:
        ValueError: ``slopes`` is not one-dimensional, or ``size`` is not two ints of at least 1.
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
    """Return the dtype for squared distances, which overflow half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
