"""Definition of deformable convolution; see :mod:`attn_plugins.ops.reference`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..arguments import at_least_float32


def bilinear_samples(input: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Sample feature maps at fractional positions, with zeros outside the map.

    The value at (y, x) is the sum over pixels k of G(k, (y, x)) * input[k], with G(a, b) = g(a_y, b_y) * g(a_x, b_x)
    and g(a, b) = max(0, 1 - |a - b|) (Zhu et al. 2019, Eq. 4).

    Args:
        input: (B, C, H, W).
        y: (B, *S), the row of each sample.
        x: (B, *S), the column of each sample.

    Returns:
        (B, *S, C).
    """
    B, C, H, W = input.shape
    pixels = input.permute(0, 2, 3, 1).reshape(B * H * W, C)
    image = torch.arange(B, device=input.device).view(B, *[1] * (y.dim() - 1)) * (H * W)
    # Exclude positions that no pixel reaches, among them NaN and those that would overflow an integer.
    inside = (y >= -1) & (y < H) & (x >= -1) & (x < W)
    y, x = torch.where(inside, y, -2), torch.where(inside, x, -2)
    y0, x0 = y.detach().floor(), x.detach().floor()
    dy, dx = y - y0, x - x0  # at a pixel, the derivative is that to its right, as in torchvision
    total = input.new_zeros(*y.shape, C)
    for row, row_weight in ((y0, 1 - dy), (y0 + 1, dy)):
        for column, column_weight in ((x0, 1 - dx), (x0 + 1, dx)):
            weight = row_weight * column_weight
            exists = inside & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            index = torch.where(exists, image + row.long() * W + column.long(), 0)
            values = pixels.index_select(0, index.flatten()).view(*y.shape, C)
            values = torch.where(exists.unsqueeze(-1), values, 0)  # 0 even if pixel 0, read in its place, is inf
            total = total + values * weight.unsqueeze(-1)
    return total


def deform_conv2d(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """See :func:`attn_plugins.ops.deform_conv2d`."""
    dtype = input.dtype
    input, offset, weight, bias, mask = at_least_float32(input, offset, weight, bias, mask)
    B, C, H, W = input.shape
    out_channels, group_channels, Kh, Kw = weight.shape
    taps, groups = Kh * Kw, C // group_channels
    D, Ho, Wo = offset.shape[1] // (2 * taps), offset.shape[2], offset.shape[3]

    def grid(steps: int, step: int, shape: tuple[int, ...]) -> Tensor:
        return (torch.arange(steps, device=input.device, dtype=input.dtype) * step).view(shape)

    # p_q + p_k + offset for each image, offset group, tap and output pixel: (B, D, Kh, Kw, Ho, Wo)
    shift = offset.reshape(B, D, Kh, Kw, 2, Ho, Wo)
    y = grid(Ho, stride[0], (Ho, 1)) - padding[0] + grid(Kh, dilation[0], (Kh, 1, 1, 1)) + shift[..., 0, :, :]
    x = grid(Wo, stride[1], (1, Wo)) - padding[1] + grid(Kw, dilation[1], (Kw, 1, 1)) + shift[..., 1, :, :]
    samples = bilinear_samples(
        input.reshape(B * D, C // D, H, W), y.reshape(B * D, taps, Ho, Wo), x.reshape(B * D, taps, Ho, Wo)
    )  # (B * D, taps, Ho, Wo, C / D)
    if mask is not None:
        samples = samples * mask.reshape(B * D, taps, Ho, Wo, 1)
    columns = samples.permute(0, 4, 1, 2, 3).reshape(B, groups, group_channels * taps, Ho * Wo)
    kernels = weight.reshape(groups, out_channels // groups, group_channels * taps)
    output = torch.matmul(kernels, columns).reshape(B, out_channels, Ho, Wo)
    if bias is not None:
        output = output + bias.view(-1, 1, 1)
    return output.to(dtype)
