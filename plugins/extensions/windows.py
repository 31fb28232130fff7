"""Sampling of DCNv3 and DCNv4: one map, groups of channels, and displaced points of a kernel's window."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import deformable_attention
from ..ops.deformable_attention.deformable_attention import policy_of_grid_sample
from ..ops.deformable_attention.without_autograd import cast, gradients


class Window(NamedTuple):
    """Arguments of the compiled functions, in their order."""

    kernel_h: int
    kernel_w: int
    stride_h: int
    stride_w: int
    pad_h: int
    pad_w: int
    dilation_h: int
    dilation_w: int
    group: int
    group_channels: int
    offset_scale: float
    remove_center: int

    @property
    def points(self) -> int:
        """Number of a group's points, K."""
        return self.kernel_h * self.kernel_w - bool(self.remove_center)

    def output_size(self, input: Tensor) -> tuple[int, int]:
        """Return the output's height and width for an input (B, H, W, C)."""
        if input.dim() != 4 or input.shape[3] != self.group * self.group_channels:
            channels = f"{self.group} groups of {self.group_channels} channels"
            raise ValueError(f"input must have shape (B, H, W, C) with {channels}, got {tuple(input.shape)}")
        H, W = input.shape[1:3]
        height = (H + 2 * self.pad_h - self.dilation_h * (self.kernel_h - 1) - 1) // self.stride_h + 1
        width = (W + 2 * self.pad_w - self.dilation_w * (self.kernel_w - 1) - 1) // self.stride_w + 1
        if height < 1 or width < 1:
            raise ValueError(f"the kernel's window must fit the padded map, got a map of {(H, W)} and {self}")
        return height, width

    def sample(self, input: Tensor, offset: Tensor, mask: Tensor) -> Tensor:
        """Return (B, H', W', C): sums of the samples of each group, weighted by the mask.

        Args:
            input: (B, H, W, C), zero outside the map.
            offset: (B, H', W', G, K, 2) of (x, y). Points are in columns: the kernel's first column comes first.
            mask: (B, H', W', G, K).
        """
        operands = self._operands(input, offset, mask)
        sums = deformable_attention(*operands, nan_policy=policy_of_grid_sample(input))
        return cast(sums, input.dtype).view(*offset.shape[:3], input.shape[3])

    def sample_gradients(self, grad_output: Tensor, input: Tensor, offset: Tensor, mask: Tensor) -> list[Tensor]:
        """Return the gradients of input, offset and mask for that of the output, in float32 or wider.

        Samples exactly at row or column -1 have none, as in the compiled functions. While offsets are 0, as at the
        start of a training, these are the points in the padding next to the map.
        """
        value, shapes, locations, weights = self._operands(input, offset, mask)
        grad_output = grad_output.reshape(*locations.shape[:2], input.shape[3]).to(value.dtype)
        grads = gradients(grad_output, value, shapes, locations, weights)
        scale = self.offset_scale / locations.new_tensor(shapes[0][::-1])
        outside = (self._points(offset, value.dtype) == -1).any(-1, keepdim=True)
        grad_offset = (grads[1].view_as(offset) * scale).masked_fill(outside, 0)
        return [grads[0].view_as(input), grad_offset, grads[2].view_as(mask)]

    def _operands(
        self, input: Tensor, offset: Tensor, mask: Tensor
    ) -> tuple[Tensor, list[tuple[int, int]], Tensor, Tensor]:
        """Return the operands of ``deformable_attention``; half precision is computed in float32, as compiled."""
        dtype = torch.promote_types(input.dtype, torch.float32)
        (B, H, W, _), Q = input.shape, offset.shape[1] * offset.shape[2]
        points = self._points(offset, dtype)
        locations = (points + 0.5) / points.new_tensor([W, H])
        if not torch.onnx.is_in_onnx_export():
            # Offsets start as zero: a point on a pixel must not be rounded to its left, where it has another gradient.
            locations = torch.nextafter(locations, torch.full_like(locations, torch.inf))
        value = input.to(dtype).reshape(B, H * W, self.group, self.group_channels)
        samples = B, Q, self.group, 1, self.points
        return value, [(H, W)], locations.view(*samples, 2), mask.to(dtype).reshape(samples)

    def _points(self, offset: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the points in pixels, (B, H', W', G, K, 2) of (x, y)."""
        offset = offset.to(dtype)
        return self._corners(offset) + offset * self.offset_scale

    def _corners(self, offset: Tensor) -> Tensor:
        """Return the points without offsets in pixels, (H', W', 1, K, 2) of (x, y)."""
        height, width = offset.shape[1:3]
        y, dy = self._axis(height, self.kernel_h, self.stride_h, self.pad_h, self.dilation_h, offset)
        x, dx = self._axis(width, self.kernel_w, self.stride_w, self.pad_w, self.dilation_w, offset)
        taps = torch.stack(torch.meshgrid(dx, dy, indexing="ij"), -1).flatten(0, 1)
        if self.remove_center:
            center = self.kernel_w // 2 * self.kernel_h + self.kernel_h // 2
            taps = torch.cat((taps[:center], taps[center + 1 :]))
        starts = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)
        return starts[:, :, None, None] + taps

    def _axis(
        self, size: int, kernel: int, stride: int, padding: int, dilation: int, like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the windows' first points along an axis, and the distances of all points from these."""
        middle = dilation * (kernel - 1) // 2
        first = middle - padding - middle * self.offset_scale
        starts = first + stride * torch.arange(size, dtype=like.dtype, device=like.device)
        return starts, self.offset_scale * dilation * torch.arange(kernel, dtype=like.dtype, device=like.device)
