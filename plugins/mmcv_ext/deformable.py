"""Deformable convolution and multi-scale deformable attention, on this package's operators.

Tensors of several dtypes, such as half activations beside float32 weights, are computed in the widest of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from ..ops.deform_conv.deform_conv import CONVOLVE
from ..ops.deform_conv.edge_rule import on_edge
from ..ops.deform_conv.operands import Options, Terms
from ..ops.deformable_attention.without_autograd import attend, gradients
from .calls import check, operator, write


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


def _of_leading_pixels(grad: Tensor, shape: torch.Size) -> Tensor:
    """Return the gradient of maps of ``shape`` for that of their :func:`_leading_pixels`."""
    if grad.shape == shape:
        return grad
    flat = grad.flatten(1)
    return F.pad(flat, (0, shape[1:].numel() - flat.shape[1])).view(shape)


class Geometry(NamedTuple):
    """Rows before columns."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    group: int
    deformable_group: int

    @classmethod
    def of(cls, names: Sequence[str], arguments: Mapping[str, int]) -> Geometry:
        """Read mmcv's arguments, those of rows and columns under ``names``."""
        values = [arguments[name] for name in names]
        pairs = [(values[i], values[i + 1]) for i in (0, 2, 4)]
        return cls(pairs[0], pairs[1], pairs[2], arguments["group"], arguments["deformable_group"])


V1 = ("dH", "dW", "padH", "padW", "dilationH", "dilationW")  # of the convolution without masks
V2 = ("stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w")  # of the modulated one


def _alike(terms: Terms) -> Terms:
    """Return the terms in their widest dtype."""
    dtypes = {term.dtype for term in terms if term is not None}
    if len(dtypes) == 1:
        return terms
    dtype = functools.reduce(torch.promote_types, dtypes)
    return Terms._make(None if term is None else term.to(dtype) for term in terms)


def convolve(terms: Terms, geometry: Geometry) -> Tensor:
    """Check the numbers of groups, which this package's operator reads from the shapes, and convolve."""
    input, offset, weight, bias, mask = _alike(terms)
    C, needed = input.shape[1], weight.shape[1] * geometry.group
    check(
        needed == C,
        f"input must have {needed} channels for weight {tuple(weight.shape)} and group {geometry.group}, got {C}",
    )
    channels = 2 * geometry.deformable_group * weight.shape[2:].numel()
    check(
        offset.shape[1] == channels,
        f"offset must have {channels} channels for deformable_group {geometry.deformable_group}, got {offset.shape[1]}",
    )
    return ops.deform_conv2d(input, offset, weight, bias, *geometry[:3], mask)


def add_gradients(
    targets: Sequence[Tensor | None], grad_output: Tensor, terms: Terms, geometry: Geometry, scale: float = 1
) -> None:
    """Add the gradients of the terms that have a target, by mmcv's rule at the border."""
    needs = [target is not None for target in targets]
    terms = _alike(terms)
    grads = CONVOLVE.gradients(grad_output.to(terms.input.dtype), terms, Options(*geometry), needs)
    if grads[1] is not None:
        edge = on_edge(terms.offset, terms.weight.shape[2:], geometry.stride, geometry.padding, geometry.dilation)
        grads[1] = grads[1].masked_fill(edge, 0)
    for target, grad in zip(targets, grads):
        if target is not None and grad is not None:
            target.add_(_of_leading_pixels(grad, target.shape), alpha=scale)


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
    *,
    with_bias: bool,
    **geometry: int,
) -> None:
    """Write the modulated deformable convolution of ``input`` into ``output`` (Zhu et al. 2019)."""
    offset, mask = (_leading_pixels(maps, output.shape[2:]) for maps in (offset, mask))
    terms = Terms(input, offset, weight, bias if with_bias else None, mask)
    write(output, convolve(terms, Geometry.of(V2, geometry)))


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
    *,
    with_bias: bool,
    **geometry: int,
) -> None:
    """Add the gradients of all operands of :func:`modulated_deform_conv_forward`."""
    size = grad_output.shape[2:]
    offset, mask = (_leading_pixels(maps, size) for maps in (offset, mask))
    terms = Terms(input, offset, weight, bias if with_bias else None, mask)
    targets = Terms(grad_input, grad_offset, grad_weight, grad_bias if with_bias else None, grad_mask)
    add_gradients(targets, grad_output, terms, Geometry.of(V2, geometry))


@operator
def deform_conv_forward(
    input: Tensor, weight: Tensor, offset: Tensor, output: Tensor, columns: Tensor, ones: Tensor, **geometry: int
) -> None:
    """Write the deformable convolution of ``input`` into ``output`` (Dai et al. 2017)."""
    write(output, convolve(Terms(input, offset, weight, None, None), Geometry.of(V1, geometry)))


@operator
def deform_conv_backward_input(
    input: Tensor,
    offset: Tensor,
    gradOutput: Tensor,
    gradInput: Tensor,
    gradOffset: Tensor,
    weight: Tensor,
    columns: Tensor,
    **geometry: int,
) -> None:
    """Add the gradients of input and offset."""
    targets = Terms(gradInput, gradOffset, None, None, None)  # type: ignore[arg-type]
    add_gradients(targets, gradOutput, Terms(input, offset, weight, None, None), Geometry.of(V1, geometry))


@operator
def deform_conv_backward_parameters(
    input: Tensor,
    offset: Tensor,
    gradOutput: Tensor,
    gradWeight: Tensor,
    columns: Tensor,
    ones: Tensor,
    *,
    scale: float,
    **geometry: int,
) -> None:
    """Add the gradient of the weight, times ``scale``."""
    targets = Terms(None, None, gradWeight, None, None)  # type: ignore[arg-type]
    terms = Terms(input, offset, gradWeight, None, None)  # the weight's values do not matter to its gradient
    add_gradients(targets, gradOutput, terms, Geometry.of(V1, geometry), scale)


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
    return attend(value, spatial_shapes, sampling_loc, attn_weight)


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
    grads = gradients(grad_output, value, spatial_shapes, sampling_loc, attn_weight)
    for target, grad in zip((grad_value, grad_sampling_loc, grad_attn_weight), grads):
        target += grad
