"""Region "sampled": deformable convolution, v1 and v2 (modulated), in one and two dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import library
from ..arguments import check_dim, check_tensors, expand
from ..operator import under_autocast
from . import reference


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

    Output pixel q is ``sum_k weight_k * mask_kq * input(q + p_k + offset_kq)``, read by bilinear interpolation;
    outside the map the input is 0. The meaning, shapes and offset order are those of
    ``torchvision.ops.deform_conv2d``. Offsets are in pixels.

    Args:
        input: (B, C, H, W).
        offset: (B, D * Kh * Kw * 2, Ho, Wo): per offset group and tap first the row's offset, then the column's.
            Each of the D offset groups serves C / D consecutive channels.
        weight: (C_out, C / groups, Kh, Kw); the number of groups follows from its second size.
        bias: (C_out,).
        stride: Distance of neighbouring output pixels, in input pixels.
        padding: Zeros around the input.
        dilation: Distance of neighbouring taps, in input pixels.
        mask: (B, D * Kh * Kw, Ho, Wo): the modulation of v2; None for v1.

    Returns:
        (B, C_out, Ho, Wo), channels-last where ``input`` is.

    Raises:
        ValueError: a shape, a device or a convolution parameter does not fit.
        TypeError: the tensors are not floating or not of one dtype.
    """
    stride = expand("stride", stride, 2, 1)
    padding = expand("padding", padding, 2, 0)
    dilation = expand("dilation", dilation, 2, 1)
    check_tensors("input", input=input, offset=offset, weight=weight, bias=bias, mask=mask)
    check_dim("input", input, "(B, C, H, W)")
    check_dim("weight", weight, "(C_out, C / groups, Kh, Kw)")
    check_dim("offset", offset, "(B, D * Kh * Kw * 2, Ho, Wo)")
    groups = _check_weight(input, weight, bias)
    B, C, *size = input.shape
    Kh, Kw = weight.shape[2:]
    Ho, Wo = (_output_size(*sizes) for sizes in zip(size, (Kh, Kw), stride, padding, dilation))
    offset_groups = offset.shape[1] // (2 * Kh * Kw)
    if offset_groups == 0 or C % offset_groups or offset.shape != (B, 2 * offset_groups * Kh * Kw, Ho, Wo):
        raise ValueError(
            f"offset must have shape (B, D * {2 * Kh * Kw}, Ho, Wo) = ({B}, D * {2 * Kh * Kw}, {Ho}, {Wo}) with "
            f"D dividing the {C} channels, got {tuple(offset.shape)}"
        )
    if mask is not None and mask.shape != (B, offset_groups * Kh * Kw, Ho, Wo):
        raise ValueError(
            f"mask must have shape {(B, offset_groups * Kh * Kw, Ho, Wo)}, one value a sample of offset, "
            f"got {tuple(mask.shape)}"
        )
    if not library.serves(input.device.type):
        output = under_autocast(
            lambda x, o, w, b, m: reference.deform_conv2d(x, o, w, b, m, stride, padding, dilation),
            (input, offset, weight, bias, mask),
            input.device.type,
        )
        return output.contiguous(memory_format=_memory_format(input))
    return torch.ops.attn_plugins.deform_conv2d(
        input, offset, weight, bias, mask, stride, padding, dilation, groups, offset_groups
    )


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
        offset: (B, D * K, L_out), in positions; D offset groups of C / D consecutive channels.
        weight: (C_out, C / groups, K).
        bias: (C_out,).
        stride: Distance of neighbouring output positions.
        padding: Zeros at both ends.
        dilation: Distance of neighbouring taps.
        mask: (B, D * K, L_out), or None.

    Returns:
        (B, C_out, L_out).

    Raises:
        ValueError: a shape, a device or a convolution parameter does not fit.
        TypeError: the tensors are not floating or not of one dtype.
    """
    (stride,) = expand("stride", stride, 1, 1)
    (padding,) = expand("padding", padding, 1, 0)
    (dilation,) = expand("dilation", dilation, 1, 1)
    check_tensors("input", input=input, offset=offset, weight=weight, bias=bias, mask=mask)
    check_dim("input", input, "(B, C, L)")
    check_dim("weight", weight, "(C_out, C / groups, K)")
    check_dim("offset", offset, "(B, D * K, L_out)")
    _check_weight(input, weight, bias)
    B, C, length = input.shape
    K = weight.shape[2]
    L_out = _output_size(length, K, stride, padding, dilation)
    offset_groups = offset.shape[1] // K
    if offset_groups == 0 or C % offset_groups or offset.shape != (B, offset_groups * K, L_out):
        raise ValueError(
            f"offset must have shape (B, D * {K}, L_out) = ({B}, D * {K}, {L_out}) with D dividing the {C} "
            f"channels, got {tuple(offset.shape)}"
        )
    if mask is not None and mask.shape != offset.shape:
        raise ValueError(f"mask must have offset's shape {tuple(offset.shape)}, got {tuple(mask.shape)}")
    # A sequence is a map of one row, sampled at row offset 0.
    offset = torch.stack((torch.zeros_like(offset), offset), 2).flatten(1, 2)
    output = deform_conv2d(
        input.unsqueeze(2),
        offset.unsqueeze(2),
        weight.unsqueeze(2),
        bias,
        (1, stride),
        (0, padding),
        (1, dilation),
        None if mask is None else mask.unsqueeze(2),
    )
    return output.squeeze(2)


def _output_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    output = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    if output < 1:
        raise ValueError(
            f"input is too small: size {size} with padding {padding} has no room for a kernel of {kernel} with "
            f"dilation {dilation}"
        )
    return output


def _check_weight(input: Tensor, weight: Tensor, bias: Tensor | None) -> int:
    """Check the weight's and the bias's shape and return the number of groups."""
    C = input.shape[1]
    out_channels, group_channels, *kernel = weight.shape
    if min(out_channels, group_channels, *kernel) < 1:
        raise ValueError(f"weight must have no axis of size 0, got shape {tuple(weight.shape)}")
    groups = C // group_channels
    if groups == 0 or groups * group_channels != C or out_channels % groups:
        raise ValueError(
            f"weight of shape {tuple(weight.shape)} does not fit input of {C} channels: its second size must divide "
            f"the channels, and the number of groups so given must divide its first"
        )
    if bias is not None and bias.shape != (out_channels,):
        raise ValueError(f"bias must have shape ({out_channels},), got {tuple(bias.shape)}")
    return groups


# --- fake functions, gradients, autocast, FLOPs ---------------------------------------------------------------


def _memory_format(like: Tensor) -> torch.memory_format:
    """Channels-last where ``like`` is, and not contiguous as well (the rule of csrc/sampled/deform_conv.h)."""
    if not like.is_contiguous() and like.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def _fake(input, offset, weight, bias, mask, stride, padding, dilation, groups, offset_groups):
    shape = (input.shape[0], weight.shape[0], offset.shape[2], offset.shape[3])
    return torch.empty(shape, dtype=input.dtype, device=input.device, memory_format=_memory_format(input))


def _fake_backward(
    grad_output,
    input,
    offset,
    weight,
    mask,
    stride,
    padding,
    dilation,
    groups,
    offset_groups,
    needs_input,
    needs_offset,
    needs_weight,
):
    none = input.new_empty(0)
    return (
        torch.empty(input.shape, dtype=input.dtype, device=input.device, memory_format=_memory_format(input))
        if needs_input
        else none,
        torch.empty_like(offset) if needs_offset else none.clone(),
        weight.new_empty(weight.shape) if needs_weight else none.clone(),
        torch.empty_like(mask) if needs_offset and mask is not None else none.clone(),
    )


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    input, offset, weight, bias, mask, *ctx.parameters = inputs
    ctx.save_for_backward(input, offset, weight, mask)


def _backward(ctx: Any, grad_output: Tensor) -> tuple:
    input, offset, weight, mask = ctx.saved_tensors
    needs = ctx.needs_input_grad  # of input, offset, weight, bias, mask, ...
    needs_offset = needs[1] or needs[4]
    grads: tuple[Tensor | None, ...] = (None,) * 4
    if needs[0] or needs_offset or needs[2]:
        arguments = (grad_output, input, offset, weight, mask, *ctx.parameters, needs[0], needs_offset, needs[2])
        if input.is_cuda and torch.are_deterministic_algorithms_enabled():
            # The CUDA kernel adds with atomics; the reference's index_add has a deterministic form.
            grads = _backward_by_image(*arguments)
        else:
            grads = torch.ops.attn_plugins.deform_conv2d_backward(*arguments)
    return (
        grads[0] if needs[0] else None,
        grads[1] if needs[1] else None,
        grads[2] if needs[2] else None,
        grad_output.sum((0, 2, 3)) if needs[3] else None,
        grads[3] if needs[4] else None,
        None,
        None,
        None,
        None,
        None,
    )


def _backward_by_image(
    grad_output: Tensor, input: Tensor, offset: Tensor, weight: Tensor, mask: Tensor | None, *parameters: Any
) -> tuple[Tensor, ...]:
    """:func:`_reference_backward`, an image at a time: it holds all samples of what it is given."""
    if input.shape[0] < 2:
        return _reference_backward(grad_output, input, offset, weight, mask, *parameters)
    images = [
        _reference_backward(grad, x, o, weight, m, *parameters)
        for grad, x, o, m in zip(
            grad_output.split(1), input.split(1), offset.split(1),
            [None] * len(input) if mask is None else mask.split(1),
        )
    ]  # fmt: skip
    grad_input, grad_offset, grad_weight, grad_mask = zip(*images)
    return torch.cat(grad_input), torch.cat(grad_offset), torch.stack(grad_weight).sum(0), torch.cat(grad_mask)


def _reference_backward(
    grad_output: Tensor,
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    offset_groups: int,
    needs_input: bool,
    needs_offset: bool,
    needs_weight: bool,
) -> tuple[Tensor, ...]:
    """``deform_conv2d_backward`` by differentiating the reference: differentiable itself, on any device."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        x, o, w = (_variable(t, create_graph) for t in (input, offset, weight))
        m = None if mask is None else _variable(mask, create_graph)
        output = reference.deform_conv2d(x, o, w, None, m, stride, padding, dilation)
        variables = ((x, needs_input), (o, needs_offset), (w, needs_weight), (m, needs_offset))
        wanted = [t for t, need in variables if t is not None and need]
        found = torch.autograd.grad(output, wanted, grad_output, create_graph=create_graph)
    grads = iter(found)
    return tuple(next(grads) if t is not None and need else input.new_empty(0) for t, need in variables)


