"""Deformable convolution and multi-scale deformable attention, on this package's operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import ops
from ..ops.sampled.attention_operands import Options as AttentionOptions
from ..ops.sampled.attention_operands import Terms as AttentionTerms
from ..ops.sampled.deform_conv import CONVOLVE
from ..ops.sampled.deformable_attention import ATTEND, shapes_on_host
from ..ops.sampled.operands import Options, Terms
from .calls import check, operator
from .edge_rule import on_edge


def _leading_pixels(maps: Tensor, size: Sequence[int]) -> Tensor:
    """View the memory of larger maps as maps of ``size``, which mmcv does by not checking their size.

    mmdet's DyHead relies on that: it passes the offsets of the finer level to a convolution of stride 2.
    """
    if maps.shape[2:] == torch.Size(size):
        return maps
    B, C = maps.shape[:2]
    needed = size[0] * size[1]
    check(
        maps[0, 0].numel() >= needed,
        f"offset and mask must have at least {needed} pixels, for an output of {tuple(size)}, got {tuple(maps.shape)}",
    )
    return maps.reshape(B, -1)[:, : C * needed].view(B, C, *size)


def _check_groups(input: Tensor, weight: Tensor, offset: Tensor, group: int, deformable_group: int) -> None:
    """Check the numbers of groups, which this package's operator reads from the shapes."""
    C, needed = input.shape[1], weight.shape[1] * group
    check(needed == C, f"input must have {needed} channels for weight {tuple(weight.shape)} and group {group}, got {C}")
    channels = 2 * deformable_group * weight.shape[2] * weight.shape[3]
    check(
        offset.shape[1] == channels,
        f"offset must have {channels} channels for deformable_group {deformable_group}, got {offset.shape[1]}",
    )


def _backward(
    grad_output: Tensor,
    terms: Terms,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    group: int,
    deformable_group: int,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients of ``terms``, by mmcv's rule at the border."""
    options = Options(stride, padding, dilation, group, deformable_group)
    grads = CONVOLVE.gradients(grad_output, terms, options, needs)
    if grads[1] is not None:
        edge = on_edge(terms.offset, terms.weight.shape[2:], stride, padding, dilation)
        grads[1] = grads[1].masked_fill(edge, 0)
    return grads


def _add(targets: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    for target, grad in zip(targets, grads):
        if grad is not None:
            target += grad


@operator
def modulated_deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    output: Tensor,
    columns: Tensor,
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    deformable_group: int,
    with_bias: bool,
) -> None:
    """Write the modulated deformable convolution of ``input`` into ``output`` (Zhu et al. 2019)."""
    _check_groups(input, weight, offset, group, deformable_group)
    offset, mask = (_leading_pixels(maps, output.shape[2:]) for maps in (offset, mask))
    geometry = ((stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w))
    output.copy_(ops.deform_conv2d(input, offset, weight, bias if with_bias else None, *geometry, mask))


@operator
def modulated_deform_conv_backward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    columns: Tensor,
    grad_input: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    grad_offset: Tensor,
    grad_mask: Tensor,
    grad_output: Tensor,
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    deformable_group: int,
    with_bias: bool,
) -> None:
    """Add the gradients of all operands of :func:`modulated_deform_conv_forward`."""
    size = grad_output.shape[2:]
    offset, mask, grad_offset, grad_mask = (_leading_pixels(m, size) for m in (offset, mask, grad_offset, grad_mask))
    terms = Terms(input, offset, weight, bias if with_bias else None, mask)
    geometry = ((stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w), group, deformable_group)
    grads = _backward(grad_output, terms, *geometry, [True, True, True, bool(with_bias), True])
    _add((grad_input, grad_offset, grad_weight, grad_bias, grad_mask), grads)


@operator
def deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    output: Tensor,
    columns: Tensor,
    ones: Tensor,
    kW: int,
    kH: int,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    im2col_step: int,
) -> None:
    """Write the deformable convolution of ``input`` into ``output`` (Dai et al. 2017)."""
    _check_groups(input, weight, offset, group, deformable_group)
    geometry = ((dH, dW), (padH, padW), (dilationH, dilationW))
    output.copy_(ops.deform_conv2d(input, offset, weight, None, *geometry))


@operator
def deform_conv_backward_input(
    input: Tensor,
    offset: Tensor,
    gradOutput: Tensor,
    gradInput: Tensor,
    gradOffset: Tensor,
    weight: Tensor,
    columns: Tensor,
    kW: int,
    kH: int,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    im2col_step: int,
) -> None:
    """Add the gradients of input and offset."""
    geometry = ((dH, dW), (padH, padW), (dilationH, dilationW), group, deformable_group)
    terms = Terms(input, offset, weight, None, None)
    grads = _backward(gradOutput, terms, *geometry, [True, True, False, False, False])
    _add((gradInput, gradOffset), grads)


@operator
def deform_conv_backward_parameters(
    input: Tensor,
    offset: Tensor,
    gradOutput: Tensor,
    gradWeight: Tensor,
    columns: Tensor,
    ones: Tensor,
    kW: int,
    kH: int,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    scale: float,
    im2col_step: int,
) -> None:
    """Add the gradient of the weight, times ``scale``."""
    geometry = ((dH, dW), (padH, padW), (dilationH, dilationW), group, deformable_group)
    terms = Terms(input, offset, gradWeight, None, None)  # the weight's values do not matter to its gradient
    grads = _backward(gradOutput, terms, *geometry, [False, False, True, False, False])
    assert grads[2] is not None
    gradWeight += grads[2] * scale


@operator
def ms_deform_attn_forward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_loc: Tensor,
    attn_weight: Tensor,
    im2col_step: int,
) -> Tensor:
    """Return (B, Q, M * d): :func:`attn_plugins.ops.deformable_attention` with mmcv's arguments."""
    return ops.deformable_attention(value, spatial_shapes, sampling_loc, attn_weight)


@operator
def ms_deform_attn_backward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_loc: Tensor,
    attn_weight: Tensor,
    grad_output: Tensor,
    grad_value: Tensor,
    grad_sampling_loc: Tensor,
    grad_attn_weight: Tensor,
    im2col_step: int,
) -> None:
    """Add the gradients of value, locations and weights."""
    B, Q, M, L, K = attn_weight.shape
    terms = AttentionTerms(value, sampling_loc.reshape(B, Q, M, L * K, 2), attn_weight.reshape(B, Q, M, L * K))
    sizes = [size for shape in shapes_on_host(spatial_shapes) for size in shape]
    grads = ATTEND.gradients(grad_output, terms, AttentionOptions(sizes, [K] * L), [True] * 3)
    targets = (grad_value, grad_sampling_loc, grad_attn_weight)
    _add(targets, [None if grad is None else grad.view_as(target) for grad, target in zip(grads, targets)])
