"""Memory formats of maps: layers compute in channels-last memory and return the format of their input.

Shapes: B batch, C channels, (H, W) the map.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ....core import transposition
from ....core.axes import unflatten
from ....core.gradients import is_batched_gradient, traced, transformed
from ....core.strides import memory_format


def is_channels_last(x: Tensor) -> bool:
    """Return whether (B, C, H, W) is channels-last by :func:`~attn_plugins.core.strides.memory_format`."""
    return not _is_mapped(x) and memory_format(x) == torch.channels_last


def to_channels_last(x: Tensor) -> Tensor:
    """Return ``x`` (B, C, H, W) in channels-last memory, copied if needed. The gradient has the format of ``x``."""
    return in_memory_format(x, True)


def map_heads(projected: Tensor, num_heads: int) -> Tensor:
    """View (B, M * d, H, W) as (B, M, H, W, d).

    In channels-last memory a projection is a plain GEMM, and its heads are views with a contiguous width.
    """
    return unflatten(projected, 1, (num_heads, -1)).permute(0, 1, 3, 4, 2)


def in_format_of(x: Tensor, output: Tensor) -> Tensor:
    """Return ``output`` (B, C', H', W') in the memory format of ``x``, copied if needed."""
    return in_memory_format(output, is_channels_last(x))


def add_scaled(x: Tensor, scale: Tensor, output: Tensor) -> Tensor:
    """Return ``x + scale * output`` in the dtype and the memory format of ``x``.

    On CUDA a channels-last ``output`` is transposed while it is added to a contiguous ``x``.

    Args:
        x: (B, C, H, W).
        scale: One element.
        output: (B, C, H, W), or (B, C, 1, 1) for all pixels. Under autocast the dtypes may differ.
    """
    if traced() or transformed() or forward_ad._current_level >= 0:
        return _scaled_sum(x, scale, output)
    return _ScaledSum.apply(x, scale, output)


def _scaled_sum(x: Tensor, scale: Tensor, output: Tensor) -> Tensor:
    if output.shape != x.shape:
        return x + (scale * output).to(x.dtype)
    # Convert before the sum, which is ten times slower for mixed memory formats. A scale without axes needs no cast.
    scale = scale if scale.dtype == x.dtype else scale.reshape(())
    return torch.addcmul(x, scale, in_format_of(x, output).to(x.dtype))


def in_memory_format(x: Tensor, channels_last: bool) -> Tensor:
    """Return ``x`` in channels-last or contiguous memory, copied if needed; under ``torch.func``, ``x`` itself."""
    if _is_mapped(x):
        return x
    wanted = torch.channels_last if channels_last else torch.contiguous_format
    if x.is_contiguous(memory_format=wanted):
        return x
    if traced():  # compilers and tracers choose the layout themselves
        return x.contiguous(memory_format=wanted)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Converted.apply(x, channels_last)
    return _copied(x, channels_last)


def _is_mapped(x: Tensor) -> bool:
    """Return whether ``x`` may stand for a stack of maps, which has no memory format that could be asked for."""
    return transformed() or (not traced() and is_batched_gradient(x))


class _Converted(torch.autograd.Function):
    """A copy in another memory format, whose gradient has the original format."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, channels_last: bool) -> Tensor:
        ctx.was_channels_last = is_channels_last(x)
        return _copied(x, channels_last)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return in_memory_format(grad, ctx.was_channels_last), None


class _ScaledSum(torch.autograd.Function):
    """The sum of a map and a multiple of another, whose backward is cheaper than that of ``addcmul``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, output: Tensor) -> Tensor:
        ctx.save_for_backward(scale, output)
        if output.shape != x.shape:  # addcmul would take ten times as long on CPUs
            return x + torch.mul(scale, output, out=torch.empty_like(output, dtype=x.dtype))
        if x.dtype == output.dtype and x.is_contiguous() and is_channels_last(output) and transposition.has_kernel(x):
            factor = scale.to(x.dtype)
            result = transposition.transposed(_matrices(output, False), _matrices(x, True), factor)
            return torch.ops.aten._unsafe_view(result, x.shape)  # a view could not be changed in place, as by timm
        return _scaled_sum(x, scale, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        scale, output = ctx.saved_tensors
        _, needs_scale, needs_output = ctx.needs_input_grad
        if not (needs_scale or needs_output):
            return grad, None, None
        if output.shape == grad.shape:
            converted = in_format_of(output, grad)
        else:  # of one pixel: no product has more
            converted = grad.sum((2, 3), keepdim=True, dtype=output.dtype)
        grad_scale = (converted * output).sum(dtype=scale.dtype).view_as(scale) if needs_scale else None
        return grad, grad_scale, scale.view(()) * converted if needs_output else None


def _matrices(x: Tensor, contiguous: bool) -> Tensor:
    """View a contiguous map as (B, C, H * W), a channels-last one as (B, H * W, C)."""
    return x.flatten(2) if contiguous else x.permute(0, 2, 3, 1).flatten(1, 2)


def _copied(x: Tensor, channels_last: bool) -> Tensor:
    """Copy ``x`` to channels-last or contiguous memory."""
    B, C, H, W = x.shape
    transposed = x.is_contiguous() if channels_last else is_channels_last(x)
    if not transposed or not transposition.has_kernel(x):
        return x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    copy = transposition.transposed(_matrices(x, channels_last))
    return copy.view(B, H, W, C).permute(0, 3, 1, 2) if channels_last else copy.view(B, C, H, W)