def _variable(tensor: Tensor, create_graph: bool) -> Tensor:
    """``tensor`` itself where its own graph is to be continued, else a leaf that requires a gradient."""
    return tensor if create_graph and tensor.requires_grad else tensor.detach().requires_grad_()


def _setup_context_double(ctx: Any, inputs: tuple, output: tuple) -> None:
    grad_output, input, offset, weight, mask, *ctx.parameters = inputs
    ctx.save_for_backward(grad_output, input, offset, weight, mask)


def _double_backward(ctx: Any, *grads: Tensor | None) -> tuple:
    create_graph = torch.is_grad_enabled()
    needs = ctx.needs_input_grad[:5]
    with torch.enable_grad():
        tensors: list[Any] = [None if t is None else _variable(t, create_graph) for t in ctx.saved_tensors]
        outputs = _reference_backward(*tensors, *ctx.parameters)
        pairs = [(o, g) for o, g in zip(outputs, grads) if o.requires_grad and g is not None]
        found = torch.autograd.grad(
            [o for o, _ in pairs],
            [t for t, need in zip(tensors, needs) if need],
            [g for _, g in pairs],
            create_graph=create_graph,
            allow_unused=True,
        )
    result = iter(found)
    return (*(next(result) if need else None for need in needs), *(None,) * len(ctx.parameters))


