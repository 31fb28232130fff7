"""Random arguments of deformable attention, and its definition in loops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SHAPES = ((5, 7), (3, 4), (1, 2))


def operands(
    shapes: Sequence[tuple[int, int]] = SHAPES,
    *,
    batch=2,
    queries=6,
    heads=3,
    d=4,
    K=2,
    dtype=torch.float64,
    beside=None,
    device="cpu",
    grad=True,
    margin=0.2,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return value, locations and weights. Some locations lie outside the map, none on a whole pixel."""
    options = dict(dtype=beside or dtype, device=device)
    S, L = sum(h * w for h, w in shapes), len(shapes)
    value = torch.randn(batch, S, heads, d, dtype=dtype, device=device)
    locations = torch.rand(batch, queries, heads, L, K, 2, **options) * (1 + 2 * margin) - margin
    sizes = torch.tensor([(w, h) for h, w in shapes], **options).view(L, 1, 2)
    pixels = locations * sizes - 0.5
    locations = (pixels.floor() + 0.1 + 0.8 * (pixels - pixels.floor()) + 0.5) / sizes
    weights = torch.rand(batch, queries, heads, L, K, **options)
    return tuple(t.requires_grad_(grad) for t in (value, locations, weights))  # type: ignore[return-value]


def pixel(value: Tensor, first: int, H: int, W: int, y: int, x: int) -> Tensor:
    """Read a pixel of one head; value is (S, d)."""
    return value[first + y * W + x] if 0 <= y < H and 0 <= x < W else torch.zeros_like(value[0])


def by_loops(value: Tensor, shapes: Sequence[tuple[int, int]], locations: Tensor, weights: Tensor) -> Tensor:
    """Compute Zhu et al. (2021), Eq. 3, without projections, sample by sample."""
    B, _, M, d = value.shape
    _, Q, _, L, K = weights.shape
    output = torch.zeros(B, Q, M, d, dtype=value.dtype)
    for b in range(B):
        for q in range(Q):
            for m in range(M):
                first = 0
                for level, (H, W) in enumerate(shapes):
                    for k in range(K):
                        x, y = (locations[b, q, m, level, k] * torch.tensor([W, H]) - 0.5).tolist()
                        left, top = math.floor(x), math.floor(y)
                        for row in (top, top + 1):
                            for column in (left, left + 1):
                                share = (1 - abs(y - row)) * (1 - abs(x - column))
                                pixel_value = pixel(value[b, :, m], first, H, W, row, column)
                                output[b, q, m] += weights[b, q, m, level, k] * share * pixel_value
                    first += H * W
    return output.flatten(2)
