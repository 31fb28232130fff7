"""Region "sampled": deformable convolution, v1 and v2 (modulated), in one and two dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.arguments import check_dim, check_tensors, expand
from ...core.operator import Operator
from ...core.strides import memory_format
from . import cpu, cuda, eager, onnx, torchvision_kernels
from .operands import Options, Terms


def deform_conv2d(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """Convolve at learned, fractional sampling positions (Zhu et al. 2019, Eq. 4; Dai et al. 2017).

    Output pixel q is ``sum_k weight_k * mask_kq * input(q + p_k + offset_kq)``, where the input is interpolated
    bilinearly and is 0 outside the map. Semantics, shapes and the order of offsets are those of
    ``torchvision.ops.deform_conv2d``. Offsets are in pixels; a NaN one reads NaN, an infinite one 0.

    Under ``torch.use_deterministic_algorithms(True)``, two runs have equal bits. The CUDA kernels then sum the input's
    gradient in integers: with 3x3 taps and 64x64 output pixels, each term errs by at most 2^-42 times the largest mask
    and the largest gradient of a sample. PyTorch computes float64's backward there, and that of calls which torchvision
    serves.

    Args:
        input: (B, C, H, W).
        offset: (B, D * Kh * Kw * 2, Ho, Wo): for each offset group and tap the row offset, then the column offset.
            Each of the D offset groups applies to C / D consecutive channels.
        weight: (C_out, C / groups, Kh, Kw); its second size determines the number of groups.
        bias: (C_out,).
        stride: Distance between neighboring output pixels, in input pixels.
        padding: Zeros added on each side of the input.
        dilation: Distance between neighboring taps, in input pixels.
        mask: (B, D * Kh * Kw, Ho, Wo), the modulation of v2; None for v1.

    Returns:
        (B, C_out, Ho, Wo), channels-last if ``input`` is.

    Raises:
        ValueError: A shape, a device or a convolution parameter does not match.
        TypeError: The tensors are not floating-point or do not share one dtype.
    """
    stride = expand("stride", stride, 2, 1)
    padding = expand("padding", padding, 2, 0)
    dilation = expand("dilation", dilation, 2, 1)
    terms = Terms(input, offset, weight, bias, mask)
    return CONVOLVE(terms, _checked(terms, stride, padding, dilation))


def deform_conv1d(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """Convolve a sequence at learned, fractional positions: :func:`deform_conv2d` in one dimension.

    Args:
        input: (B, C, L).
        offset: (B, D * K, L_out), in positions, for D offset groups of C / D consecutive channels.
        weight: (C_out, C / groups, K).
        bias: (C_out,).
        stride: Distance between neighboring output positions.
        padding: Zeros added at both ends.
        dilation: Distance between neighboring taps.
        mask: (B, D * K, L_out), or None.

    Returns:
        (B, C_out, L_out).

    Raises:
        ValueError: A shape, a device or a convolution parameter does not match.
        TypeError: The tensors are not floating-point or do not share one dtype.
    """
    geometry = expand("stride", stride, 1, 1), expand("padding", padding, 1, 0), expand("dilation", dilation, 1, 1)
    options = _checked(Terms(input, offset, weight, bias, mask), *geometry)
    # A sequence is a map with one row and row offsets of 0.
    offset = torch.stack((torch.zeros_like(offset), offset), 2).flatten(1, 2).unsqueeze(2)
    mask = None if mask is None else mask.unsqueeze(2)
    options = options._replace(
        stride=(1, *options.stride), padding=(0, *options.padding), dilation=(1, *options.dilation)
    )
    return CONVOLVE(Terms(input.unsqueeze(2), offset, weight.unsqueeze(2), bias, mask), options).squeeze(2)


def _checked(terms: Terms, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> Options:
    """Check the terms of maps or of sequences, and return the geometry with the numbers of groups."""
    input, offset, weight, bias, mask = terms
    check_tensors("input", ("offset", "weight"), input=input, offset=offset, weight=weight, bias=bias, mask=mask)
    axes = len(stride)
    check_dim("input", input, "(B, C, L)" if axes == 1 else "(B, C, H, W)")
    check_dim("weight", weight, "(C_out, C / groups, K)" if axes == 1 else "(C_out, C / groups, Kh, Kw)")
    check_dim("offset", offset, "(B, D * K, L_out)" if axes == 1 else "(B, D * Kh * Kw * 2, Ho, Wo)")
    (B, C, *size), (out_channels, group_channels, *kernel), given = input.shape, weight.shape, offset.shape
    groups = _groups(C, out_channels, group_channels, kernel)
    if bias is not None and bias.shape != (out_channels,):
        raise ValueError(
            f"bias must have shape ({out_channels},), one for each of weight's outputs, got {tuple(bias.shape)}"
        )
    taps = math.prod(kernel)
    output = list(map(_output_size, size, kernel, stride, padding, dilation))
    offset_groups = given[1] // (axes * taps)
    if offset_groups == 0 or C % offset_groups or given != (B, offset_groups * axes * taps, *output):
        wanted = f"({B}, D * {axes * taps}, {', '.join(map(str, output))})"
        s, p, d = (option[0] if axes == 1 else option for option in (stride, padding, dilation))
        raise ValueError(
            f"offset must have shape (B, D * {axes * taps}, {'L_out' if axes == 1 else 'Ho, Wo'}) = {wanted}, with D "
            f"dividing the {C} channels of input, for a weight of shape {tuple(weight.shape)}, "
            f"stride {s}, padding {p} and dilation {d}, got {tuple(given)}"
        )
    shape = (B, offset_groups * taps, *output)
    if mask is not None and mask.shape != shape:
        text = f"offset's shape {shape}" if axes == 1 else f"shape {shape}, one value a sample of offset"
        raise ValueError(f"mask must have {text}, got {tuple(mask.shape)}")
    return Options(stride, padding, dilation, groups, offset_groups)


def _output_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    output = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    if output < 1:
        raise ValueError(
            f"input is too small: size {size} with padding {padding} has no room for weight's kernel of {kernel} with "
            f"dilation {dilation}"
        )
    return output


def _groups(C: int, out_channels: int, group_channels: int, kernel: Sequence[int]) -> int:
    """Check the shape of the weight, and return the number of groups."""
    shape = (out_channels, group_channels, *kernel)
    if min(shape) < 1:
        raise ValueError(f"weight must have no axis of size 0, got shape {shape}")
    groups = C // group_channels
    if groups == 0 or groups * group_channels != C or out_channels % groups:
        raise ValueError(
            f"weight of shape {shape} does not fit input of {C} channels: its second size must divide "
            f"the channels, and the number of groups so given must divide its first"
        )
    return groups


# --- the operator -------------------------------------------------------------------------------------------------


def _results(terms: Terms, options: Options) -> tuple[Tensor]:
    """Return an uninitialized output."""
    input, offset, weight, *_ = terms
    shape = (input.shape[0], weight.shape[0], offset.shape[2], offset.shape[3])
    return (torch.empty(shape, dtype=input.dtype, device=input.device, memory_format=memory_format(input)),)


def _gradient(name: str, term: Tensor) -> Tensor:
    """Return an uninitialized gradient in the kernels' memory format."""
    if name == "input":
        return torch.empty(term.shape, dtype=term.dtype, device=term.device, memory_format=memory_format(term))
    return term.new_empty(term.shape) if name == "weight" else torch.empty_like(term)


def _operations(terms: Any, options: Options) -> int:
    """Count two operations per multiply-add of the product with the weight, none for sampling (Zhu et al. 2019)."""
    out_channels, group_channels, Kh, Kw = terms.weight
    batch, _, Ho, Wo = terms.offset
    return 2 * batch * Ho * Wo * out_channels * group_channels * Kh * Kw


def _backward_operations(terms: Any, options: Options, needs: Sequence[bool]) -> int:
    """Count one product for the samples' gradients and one for the weight's."""
    needs_input, needs_offset, needs_weight, _, needs_mask = needs
    return (int(needs_input or needs_offset or needs_mask) + int(needs_weight)) * _operations(terms, options)


CONVOLVE = Operator(
    "deform_conv2d",
    Terms,
    Options,
    ("output",),
    fake=_results,
    fake_gradient=_gradient,
    reference=eager.definition,
    table=[cpu.BACKEND, cuda.BACKEND, torchvision_kernels.BACKEND, eager.BACKEND],
    operations=_operations,
    backward_operations=_backward_operations,
    shared=("weight", "bias"),
    onnx=onnx.node,
)
