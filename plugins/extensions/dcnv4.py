"""Functions of the extension ``DCNv4.ext`` (Xiong et al. 2024, https://arxiv.org/abs/2401.06197).

They run without autograd and autocast, as compiled ones do. ``im2col_step``, ``d_stride`` and ``block_thread`` have no
meaning here. Compiled functions take only kernels of 9 or 8 points (DCNv4), or 4 or 8 points (deformable attention);
these take any number. Half precision is computed in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.deformable_attention.without_autograd import attend, gradients, without_autograd
from .windows import Window

__all__ = ["dcnv4_backward", "dcnv4_forward", "flash_deform_attn_backward", "flash_deform_attn_forward"]


def dcnv4_forward(input: Tensor, offset_mask: Tensor, *arguments: Any) -> Tensor:
    """Return the output, (B, H', W', C): that of DCNv3, whose offsets and mask are packed by groups.

    Args:
        input: (B, H, W, C) of ``group`` times ``group_channels`` channels.
        offset_mask: (B, H', W', D). Each group has K offsets (x, y), then K weights. What exceeds G * K * 3 is padding.
        arguments: kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, group, group_channels,
            offset_scale, im2col_step, remove_center, d_stride, block_thread, and softmax: whether the weights are
            logits of a softmax over the points.

    Raises:
        ValueError: A shape does not fit.
    """
    window, softmax = Window._make([*arguments[:11], arguments[12]]), arguments[15]
    with without_autograd(input):
        return window.sample(input, *_split(window, input, offset_mask, softmax))


def dcnv4_backward(input: Tensor, offset_mask: Tensor, *arguments: Any) -> list[Tensor]:
    """Return the gradients of input and offset_mask; ``grad_output`` comes after ``im2col_step``."""
    window, grad_output, softmax = Window._make([*arguments[:11], arguments[13]]), arguments[12], arguments[16]
    with without_autograd(input):
        offset, mask = _split(window, input, offset_mask, softmax)
        grad_input, grad_points, grad_weights = window.sample_gradients(grad_output, input, offset, mask)
        packed = torch.zeros_like(offset_mask)
        used = window.group * window.points * 3
        packed[..., :used] = _packed(grad_points, grad_weights, mask, softmax).flatten(3)
        return [grad_input.to(input.dtype), packed]


def flash_deform_attn_forward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_loc_attn: Tensor,
    im2col_step: int,
    K: int,
    d_stride: int,
    block_thread: int,
) -> Tensor:
    """Return (B, Q, M * d): :func:`attn_plugins.ops.deformable_attention`, which raises its errors.

    Args:
        value: (B, S, M, d).
        spatial_shapes: (L, 2) of (H, W).
        level_start_index: Ignored; it follows from the shapes.
        sampling_loc_attn: (B, Q, M, L * K * 3): L * K locations (x, y), 0 to 1 on the map, then L * K logits.
    """
    with without_autograd(value):
        locations, weights = _attention(value, sampling_loc_attn, K)
        return attend(value, spatial_shapes, locations, weights)


def flash_deform_attn_backward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_loc_attn: Tensor,
    grad_output: Tensor,
    im2col_step: int,
    K: int,
    d_stride: int,
    block_thread: int,
) -> list[Tensor]:
    """Return the gradients of value and sampling_loc_attn."""
    with without_autograd(value):
        locations, weights = _attention(value, sampling_loc_attn, K)
        grads = gradients(grad_output, value, spatial_shapes, locations, weights)
        packed = _packed(grads[1].flatten(3, 4), grads[2].flatten(3), weights.flatten(3), softmax=True)
        return [grads[0], packed.to(sampling_loc_attn.dtype)]


def _split(window: Window, input: Tensor, offset_mask: Tensor, softmax: bool) -> tuple[Tensor, Tensor]:
    """Return offsets (B, H', W', G, K, 2) and weights (B, H', W', G, K)."""
    expected, used = (input.shape[0], *window.output_size(input)), window.group * window.points * 3
    if offset_mask.dim() != 4 or offset_mask.shape[:3] != expected or offset_mask.shape[3] < used:
        width = f"at least {used}"
        raise ValueError(f"offset_mask must have shape {(*expected, width)}, got {tuple(offset_mask.shape)}")
    offset, mask = _unpacked(offset_mask[..., :used].unflatten(3, (window.group, -1)), window.points)
    return offset, _softmax(mask) if softmax else mask


def _attention(value: Tensor, sampling_loc_attn: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """Return locations (B, Q, M, L, K, 2) and weights (B, Q, M, L, K), in float32 for values in half precision."""
    dtype = torch.promote_types(value.dtype, torch.float32)
    locations, logits = _unpacked(sampling_loc_attn.to(dtype), sampling_loc_attn.shape[3] // 3)
    return locations.unflatten(3, (-1, K)), _softmax(logits).unflatten(3, (-1, K))


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _unpacked(packed: Tensor, K: int) -> tuple[Tensor, Tensor]:
    return packed[..., : 2 * K].unflatten(-1, (K, 2)), packed[..., 2 * K :]


def _packed(grad_points: Tensor, grad_weights: Tensor, weights: Tensor, softmax: bool) -> Tensor:
    if softmax:
        weighted = grad_weights * weights
        grad_weights = weighted - weights * weighted.sum(-1, keepdim=True)
    return torch.cat((grad_points.flatten(-2), grad_weights), -1)
