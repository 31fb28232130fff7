"""Memory formats of maps: layers compute in channels-last memory and return the format of their input.

Shapes: B batch, C channels, (H, W) the map.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# A plain copy accesses another page for every element of a pixel or of a plane. On two threads (1, 512, 97, 97) took
# 1.2 to 18 ms to channels-last and 6 ms back; (4, 1024, 32, 32) took 7 and 6 ms. PyTorch copies a transposed matrix in
# tiles on one thread: 2.4 to 2.8 ms and 2.2 ms in either direction. With more threads a plain copy is as fast.
_LARGE_IMAGE = 1 << 18  # elements
_FEW_THREADS = 4

_is_compiling = getattr(torch.compiler, "is_compiling", lambda: False)  # torch >= 2.3


def is_channels_last(x: Tensor) -> bool:
    """Return whether (B, C, H, W) is channels-last and not also contiguous (as with C = 1 or H = W = 1)."""
    return not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def to_channels_last(x: Tensor) -> Tensor:
    """Return ``x`` (B, C, H, W) in channels-last memory, copied if needed. The gradient has the format of ``x``."""
    return in_memory_format(x, True)


def in_format_of(x: Tensor, output: Tensor) -> Tensor:
    """Return ``output`` (B, C', H', W') in the memory format of ``x``, copied if needed."""
    return in_memory_format(output, is_channels_last(x))


def in_memory_format(x: Tensor, channels_last: bool) -> Tensor:
    """Return ``x`` in channels-last or contiguous memory, copied if needed."""
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    if x.is_contiguous(memory_format=memory_format):
        return x
    if _is_compiling() or torch.jit.is_tracing():  # these choose the layout themselves
        return x.contiguous(memory_format=memory_format)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Converted.apply(x, channels_last)
    return _copied(x, channels_last)


class _Converted(torch.autograd.Function):
    """A copy in another memory format, whose gradient has the original format."""

    @staticmethod
    def forward(x: Tensor, channels_last: bool) -> Tensor:
        return _copied(x, channels_last)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, bool], output: Tensor) -> None:
        ctx.was_channels_last = is_channels_last(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return in_memory_format(grad, ctx.was_channels_last), None


def _copied(x: Tensor, channels_last: bool) -> Tensor:
    """Copy ``x`` to channels-last or contiguous memory."""
    B, C, H, W = x.shape
    transposed = x.is_contiguous() if channels_last else is_channels_last(x)
    few = x.device.type == "cpu" and torch.get_num_threads() <= _FEW_THREADS
    if not (transposed and few and C * H * W >= _LARGE_IMAGE):
        return x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    matrices = x.view(B, C, H * W) if channels_last else x.permute(0, 2, 3, 1).view(B, H * W, C)
    copy = x.new_empty((B, matrices.shape[2], matrices.shape[1]))
    for image, original in zip(copy.unbind(), matrices.unbind()):
        image.copy_(original.t())
    return copy.view(B, H, W, C).permute(0, 3, 1, 2) if channels_last else copy.view(B, C, H, W)
