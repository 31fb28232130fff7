"""Deformable convolution by Triton: one implicit GEMM, forward and backward, that never keeps its samples.

Memory beyond the results: channels-last copies of inputs that are stored otherwise (a chunk of images at a time),
float32 sums of the gradients of input and weight, and the packed weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import triton_launch
from ..backends import Backend
from ..triton_launch import power_of_two
from . import plain
from .operands import Options, Terms


class Tile(NamedTuple):
    """What a program works on at a time, at most, and what Triton compiles it with."""

    pixels: int
    outs: int
    channels: int
    num_warps: int
    num_stages: int
    maxnreg: int  # registers of a thread: two to three blocks then run on a multiprocessor


# By kernel and by how it multiplies; "tf32" is float32, as one or as three products. ``convolve`` and
# ``differentiate_weight`` sample again for every block of outs.
TILES = {
    "convolve": {
        "half": Tile(64, 256, 32, 8, 2, 128),
        "tf32": Tile(64, 128, 16, 4, 2, 255),
    },
    "differentiate_samples": {
        "half": Tile(32, 64, 32, 4, 2, 168),
        "tf32": Tile(32, 32, 32, 4, 2, 255),
    },
    "differentiate_weight": {
        "half": Tile(64, 256, 32, 8, 2, 128),
        "tf32": Tile(32, 128, 32, 4, 2, 255),
    },
}  # fmt: skip
CHUNK_PIXELS = 16384  # of the output, in a chunk of images
WIDE = 2**31  # elements of a chunk from which on places are 64 bits wide
WEIGHT_PROGRAMS = 288  # of differentiate_weight, which splits the pixels to have as many


class _Layer:
    """What all launches of a call share."""

    def __init__(self, terms: Terms, options: Options):
        weight = terms.weight
        self.options, self.dtype = options, weight.dtype
        self.outs, self.group_channels, Kh, self.kernel_width = weight.shape
        self.taps = Kh * self.kernel_width
        self.groups, self.offset_groups = options.groups, options.offset_groups
        self.channels, self.group_outs = self.groups * self.group_channels, self.outs // self.groups
        self.segment = math.gcd(self.group_channels, self.channels // self.offset_groups)
        self.precision = triton_launch.precision(self.dtype)

    def tile(self, kernel: str) -> Tile:
        """Return a kernel's tile, not larger than there are channels."""
        most = TILES[kernel]["tf32" if self.dtype == torch.float32 else "half"]
        outs, channels = power_of_two(self.group_outs), power_of_two(self.segment)
        return most._replace(outs=min(most.outs, outs), channels=min(most.channels, channels))

    def pack(self, weight: Tensor) -> Tensor:
        """(O, C / groups, Kh, Kw) -> (groups, taps, O / groups, C / groups), not contiguous."""
        return weight.reshape(self.groups, self.group_outs, self.group_channels, self.taps).permute(0, 3, 1, 2)

    def unpack(self, grad: Tensor) -> Tensor:
        """Turn (groups, taps, C / groups, O / groups) into (O, C / groups, Kh, Kw)."""
        shape = self.outs, self.group_channels, self.taps // self.kernel_width, self.kernel_width
        return grad.permute(0, 3, 2, 1).reshape(shape).contiguous()

    def launch(
        self, kernel: str, programs: int, tensors: Sequence[Tensor | None], input: Tensor, offset: Tensor,
        split: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Launch a kernel on a chunk.

        Args:
            kernel: Its name.
            programs: How many.
            tensors: Its arguments; the first one is a tensor.
            input: (B, H, W, C).
            offset: (B, D * Kh * Kw * 2, Ho, Wo).
            split: What the kernel takes after the geometry.
        """
        from . import triton_kernels  # here, since it needs Triton

        B, H, W, _ = input.shape
        Ho, Wo = offset.shape[2:]
        tile = self.tile(kernel)
        triton_launch.launch(
            getattr(triton_kernels, kernel), (programs,), *tensors, B * Ho * Wo, H, W, Ho, Wo,
            *self.options.stride, *self.options.padding, *self.options.dilation, *split,
            self.groups, self.offset_groups, self.group_channels, self.group_outs, self.segment,
            TAPS=self.taps, KERNEL_WIDTH=self.kernel_width, BLOCK_PIXELS=tile.pixels, BLOCK_OUTS=tile.outs,
            BLOCK_CHANNELS=tile.channels, EVEN_OUTS=self.group_outs % tile.outs == 0,
            EVEN_CHANNELS=self.segment % tile.channels == 0,
            WIDE=max(input.numel(), offset.numel(), B * Ho * Wo * self.outs) >= WIDE,
            PRECISION=self.precision, UPCAST=triton_launch.upcast(self.dtype),
            num_warps=tile.num_warps, num_stages=tile.num_stages, maxnreg=tile.maxnreg,
        )  # fmt: skip


def refuses(terms: Terms, options: Options) -> str | None:
    return triton_launch.refusal(terms.input)


def refuses_backward(terms: Terms, options: Options) -> str | None:
    """Refuse where sums must be deterministic: the reference's index_add has a deterministic form."""
    return "its backward is not deterministic" if torch.are_deterministic_algorithms_enabled() else None


def forward(terms: Terms, options: Options) -> Tensor:
    input, offset, weight, bias, mask = terms
    layer = _Layer(terms, options)
    layout = plain.memory_format(input)
    shape = (input.shape[0], layer.outs, *offset.shape[2:])
    output = torch.empty(shape, dtype=input.dtype, device=input.device, memory_format=layout)
    packed = layer.pack(weight).contiguous()
    bias = None if bias is None else bias.contiguous()
    tile = layer.tile("convolve")
    blocks = layer.groups * _ceil(layer.group_outs, tile.outs)
    for images in _chunks(offset):
        x, shift, modulation = _chunk(terms, images)
        target = output[images].permute(0, 2, 3, 1)
        found = target if layout == torch.channels_last else target.new_empty(target.shape)
        programs = _ceil(_pixels(shift), tile.pixels) * blocks
        layer.launch("convolve", programs, (x, shift, modulation, packed, bias, found), x, shift)
        if found is not target:  # a kernel that writes channels first runs out of registers
            target.copy_(found)
    return output


def backward(grad_output: Tensor, terms: Terms, options: Options, needs: Sequence[bool]) -> list[Tensor | None]:
    input, offset, weight, bias, mask = terms
    needs_input, needs_offset, needs_weight, needs_bias, needs_mask = (
        need and term is not None for need, term in zip(needs, terms)
    )
    layer = _Layer(terms, options)
    layout = plain.memory_format(input)
    grad_input = torch.empty_like(input, memory_format=layout) if needs_input else None
    grad_offset = offset.new_empty(offset.shape) if needs_offset else None
    grad_mask = mask.new_empty(mask.shape) if mask is not None and needs_mask else None
    grad_weight = None
    packed = layer.pack(weight).transpose(2, 3).contiguous()
    for images in _chunks(offset):
        x, shift, modulation = _chunk(terms, images)
        grad = _channels_last(grad_output[images])
        if needs_input or needs_offset or needs_mask:
            sums = torch.zeros_like(x, dtype=torch.float32) if needs_input else None
            results = (sums, *(None if t is None else t[images] for t in (grad_offset, grad_mask)))
            programs = _ceil(_pixels(shift), layer.tile("differentiate_samples").pixels)
            layer.launch(
                "differentiate_samples", programs * layer.taps * layer.offset_groups,
                (grad, x, shift, modulation, packed, *results), x, shift,
            )  # fmt: skip
            if grad_input is not None and sums is not None:
                grad_input[images].copy_(sums.permute(0, 3, 1, 2))
        if needs_weight:
            part = _weight_gradient(layer, grad, x, shift, modulation)
            grad_weight = part if grad_weight is None else grad_weight.add_(part)
    return [
        grad_input,
        _laid_out(grad_offset, offset),
        None if grad_weight is None else layer.unpack(grad_weight).to(weight.dtype),
        grad_output.sum((0, 2, 3)) if needs_bias else None,
        _laid_out(grad_mask, mask),
    ]


def _weight_gradient(layer: _Layer, grad: Tensor, input: Tensor, offset: Tensor, mask: Tensor | None) -> Tensor:
    """Return (groups, taps, C / groups, O / groups) in float32: sums over parts of the pixels, in a fixed order."""
    tile = layer.tile("differentiate_weight")
    segments = layer.channels // layer.segment
    tiles = layer.taps * segments * _ceil(layer.segment, tile.channels) * _ceil(layer.group_outs, tile.outs)
    steps = _ceil(_pixels(offset), tile.pixels)
    share = _ceil(steps, max(1, WEIGHT_PROGRAMS // tiles))
    splits = _ceil(steps, share)
    shape = (splits, layer.groups, layer.taps, layer.group_channels, layer.group_outs)
    parts = torch.empty(shape, dtype=torch.float32, device=grad.device)
    layer.launch(
        "differentiate_weight", tiles * splits, (grad, input, offset, mask, parts), input, offset,
        split=(share * tile.pixels,),
    )  # fmt: skip
    return parts.sum(0)


def _chunks(offset: Tensor) -> Iterator[slice]:
    """Images of about :data:`CHUNK_PIXELS`, as even as can be."""
    B, _, Ho, Wo = offset.shape
    images = _ceil(B, max(1, _ceil(B, max(1, CHUNK_PIXELS // (Ho * Wo)))))
    for first in range(0, B, images or 1):
        yield slice(first, min(first + images, B))


def _chunk(terms: Terms, images: slice) -> tuple[Tensor, Tensor, Tensor | None]:
    """Input, offset and mask of some images as kernels read them."""
    mask = None if terms.mask is None else terms.mask[images].contiguous()
    return _channels_last(terms.input[images]), terms.offset[images].contiguous(), mask


def _channels_last(maps: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, H, W, C), contiguous; a copy where memory is laid out otherwise."""
    return maps.permute(0, 2, 3, 1).contiguous()


def _laid_out(found: Tensor | None, like: Tensor | None) -> Tensor | None:
    """``found``, contiguous, in the memory format that ``empty_like`` gives."""
    if found is None or like is None or like.is_contiguous():
        return found
    return torch.empty_like(like).copy_(found)


def _pixels(offset: Tensor) -> int:
    return offset.shape[0] * offset.shape[2] * offset.shape[3]


def _ceil(size: int, step: int) -> int:
    return -(-size // step)


BACKEND = Backend(triton_launch.NAME, refuses, forward, backward, refuses_backward, allocates=True)
