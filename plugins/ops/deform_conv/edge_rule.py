"""mmcv's gradient rule for offsets that put a sample exactly on the border of the readable area.

The bilinear kernel has a kink at row or column -1: a sample there is 0, and its derivative is 0 on the outer side only.
mmcv uses the derivative of the outer side; torchvision and :func:`attn_plugins.ops.deform_conv2d` use that of the inner
side. At row H or column W both use 0. While offsets are 0, as at the start of a training, every tap in the padding next
to the map is such a sample. Values and all other gradients are equal under both rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_edge(
    offset: Tensor, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Return which components of ``offset`` put a sample exactly at row or column -1.

    Args:
        offset: (B, D * Kh * Kw * 2, Ho, Wo), as for ``deform_conv2d``.
        kernel_size: (Kh, Kw).
        stride: Stride of rows and columns.
        padding: Zero padding of rows and columns.
        dilation: Distance of neighboring taps in rows and columns.

    Returns:
        Boolean tensor of offset's shape.
    """
    Ho, Wo = offset.shape[2:]
    dtype = torch.float64 if offset.dtype == torch.float64 else torch.float32  # the kernels' type of positions

    def undisturbed(axis: int, outputs: int) -> Tensor:
        """Return the undisplaced tap positions of all outputs along an axis: (kernel, outputs)."""
        taps = torch.arange(kernel_size[axis], device=offset.device) * dilation[axis] - padding[axis]
        return taps.unsqueeze(1) + torch.arange(outputs, device=offset.device) * stride[axis]

    Kh, Kw = kernel_size
    rows = undisturbed(0, Ho).view(Kh, 1, Ho, 1).expand(Kh, Kw, Ho, Wo)
    columns = undisturbed(1, Wo).view(1, Kw, 1, Wo).expand(Kh, Kw, Ho, Wo)
    grid = torch.stack((rows, columns), 2).flatten(0, 2).to(dtype)  # (Kh * Kw * 2, Ho, Wo)
    per_group = offset.detach().unflatten(1, (-1, 2 * Kh * Kw)).to(dtype)
    return (per_group + grid == -1).flatten(1, 2)


def without_edge_gradients(
    offset: Tensor, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Return ``offset`` without gradients for the components of :func:`on_edge`, which has the same arguments."""
    if not (torch.is_grad_enabled() and offset.requires_grad):
        return offset
    return torch.where(on_edge(offset, kernel_size, stride, padding, dilation), offset.detach(), offset)
