"""Random arguments of deformable convolution, and calls of its reference."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_plugins.ops import reference
from tests.helpers.operator_checks import relative_error

# name -> (B, C, H, W, C_out, kernel, stride, padding, dilation, groups, offset groups)
GEOMETRIES = {
    "square": (2, 4, 6, 6, 3, (3, 3), 1, 1, 1, 1, 1),
    "wide": (1, 6, 5, 9, 4, (3, 3), 1, 1, 1, 2, 3),
    "tall, stride, dilation": (2, 4, 11, 6, 4, (3, 2), (2, 1), (2, 0), (1, 2), 2, 2),
    "groups cut offset groups": (1, 12, 4, 5, 6, (1, 3), 1, (0, 1), 1, 3, 2),
    "depthwise": (2, 5, 4, 4, 10, (3, 3), 2, 1, 1, 5, 5),
    "one pixel": (3, 2, 1, 1, 2, (3, 3), 1, 1, 1, 1, 1),
    "one row": (2, 3, 1, 7, 2, (1, 3), 1, (0, 1), 1, 1, 1),
    "odd channels": (1, 37, 3, 4, 5, (3, 3), 1, 1, 1, 1, 1),
    "many pixels": (2, 70, 33, 41, 8, (3, 3), 1, 1, 1, 1, 2),
}


def make(geometry: tuple, dtype=torch.float64, spread: float = 2.0, masked: bool = True, seed: int = 0) -> dict:
    """Return random operands of a geometry. Offsets reach beyond the map."""
    B, C, H, W, C_out, kernel, stride, padding, dilation, groups, D = geometry
    pair = lambda v: v if isinstance(v, tuple) else (v, v)  # noqa: E731
    size = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip((H, W), pair(padding), pair(dilation), kernel, pair(stride))
    ]
    generator = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    taps = math.prod(kernel)
    return dict(
        input=rand(B, C, H, W).to(dtype),
        offset=(rand(B, 2 * D * taps, *size) * spread).to(dtype),
        weight=rand(C_out, C // groups, *kernel).to(dtype),
        bias=rand(C_out).to(dtype),
        stride=pair(stride),
        padding=pair(padding),
        dilation=pair(dilation),
        mask=rand(B, D * taps, *size).sigmoid().to(dtype) if masked else None,
    )


def through_reference(input, offset, weight, bias, stride, padding, dilation, mask) -> Tensor:
    return reference.deform_conv2d(input, offset, weight, bias, mask, stride, padding, dilation)


def gradients(function, operands: dict) -> list[Tensor]:
    """Return the output and the gradients of the tensors, whose layouts and places stay as they are."""
    names = [n for n in ("input", "offset", "weight", "bias", "mask") if operands[n] is not None]
    leaves = {n: operands[n].detach().requires_grad_() for n in names}
    output = function(**{**operands, **leaves})
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [output, *torch.autograd.grad(output, list(leaves.values()), grad.to(output))]


def same_where_finite(a: Tensor, b: Tensor, bound: float = 1e-12) -> bool:
    """Return whether the same numbers are finite, and equal; an infinite factor gives inf or NaN."""
    finite = b.isfinite()
    return torch.equal(a.isfinite(), finite) and relative_error(a[finite], b[finite]) < bound
