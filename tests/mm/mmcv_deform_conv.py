"""Gradients of offsets that put a sample exactly on the border, which no package but mmcv defines its way.

``recorded/deform_conv.npz`` holds those of compiled mmcv; ``python -m tests.mm.record_deform_conv`` writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

RECORDED = Path(__file__).parent / "recorded" / "deform_conv.npz"
# (B, C, H, W, C_out, kernel, stride, padding, dilation, groups, offset groups)
RECORDED_GEOMETRIES = {
    "padding": (1, 2, 3, 4, 3, 3, 1, 1, 1, 1, 1),
    "stride, dilation, groups": (1, 4, 7, 6, 2, 3, 2, 2, 2, 2, 2),
    "even kernel, wide padding": (2, 2, 2, 3, 3, 2, 1, 2, 1, 1, 1),
}
RECORDED_CASES = [
    (name, offsets, modulated)
    for name in RECORDED_GEOMETRIES
    for offsets in ("zero", "whole")
    for modulated in (False, True)
]


def case_name(name: str, offsets: str, modulated: bool) -> str:
    """Return the name of a recorded array."""
    return f"{name}; {offsets} offsets; {'modulated' if modulated else 'plain'}"


def recorded_operands(name: str, offsets: str) -> tuple[list[Tensor], Tensor]:
    """Return input, offset, weight, mask, bias and the gradient of the output, in float64, from integers."""
    B, C, H, W, C_out, K, stride, padding, dilation, groups, D = RECORDED_GEOMETRIES[name]
    size = [(n + 2 * padding - dilation * (K - 1) - 1) // stride + 1 for n in (H, W)]

    def numbers(*shape: int, factor: int) -> Tensor:
        count = torch.Size(shape).numel()
        return ((torch.arange(count) * factor % 257).double() / 128 - 1).view(shape)

    offset = numbers(B, 2 * D * K * K, *size, factor=83)
    offset = {"zero": 0 * offset, "whole": (3.5 * offset).round(), "between": 3.5 * offset}[offsets]
    leaves = [
        numbers(B, C, H, W, factor=101),
        offset,
        numbers(C_out, C // groups, K, K, factor=59),
        numbers(B, D * K * K, *size, factor=37),
        numbers(C_out, factor=71),
    ]
    return [leaf.requires_grad_() for leaf in leaves], numbers(B, C_out, *size, factor=113)


def offset_gradient(deform_conv: Callable, modulated_deform_conv: Callable, case: tuple[str, str, bool]) -> Tensor:
    """Return the gradient of the offsets in a recorded case by functions with the arguments of mmcv's."""
    name, offsets, modulated = case
    (input, offset, weight, mask, bias), grad = recorded_operands(name, offsets)
    _, _, _, _, _, _, stride, padding, dilation, groups, D = RECORDED_GEOMETRIES[name]
    geometry = (stride, padding, dilation, groups, D)
    if modulated:
        output = modulated_deform_conv(input, offset, mask, weight, bias, *geometry)
    else:
        output = deform_conv(input, offset, weight, *geometry)
    return torch.autograd.grad(output, offset, grad)[0]
