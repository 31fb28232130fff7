"""Definition of deformable convolution; see :mod:`attn_plugins.ops.reference`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.arguments import at_least_float32
from ...core.sampling import bilinear_samples


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
