"""Random calls of the operators that sample: deformable convolution and deformable attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attn_plugins.ops import deform_conv2d, deformable_attention

from .call import Call, largest
from .draw import DTYPES, Draw


def _far(source: Draw, places: Tensor) -> Tensor:
    """Put some of the places far outside the map, rarely."""
    if not source.chance(0.1):
        return places
    far = source.below(0.1, *places.shape)
    return places.masked_fill(far, source.choice((-60000.0, 60000.0, float("inf"), float("-inf"), float("nan"))))


def _extent(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def convolution(source: Draw) -> Call:
    dtype = source.choice(DTYPES)
    kernel, stride, dilation, padding = ([0, 0] for _ in range(4))
    for axis in range(2):
        kernel[axis] = source.choice((1, 2, 3, 3, 3, 4, 5))
        stride[axis] = source.integer(2, 4) if source.chance(0.3) else 1
        dilation[axis] = source.integer(2, 4) if source.chance(0.3) else 1
        padding[axis] = source.integer(0, kernel[axis] * dilation[axis])
    H, W = size = source.extents(2, 300)
    for axis in range(2):  # room for one output pixel
        missing = dilation[axis] * (kernel[axis] - 1) + 1 - 2 * padding[axis] - size[axis]
        padding[axis] += max(0, -(-missing // 2))
    D, groups = source.choice((1, 1, 2, 3, 4)), source.choice((1, 1, 1, 2, 3))
    C = math.lcm(D, groups) * source.choice((1, 1, 2, 3, 8, 16))
    out_channels = groups * source.choice((1, 2, 3, 8, 17))
    B = source.rarely_none(source.integer(1, 3), 0.03)
    taps = math.prod(kernel)
    Ho, Wo = map(_extent, size, kernel, stride, padding, dilation)
    biased, modulated = source.chance(0.5), source.chance(0.5)
    input = source.finish(source.normal(B, C, H, W), dtype)
    # In steps of 1/32, whose sums with whole numbers are exact in float32, so that no rounding crosses a pixel. Some
    # offsets are exactly on a pixel, where the derivative is the right-hand one.
    offset = source.normal(B, 2 * D * taps, Ho, Wo, scale=source.choice((0.3, 2.0)))
    offset = _far(source, (offset * 32).round().clamp(-127, 127) / 32)
    arguments = dict(
        input=input,
        offset=source.finish(offset, dtype),
        weight=source.finish(source.normal(out_channels, C // groups, *kernel), dtype),
        bias=source.finish(source.normal(out_channels), dtype) if biased else None,
        stride=source.short(stride),
        padding=source.short(padding),
        dilation=source.short(dilation),
        mask=source.finish(source.normal(B, D * taps, Ho, Wo), dtype) if modulated else None,
    )

    def fits(sizes):
        O, C, Cg, kernel = sizes["O"], sizes["C"], sizes["Cg"], (sizes["Kh"], sizes["Kw"])
        if 0 in (O, C, Cg, *kernel) or C % Cg or O % (C // Cg):
            return False
        taps = math.prod(kernel)
        D, rest = divmod(sizes["2DK"], 2 * taps)
        if rest or D == 0 or C % D or sizes.get("DK", D * taps) != D * taps:
            return False
        out = tuple(map(_extent, (sizes["H"], sizes["W"]), kernel, stride, padding, dilation))
        return out == (sizes["Ho"], sizes["Wo"]) and min(out) > 0

    return Call(
        deform_conv2d,
        arguments,
        axes=dict(input="B C H W", offset="B 2DK Ho Wo", weight="O Cg Kh Kw", bias="O", mask="B DK Ho Wo"),
        options=dict(stride="ints>=1", padding="ints>=0", dilation="ints>=1"),
        given=lambda names: names >= {"input", "offset", "weight"},
        fits=fits,
        magnitude=lambda grad: _of_convolution(arguments, grad),
    )


def _of_convolution(arguments: dict, grad: Tensor) -> dict[str, float]:
    """Return magnitudes of output and gradients: products of the factors and the root of the number of addends."""
    input, weight, mask = (arguments[name] for name in ("input", "weight", "mask"))
    X, W, G = (largest(t) for t in (input, weight, grad))
    A = 1.0 if mask is None else largest(mask)
    channels, pixels = (weight.shape[0] * input.shape[1]) ** 0.5, (grad.numel() / max(1, weight.shape[0])) ** 0.5
    return {
        "output": X * W * A * weight[0].numel() ** 0.5,
        "input": G * W * A * weight.shape[0] ** 0.5,
        "offset": G * W * A * X * channels,
        "mask": G * W * X * channels,
        "weight": G * X * A * pixels,
        "bias": G * pixels,
    }


def deformable(source: Draw) -> Call:
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
    samples, axis, number = ("P", "P", sum(points)) if per_level else ("L K", "L", L)
    return Call(
        deformable_attention,
        arguments,
        axes=dict(value="B S M d", sampling_locations=f"B Q M {samples} two", attention_weights=f"B Q M {samples}"),
        options=dict(spatial_shapes="shapes", **(dict(points="ints>=0?") if per_level else {})),
        given=lambda names: names >= {"value", "sampling_locations", "attention_weights"},
        fits=lambda sizes: (sizes["two"], sizes["S"], sizes[axis]) == (2, S, number),
        magnitude=lambda grad: _of_attention(arguments, grad, max(max(shape) for shape in shapes)),
        mixes=True,
    )


def _locations(source: Draw, shapes: tuple, points: list[int], leading: tuple[int, ...]) -> Tensor:
    """Draw locations up to two pixels outside the map, at least a tenth of a pixel from jumps of the derivative."""
    locations = []
    for (H, W), count in zip(shapes, points):
        sizes = torch.tensor([W, H], dtype=torch.float64)
        places = source.uniform(*leading, count, 2) * (sizes + 4) - 2
        locations.append((places.floor() + 0.7 + 0.6 * (places - places.floor())) / sizes)
    return _far(source, torch.cat(locations, 3))


def _of_attention(arguments: dict[str, Any], grad: Tensor, extent: int) -> dict[str, float]:
    """Return products of factors and the root of the number of addends; rounding of locations grows with the map."""
    value, weights = arguments["value"], arguments["attention_weights"]
    X, A, G = (largest(t) for t in (value, weights, grad))
    samples, width, queries = weights[:1, :1, :1].numel() ** 0.5, value.shape[3] ** 0.5, weights.shape[1] ** 0.5
    return {
        "output": X * A * samples,
        "value": G * A * samples * queries,
        "sampling_locations": G * A * X * width * extent,
        "attention_weights": G * X * width,
        "condition": max(1.0, extent / 8),
    }
