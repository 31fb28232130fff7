"""mmcv's gradient of an offset that puts its sample on the edge of where the map is read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def without_edge_gradients(
    offset: Tensor, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """``offset``, whose components that put a sample at row or column -1 exactly have no gradient.

    A sample reads 0 there and something of the map beyond it, so its slope is 0 on one side only. mmcv takes that
    side; torchvision, and with it :func:`attn_plugins.ops.deform_conv2d`, takes the other. At row H or column W both
    take 0. While an offset is 0, as at the start of a training, every tap in the padding next to the map is such a
    sample. Values, and all other gradients, are the same by either rule.

    Args:
        offset: (B, D * Kh * Kw * 2, Ho, Wo), as ``deform_conv2d`` takes it.
        kernel_size: (Kh, Kw).
        stride: Of rows and columns; likewise the next two.
        padding: Zeros around the input.
        dilation: Distance of neighbouring taps.
    """
    if not (torch.is_grad_enabled() and offset.requires_grad):
        return offset
    Ho, Wo = offset.shape[2:]
    dtype = torch.float64 if offset.dtype == torch.float64 else torch.float32  # as the kernels compute positions

    def undisturbed(axis: int, outputs: int) -> Tensor:
        """Where the taps of all outputs lie along an axis: (kernel, outputs)."""
        taps = torch.arange(kernel_size[axis], device=offset.device) * dilation[axis] - padding[axis]
        return taps.unsqueeze(1) + torch.arange(outputs, device=offset.device) * stride[axis]

    Kh, Kw = kernel_size
    rows = undisturbed(0, Ho).view(Kh, 1, Ho, 1).expand(Kh, Kw, Ho, Wo)
    columns = undisturbed(1, Wo).view(1, Kw, 1, Wo).expand(Kh, Kw, Ho, Wo)
    grid = torch.stack((rows, columns), 2).flatten(0, 2).to(dtype)  # (Kh * Kw * 2, Ho, Wo)
    per_group = offset.unflatten(1, (-1, 2 * Kh * Kw))
    on_edge = (per_group.detach().to(dtype) + grid == -1).flatten(1, 2)
    return torch.where(on_edge, offset.detach(), offset)
