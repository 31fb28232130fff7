"""Random calls of deformable attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_plugins.ops import deformable_attention

from .. import magnitudes
from ..call import Call
from ..draw import DTYPES, Draw


def draw(source: Draw) -> Call:
    dtype = source.choice(DTYPES)
    L = source.choice((1, 1, 2, 3, 4))
    shapes = tuple(source.extents(2, 200) for _ in range(L))
    S = sum(h * w for h, w in shapes)
    B, M = source.rarely_none(source.integer(1, 3), 0.03), source.choice((1, 1, 2, 3, 8))
    Q, d = source.rarely_none(source.extent(300), 0.03), source.extent()
    if source.chance(0.1):  # often enough for the kernels to pack a head
        Q = 4 * S // L + 1
    per_level = source.chance(0.3)
    points = [source.integer(0, 4) for _ in range(L)] if per_level else [source.rarely_none(source.integer(1, 5))] * L
    locations, weights = _locations(source, shapes, points, (B, Q, M)), source.normal(B, Q, M, sum(points))
    if not per_level:
        locations, weights = locations.unflatten(3, (L, points[0])), weights.unflatten(3, (L, points[0]))
    arguments: dict[str, Any] = dict(
        value=source.finish(source.normal(B, S, M, d), dtype),
        spatial_shapes=shapes if source.chance(0.7) else [list(shape) for shape in shapes],
        sampling_locations=source.finish(locations, dtype),
        attention_weights=source.finish(weights, dtype),
        points=tuple(points) if per_level else None,
    )
    samples = "P" if per_level else "L K"

    def fits(sizes):
        if sizes["two"] != 2 or sizes["S"] != S:
            return False
        return sizes["P"] == sum(points) if per_level else sizes["L"] == L

    return Call(
        deformable_attention,
        arguments,
        axes=dict(value="B S M d", sampling_locations=f"B Q M {samples} two", attention_weights=f"B Q M {samples}"),
        options=dict(spatial_shapes="shapes", **(dict(points="ints>=0?") if per_level else {})),
        given=lambda names: names >= {"value", "sampling_locations", "attention_weights"},
        fits=fits,
        magnitude=lambda grad: _magnitude(arguments, grad, max(max(shape) for shape in shapes)),
        mixes=True,
    )


def _locations(source: Draw, shapes: tuple, points: list[int], leading: tuple[int, ...]) -> Tensor:
    """Draw locations up to two pixels outside the map, at least a tenth of a pixel from jumps of the derivative."""
    found = []
    for (H, W), count in zip(shapes, points):
        sizes = torch.tensor([W, H], dtype=torch.float64)
        places = torch.rand((*leading, count, 2), generator=source.generator, dtype=torch.float64) * (sizes + 4) - 2
        places = places.floor() + 0.2 + 0.6 * (places - places.floor())
        found.append((places + 0.5) / sizes)
    locations = torch.cat(found, 3)
    if source.chance(0.1):
        far = torch.rand(locations.shape, generator=source.generator) < 0.1
        numbers = (-60000.0, 60000.0, float("inf"), float("-inf"), float("nan"))
        locations = locations.masked_fill(far, source.choice(numbers))
    return locations


def _magnitude(arguments: dict[str, Any], grad: Tensor, extent: int) -> dict[str, float]:
    """Return products of factors and the root of the number of addends; rounding of locations grows with the map."""
    value, weights = arguments["value"], arguments["attention_weights"]
    X, A, G = (magnitudes.largest(t) for t in (value, weights, grad))
    B, Q, M = weights.shape[:3]
    samples, width = weights[:1, :1, :1].numel() ** 0.5, value.shape[3] ** 0.5
    return {
        "output": X * A * samples,
        "value": G * A * samples * Q**0.5,
        "sampling_locations": G * A * X * width * extent,
        "attention_weights": G * X * width,
        "condition": max(1.0, extent / 8),
    }
