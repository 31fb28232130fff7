"""Groups of a clip's patches that attend among themselves, for :mod:`.space_time_attention`.

Every region divides the clip into groups, and a patch attends to the patches of its group. Groups become entries of the
batch, so no mask is needed.

Shapes: B batch, (T, H, W) the clip's grid, G groups, L patches per group, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Literal

from torch import Tensor

ClipGrid = tuple[int, int, int]
Region = Literal["joint", "space", "time", "width", "height", "local", "global"]
Cut = tuple[list[slice], ...]

# The clip's axes, counted from 1, that index the groups, and those within a group. For 'local' the axes are
# T, 2, H / 2, 2, W / 2, and for 'global' T / 2, 2, H / 2, 2, W / 2, 2.
_AXES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "joint": ((), (1, 2, 3)),
    "space": ((1,), (2, 3)),
    "time": ((2, 3), (1,)),
    "width": ((1, 2), (3,)),
    "height": ((1, 3), (2,)),
    "local": ((2, 4), (1, 3, 5)),
    "global": ((2, 4, 6), (1, 3, 5)),
}


def grouped(x: Tensor, region: Region) -> list[Tensor]:
    """Split a clip into its groups.

    Args:
        x: (B, T, H, W, C).
        region: The kind of group.

    Returns:
        Groups (B, G, L, C); several such tensors if groups differ in size.
    """
    B, *grid, C = x.shape
    sizes = _sizes(grid, region)
    if sizes is None:
        return [x[:, t, h, w].flatten(1, 3).unsqueeze(1) for t, h, w in product(*_cuts(grid, region))]
    groups, members = _AXES[region]
    G, L = (prod([sizes[axis - 1] for axis in axes]) for axes in (groups, members))
    return [x.reshape(B, *sizes, C).permute(0, *groups, *members, len(sizes) + 1).reshape(B, G, L, C)]


def ungrouped(parts: list[Tensor], region: Region, grid: ClipGrid) -> Tensor:
    """Merge groups into a clip (B, T, H, W, C), the inverse of :func:`grouped`."""
    B, _, _, C = parts[0].shape
    sizes = _sizes(grid, region)
    if sizes is None:
        x = parts[0].new_empty(B, *grid, C)
        for part, (t, h, w) in zip(parts, product(*_cuts(grid, region))):
            shape = [len(range(n)[cut]) for n, cut in zip(grid, (t, h, w))]
            x[:, t, h, w] = part.reshape(B, *shape, C)
        return x
    groups, members = _AXES[region]
    order = (0, *groups, *members, len(sizes) + 1)
    x = parts[0].reshape(B, *[sizes[axis - 1] for axis in groups + members], C)
    return x.permute([order.index(axis) for axis in range(len(order))]).reshape(B, *grid, C)


def _sizes(grid: Sequence[int], region: Region) -> list[int] | None:
    """Return the lengths of the axes of :data:`_AXES`, or None if groups differ in size."""
    if region not in ("local", "global"):
        return list(grid)
    halved = grid[1:] if region == "local" else grid
    if any(n > 1 and n % 2 for n in halved):
        return None
    pairs = [(min(n, 2), n // min(n, 2)) for n in halved]
    if region == "local":
        return [grid[0], *pairs[0], *pairs[1]]
    return [size for first, second in pairs for size in (second, first)]


def _cuts(grid: Sequence[int], region: Region) -> Cut:
    """Return the slices of T, H and W that form groups: halves of H and W, or every second index of each axis."""
    if region == "local":
        # Not -(-n // 2): TorchScript's ONNX exporter truncates quotients of traced sizes.
        halves = [[slice(0, (n + 1) // 2), slice((n + 1) // 2, n)][: min(n, 2)] for n in grid[1:]]
        return [slice(0, grid[0])], *halves
    return tuple([slice(first, n, 2) for first in range(min(n, 2))] for n in grid)