def _flops(input_shape: Any, offset_shape: Any, weight_shape: Any, *args: Any, **kwargs: Any) -> int:
    """Two per multiply-add of the weights' product; sampling is free, as in Zhu et al. (2019)."""
    out_channels, group_channels, Kh, Kw = weight_shape
    return 2 * offset_shape[0] * offset_shape[2] * offset_shape[3] * out_channels * group_channels * Kh * Kw


def _flops_backward(
    grad_shape: Any, input_shape: Any, offset_shape: Any, weight_shape: Any, *args: Any, **kwargs: Any
) -> int:
    *_, needs_input, needs_offset, needs_weight = args
    products = int(needs_input or needs_offset) + int(needs_weight)
    return products * _flops(input_shape, offset_shape, weight_shape)


if library.has_schemas():
    from torch.utils.flop_counter import register_flop_formula

    torch.library.register_fake("attn_plugins::deform_conv2d", _fake)
    torch.library.register_fake("attn_plugins::deform_conv2d_backward", _fake_backward)
    torch.library.register_autograd("attn_plugins::deform_conv2d", _backward, setup_context=_setup_context)
    torch.library.register_autograd(
        "attn_plugins::deform_conv2d_backward", _double_backward, setup_context=_setup_context_double
    )
    library.register_autocast("deform_conv2d", cast=True)
    library.register_autocast("deform_conv2d_backward", cast=False)
    register_flop_formula(torch.ops.attn_plugins.deform_conv2d)(_flops)
    register_flop_formula(torch.ops.attn_plugins.deform_conv2d_backward)(_flops_backward)
