"""Deformable convolution in plain PyTorch, for devices without a kernel: by ``grid_sample``, else by its definition.

``grid_sample`` takes positions as fractions of a map. Maps are padded to powers of two, so that whole pixels stay
whole, where the derivative jumps; what is padded reads 0 as everything beyond the map. NaN and infinite positions,
which it treats differently on each device, are moved beside the map, and NaN is put where the definition reads it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.arguments import at_least_float32
from ...core.backends import Backend, Gradients, never
from ...core.devices import has_grid_sample
from ...core.gradients import gradients_by_image
from ...core.strides import memory_format
from . import reference
from .operands import Options, Terms


class _Samples(NamedTuple):
    """Operands of ``grid_sample``, for B * D images of taps * pixels, N = Ho * Wo pixels, and what it reads.

    Attributes:
        maps: (B * D, C / D, H', W'), where H' and W' are powers of two.
        grid: (B * D, taps, N, 2), columns before rows, from -1 to 1.
        lost: (B * D, 2, taps, N), where rows, or columns, are not finite.
        read: (B * D, C / D, taps, N).
    """

    maps: Tensor
    grid: Tensor
    lost: Tensor
    read: Tensor


def _sampled(terms: Terms, options: Options) -> _Samples:
    input, offset = at_least_float32(terms.input, terms.offset)
    B, C, H, W = input.shape
    Kh, Kw = terms.weight.shape[2:]
    Ho, Wo = offset.shape[2:]
    D = options.offset_groups
    maps = input.reshape(B * D, C // D, H, W)
    maps = F.pad(maps, (0, _power_of_two(W) - W, 0, _power_of_two(H) - H))
    shift = offset.reshape(B * D, Kh, Kw, 2, Ho, Wo)
    positions, beyond, fractions = [], [], []
    for axis, (size, taps, steps) in enumerate(((H, (Kh, 1, 1, 1), (Ho, 1)), (W, (Kw, 1, 1), (1, Wo)))):
        first, place = (
            torch.arange(max(shape), dtype=offset.dtype, device=offset.device).view(shape) for shape in (taps, steps)
        )
        base = place * options.stride[axis] - options.padding[axis] + first * options.dilation[axis]
        position = base + shift[:, :, :, axis]
        beyond.append((position < -1) | (position >= size))
        fractions.append((position.nan_to_num(-2).clamp(-2, size + 1) * 2 + 1) / maps.shape[2 + axis] - 1)
        positions.append(position)
    places, beside, grid = (  # (B * D, 2, taps, N)
        torch.stack(parts, 1).flatten(4).flatten(2, 3) for parts in (positions, beyond, fractions)
    )
    grid = grid.flip(1).movedim(1, 3)
    read = torch.grid_sampler_2d(maps, grid, 0, 0, False)  # bilinear, zeros beyond
    nowhere = places.isnan().any(1, keepdim=True) & ~beside.any(1, keepdim=True)
    return _Samples(maps, grid, ~places.isfinite(), read.masked_fill_(nowhere, torch.nan))


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _refuses_grid_sample(terms: Terms, backward: bool = False) -> bool:
    filled = all(term is None or term.numel() for term in terms)
    return not filled or not has_grid_sample(terms.input, backward)


def definition(terms: Terms, options: Options) -> Tensor:
    """Compute the reference, channels-last where the input is."""
    output = reference.deform_conv2d(*terms, *options[:3])
    return output.contiguous(memory_format=memory_format(terms.input))


def forward(terms: Terms, options: Options) -> Tensor:
    if _refuses_grid_sample(terms):
        return definition(terms, options)
    weight, bias, mask = at_least_float32(*terms[2:])
    read = _sampled(terms, options).read
    if mask is not None:
        read = read * mask.reshape(read[:, :1].shape)
    output = _kernels(weight, options).matmul(_columns(read, options))
    output = output.reshape(len(read) // options.offset_groups, len(weight), *terms.offset.shape[2:])
    output = (output if bias is None else output + bias.view(-1, 1, 1)).to(terms.input.dtype)
    return output.contiguous(memory_format=memory_format(terms.input))


def _columns(read: Tensor, options: Options) -> Tensor:
    """Return samples as (B, groups, channels of a group * taps, N)."""
    return read.reshape(read.shape[0] // options.offset_groups, options.groups, -1, read.shape[3])


def _kernels(weight: Tensor, options: Options) -> Tensor:
    return weight.reshape(options.groups, weight.shape[0] // options.groups, -1)


def backward(grad_output: Tensor, terms: Terms, options: Options, needs: dict[str, bool]) -> Gradients:
    if _refuses_grid_sample(terms, backward=True):
        shared = ("weight", "bias")
        return gradients_by_image(lambda one: definition(one, options), grad_output, terms, needs, shared)
    weight, _, mask, grad = at_least_float32(*terms[2:], grad_output)
    grad = grad.reshape(grad.shape[0], options.groups, -1, grad[0, 0].numel())
    maps, grid, lost, read = _sampled(terms, options)
    mask = None if mask is None else mask.reshape(read[:, :1].shape)
    grads: dict[str, Any] = {}
    if needs["bias"] and terms.bias is not None:
        grads["bias"] = grad.sum((0, 3)).flatten()
    if needs["weight"]:
        columns = _columns(read if mask is None else read * mask, options)
        grads["weight"] = grad.matmul(columns.mT).sum(0).view(weight.shape)
    of_read = _kernels(weight, options).mT.matmul(grad).view(read.shape)
    if needs["mask"] and mask is not None:
        grads["mask"] = (of_read * read).sum(1).view(terms.mask.shape)  # type: ignore[union-attr]
    if needs["input"] or needs["offset"]:
        of_read = of_read if mask is None else of_read * mask
        wanted = [needs["input"], True]
        of_maps, of_grid = torch.ops.aten.grid_sampler_2d_backward(of_read, maps, grid, 0, 0, False, wanted)
        if needs["input"]:
            H, W = terms.input.shape[2:]
            grads["input"] = of_maps[..., :H, :W].reshape(terms.input.shape)
        if needs["offset"]:
            # A derivative along one axis is a difference of zeros, weighted by the position along the other one.
            of_axes = [of_grid[..., 1 - axis] * (2 / maps.shape[2 + axis]) for axis in (0, 1)]
            of_offset = torch.stack(of_axes, 1).masked_fill_(lost.flip(1), torch.nan)
            grads["offset"] = of_offset.transpose(1, 2).reshape(terms.offset.shape)
    return {name: _like(getattr(terms, name), grad, name) for name, grad in grads.items()}


def _like(term: Tensor, grad: Tensor, name: str) -> Tensor:
    layout = memory_format(term) if name == "input" else torch.contiguous_format
    return grad.to(term.dtype).contiguous(memory_format=layout)


BACKEND = Backend("eager", never, forward, backward)
