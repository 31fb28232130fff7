"""Random calls of deformable convolution."""

from __future__ import annotations

import math

import torch

from attn_plugins.ops import deform_conv2d

from .. import magnitudes
from ..call import Call
from ..draw import DTYPES, Draw


def draw(source: Draw) -> Call:
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
    Ho, Wo = ((n + 2 * p - e * (k - 1) - 1) // s + 1 for n, k, s, p, e in zip(size, kernel, stride, padding, dilation))
    biased, modulated = source.chance(0.5), source.chance(0.5)
    arguments = dict(
        input=source.finish(source.normal(B, C, H, W), dtype),
        offset=source.finish(_offsets(source, B, 2 * D * taps, Ho, Wo), dtype),
        weight=source.finish(source.normal(out_channels, C // groups, *kernel), dtype),
        bias=source.finish(source.normal(out_channels), dtype) if biased else None,
        stride=source.short(stride),
        padding=source.short(padding),
        dilation=source.short(dilation),
        mask=source.finish(source.normal(B, D * taps, Ho, Wo), dtype) if modulated else None,
    )

    def fits(sizes):
        if 0 in (sizes["O"], sizes["Cg"], sizes["Kh"], sizes["Kw"]) or sizes["C"] % sizes["Cg"] or not sizes["C"]:
            return False
        if sizes["O"] % (sizes["C"] // sizes["Cg"]):
            return False
        taps = sizes["Kh"] * sizes["Kw"]
        groups, rest = divmod(sizes["2DK"], 2 * taps)
        if rest or groups == 0 or sizes["C"] % groups or sizes.get("DK", groups * taps) != groups * taps:
            return False
        return all(
            n == (extent + 2 * p - e * (k - 1) - 1) // s + 1 and n > 0
            for n, extent, k, s, p, e in zip(
                (sizes["Ho"], sizes["Wo"]), (sizes["H"], sizes["W"]), (sizes["Kh"], sizes["Kw"]), stride, padding,
                dilation,
            )
        )  # fmt: skip

    return Call(
        deform_conv2d,
        arguments,
        axes=dict(input="B C H W", offset="B 2DK Ho Wo", weight="O Cg Kh Kw", bias="O", mask="B DK Ho Wo"),
        options=dict(stride="ints>=1", padding="ints>=0", dilation="ints>=1"),
        given=lambda names: names >= {"input", "offset", "weight"},
        fits=fits,
        magnitude=lambda grad: _magnitude(arguments, grad),
    )


def _offsets(source: Draw, *shape: int) -> torch.Tensor:
    """Offsets in steps of 1/32, whose sums with whole numbers are exact in float32: no rounding crosses a pixel.

    Some are exactly on a pixel, where the derivative is the right-hand one; some are far outside the map.
    """
    found = (source.normal(*shape, scale=source.choice((0.3, 2.0))) * 32).round().clamp(-127, 127) / 32
    if source.chance(0.1):
        far = torch.rand(shape, generator=source.generator) < 0.1
        numbers = (-60000.0, 60000.0, float("inf"), float("-inf"), float("nan"))
        found = found.masked_fill(far, source.choice(numbers))
    return found


def _magnitude(arguments: dict, grad: torch.Tensor) -> dict[str, float]:
    """Return magnitudes of output and gradients: products of the factors and the root of the number of addends."""
    input, weight, mask = (arguments[name] for name in ("input", "weight", "mask"))
    X, W, G = (magnitudes.largest(t) for t in (input, weight, grad))
    A = 1.0 if mask is None else magnitudes.largest(mask)
    channels, pixels = (weight.shape[0] * input.shape[1]) ** 0.5, (grad.numel() / max(1, weight.shape[0])) ** 0.5
    return {
        "output": X * W * A * weight[0].numel() ** 0.5,
        "input": G * W * A * weight.shape[0] ** 0.5,
        "offset": G * W * A * X * channels,
        "mask": G * W * X * channels,
        "weight": G * X * A * pixels,
        "bias": G * pixels,
    }
