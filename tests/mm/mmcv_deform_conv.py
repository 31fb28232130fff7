"""mmcv's deformable convolutions without its binary: torchvision's operator, and mmcv's gradient rule tap by tap.

Values and gradients of compiled mmcv equal torchvision's, except for the gradients of offsets that put a sample exactly
on the border, which no other package defines that way. ``recorded/deform_conv.npz`` holds those of compiled mmcv;
``python -m tests.mm.record_deform_conv`` writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torchvision
from torch import Tensor
from torch.nn.modules.utils import _pair

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


def modulated_deform_conv2d(input, offset, mask, weight, bias=None, stride=1, padding=0, dilation=1, *_: Any) -> Tensor:
    """Compute ``mmcv.ops.modulated_deform_conv2d`` by torchvision's operator; it reads groups from the shapes."""
    geometry = (_pair(stride), _pair(padding), _pair(dilation))
    offset = _OuterSlope.apply(offset, weight.shape[2:], *geometry)
    return torchvision.ops.deform_conv2d(input, offset, weight, bias, *geometry, mask)


def deform_conv2d(input, offset, weight, stride=1, padding=0, dilation=1, *_: Any) -> Tensor:
    """Compute ``mmcv.ops.deform_conv2d`` in the same way."""
    return modulated_deform_conv2d(input, offset, None, weight, None, stride, padding, dilation)


class _OuterSlope(torch.autograd.Function):
    """Identity; no gradient for rows and columns of samples at exactly -1."""

    @staticmethod
    def forward(ctx, offset, kernel_size, stride, padding, dilation):
        ctx.save_for_backward(offset)
        ctx.geometry = (kernel_size, stride, padding, dilation)
        return offset.clone()

    @staticmethod
    def backward(ctx, grad):
        (offset,), (kernel_size, stride, padding, dilation) = ctx.saved_tensors, ctx.geometry
        grad, (Kh, Kw) = grad.clone(), kernel_size
        for channel in range(offset.shape[1]):
            tap, axis = divmod(channel, 2)
            step = divmod(tap % (Kh * Kw), Kw)[axis] * dilation[axis]
            for place in range(offset.shape[2 + axis]):
                start = place * stride[axis] - padding[axis] + step
                at = (slice(None), channel, *((place, slice(None)) if axis == 0 else (slice(None), place)))
                grad[at][offset[at] + start == -1] = 0
        return grad, None, None, None, None


@contextmanager
def by_torchvision() -> Iterator[None]:
    """Let mmcv's layers, ``DeformConv2dPack`` and ``ModulatedDeformConv2dPack``, call the functions above."""
    with (
        mock.patch("mmcv.ops.deform_conv.deform_conv2d", deform_conv2d),
        mock.patch("mmcv.ops.modulated_deform_conv.modulated_deform_conv2d", modulated_deform_conv2d),
    ):
        yield


# A peer of our deformable convolutions: mmcv's compiled operators, and what computes the same without them.
PEERS = ["torchvision", pytest.param("compiled mmcv", marks=pytest.mark.peers)]


@contextmanager
def peer(name: str) -> Iterator[None]:
    """Let mmcv's layers run on one of ``PEERS``."""
    with by_torchvision() if name == "torchvision" else nullcontext():
        yield
