"""Functions of the extension ``DCNv3`` of InternImage (Wang et al. 2023, https://arxiv.org/abs/2211.05778).

They run without autograd and autocast, as compiled ones do. A group's output is the sum over its K points of mask times
the input at ``center + scale * (dilation * point + offset)``, bilinear and zero outside the map, where ``center`` is
that of a convolution's window and ``point`` is relative to it. Half precision is computed in float32. ``im2col_step``
has no meaning here. Version 1.0 has no ``remove_center``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from ..import_hooks import after_import
from ..ops.deformable_attention.without_autograd import without_autograd
from .windows import Window

__all__ = ["dcnv3_backward", "dcnv3_forward"]


def dcnv3_forward(input: Tensor, offset: Tensor, mask: Tensor, *arguments: Any) -> Tensor:
    """Return the output, (B, H', W', C).

    Args:
        input: (B, H, W, C) of ``group`` times ``group_channels`` channels.
        offset: (B, H', W', G * K * 2) of (x, y) in pixels. The points of the kernel's first column come first.
        mask: (B, H', W', G * K), where K is the kernel's size, less 1 with ``remove_center``.
        arguments: kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, group, group_channels,
            offset_scale, im2col_step, and remove_center unless it is 0.

    Raises:
        ValueError: A shape does not fit.
    """
    window = Window._make([*arguments[:11], *(arguments[12:] or [0])])
    with without_autograd(input):
        return window.sample(input, *_split(window, input, offset, mask))


def dcnv3_backward(input: Tensor, offset: Tensor, mask: Tensor, *arguments: Any) -> list[Tensor]:
    """Return the gradients of input, offset and mask; ``grad_output`` comes before ``im2col_step``."""
    window, grad_output = Window._make([*arguments[:11], *(arguments[13:] or [0])]), arguments[11]
    with without_autograd(input):
        grads = window.sample_gradients(grad_output, input, *_split(window, input, offset, mask))
        return [grad.reshape(to.shape).to(to.dtype) for grad, to in zip(grads, (input, offset, mask))]


def _split(window: Window, input: Tensor, offset: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    points = input.shape[0], *window.output_size(input), window.group, window.points
    for name, tensor, width in (("offset", offset, 2), ("mask", mask, 1)):
        expected = (*points[:3], window.group * window.points * width)
        if tensor.shape != expected:
            raise ValueError(f"{name} must have shape {expected}, got {tuple(tensor.shape)}")
    return offset.reshape(*points, 2), mask.reshape(points)


def when_offered() -> None:
    """Show DCNv3's version to InternImage, which derives the arguments from it: 1.1 has ``remove_center``."""
    after_import("pkg_resources", _show_version)


def _show_version(pkg_resources: ModuleType) -> None:
    shown: Any = pkg_resources
    shown.working_set.add(shown.Distribution(project_name="DCNv3", version="1.1"))
