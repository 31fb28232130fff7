"""Calls whose Triton kernels :mod:`tools.triton_report` compiles, at the main shapes, with meta tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attn_plugins.ops.criss_cross import operands as criss_cross_operands
from attn_plugins.ops.criss_cross.criss_cross_attention import ATTEND as ATTEND_CRISS_CROSS
from attn_plugins.ops.everywhere.global_attention import ATTEND as ATTEND_GLOBAL
from attn_plugins.ops.everywhere.operands import GlobalOptions, GlobalTerms, SequenceOptions, SequenceTerms
from attn_plugins.ops.everywhere.sequence_attention import ATTEND as ATTEND_SEQUENCE
from attn_plugins.ops.operator import Operator
from attn_plugins.ops.sampled import operands as sampled
from attn_plugins.ops.sampled.deform_conv import CONVOLVE

Case = Callable[[], tuple[Operator, Any, Any]]  # an operator, its terms, its options
CASES: dict[str, Case] = {}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def deform_conv(B: int, C: int, H: int, W: int, offset_groups: int, dtype: torch.dtype) -> Case:
    """Return a modulated 3x3 convolution from C to C channels in channels-last memory."""

    def make() -> tuple[Operator, Any, Any]:
        shapes = (B, C, H, W), (B, 18 * offset_groups, H, W), (C, C, 3, 3), (C,), (B, 9 * offset_groups, H, W)
        input, *others = (meta(*shape, dtype=dtype) for shape in shapes)
        terms = sampled.Terms(input.to(memory_format=torch.channels_last), *others)
        return CONVOLVE, terms, sampled.Options((1, 1), (1, 1), (1, 1), 1, offset_groups)

    return make


def everywhere(
    B: int, M: int, queries: tuple[int, int], keys: tuple[int, int], d: int, dtype: torch.dtype, present: str = "1111"
) -> Case:  # fmt: skip
    """Return attention between maps, stored as (B, H, W, M, d), with the terms that ``present`` flags."""

    def heads(size: tuple[int, int]) -> torch.Tensor:
        return meta(B, *size, M, d, dtype=dtype).permute(0, 3, 1, 2, 4)

    def make() -> tuple[Operator, Any, Any]:
        content, row, column, key = (each == "1" for each in present)
        terms = GlobalTerms(
            heads(queries) if content else None,
            heads(keys) if content else None,
            heads(keys),
            meta(B, M, *queries, keys[0], dtype=dtype) if row else None,
            meta(B, M, *queries, keys[1], dtype=dtype) if column else None,
            meta(B, M, *keys, dtype=dtype) if key else None,
        )
        return ATTEND_GLOBAL, terms, GlobalOptions(0.125)

    return make


def sequence(
    B: int, M: int, T: int, S: int, d: int, dtype: torch.dtype, *, K: int = 0, position: tuple[int, ...] = (),
    causal: bool = False, padded: bool = False, segments: int = 0,
) -> Case:  # fmt: skip
    """Return attention over a sequence, with a band of K taps and with position logits of shape ``position``.

    ``segments`` is the number of rows of segment ids, 0 for none.
    """

    def make() -> tuple[Operator, Any, Any]:
        query, key, value = (meta(B, M, n, d, dtype=dtype) for n in (T, S, S))
        band = meta(B, M, T, K, dtype=dtype) if K else None
        mask = meta(B, S, dtype=torch.bool) if padded else None
        table = meta(*position, dtype=dtype) if position else None
        return (
            ATTEND_SEQUENCE,
            SequenceTerms(query, key, value, band, None, table),
            SequenceOptions(mask, 0, causal, 0.125, meta(segments, S, dtype=torch.int32) if segments else None),
        )

    return make


def criss_cross(
    B: int, M: int, H: int, W: int, d: int, dv: int, dtype: torch.dtype, *, position: bool = False
) -> Case:  # fmt: skip
    """Return criss-cross attention on a map, stored as (B, H, W, M, d)."""

    def make() -> tuple[Operator, Any, Any]:
        query, key, value = (meta(B, H, W, M, width, dtype=dtype).permute(0, 3, 1, 2, 4) for width in (d, d, dv))
        logits = meta(B, M, H, W, H + W, dtype=dtype) if position else None
        terms = criss_cross_operands.Terms(query, key, value, logits)
        return ATTEND_CRISS_CROSS, terms, criss_cross_operands.Options(1.0, recompute=True)

    return make


for _name, _dtype in DTYPES.items():
    CASES |= {
        f"deform_conv2d, (16,256,64,64), {_name}": deform_conv(16, 256, 64, 64, 1, _dtype),
        f"deform_conv2d, (2,256,100,152), {_name}": deform_conv(2, 256, 100, 152, 1, _dtype),
        f"deform_conv2d, (2,256,100,152), 4 offset groups, {_name}": deform_conv(2, 256, 100, 152, 4, _dtype),
    }
    CASES |= {
        f"global_attention, 1111, (2,8,50,84,32) of (25,42), {_name}": everywhere(2, 8, (50, 84), (25, 42), 32, _dtype),
        f"global_attention, SAM, (1,12,64,64,64), {_name}": everywhere(1, 12, (64, 64), (64, 64), 64, _dtype, "1110"),
        f"global_attention, halo windows, (512,4,7,7,32) of (13,13), {_name}":
            everywhere(512, 4, (7, 7), (13, 13), 32, _dtype, "1110"),
        f"global_attention, AAConv, (8,8,40,40,20), {_name}": everywhere(8, 8, (40, 40), (40, 40), 20, _dtype, "1110"),
        f"global_attention, content, (8,12,14,14,64), {_name}":
            everywhere(8, 12, (14, 14), (14, 14), 64, _dtype, "1000"),
        f"global_attention, 1110, (2,4,32,32,128), {_name}": everywhere(2, 4, (32, 32), (32, 32), 128, _dtype, "1110"),
    }  # fmt: skip
    CASES |= {
        f"sequence_attention, (4,8,1024,64), band of 21, {_name}": sequence(4, 8, 1024, 1024, 64, _dtype, K=21),
        f"sequence_attention, (4,8,1024,64), causal, {_name}": sequence(4, 8, 1024, 1024, 64, _dtype, causal=True),
        f"sequence_attention, (2048,4,49,32), windows, {_name}":
            sequence(2048, 4, 49, 49, 32, _dtype, position=(1, 4, 49, 49)),
        f"sequence_attention, (2048,4,49,32), shifted windows, {_name}":
            sequence(2048, 4, 49, 49, 32, _dtype, position=(1, 4, 49, 49), segments=64),
        f"sequence_attention, (8,4,100,64), across, {_name}": sequence(8, 4, 100, 700, 64, _dtype, padded=True),
        f"sequence_attention, (2,4,512,128), wide heads, {_name}": sequence(2, 4, 512, 512, 128, _dtype, K=21),
    }  # fmt: skip
    CASES |= {
        f"criss_cross_attention, (1,1,97,97), d 64, dv 512, {_name}": criss_cross(1, 1, 97, 97, 64, 512, _dtype),
        f"criss_cross_attention, (1,1,97,97), d 64, dv 512, position logits, {_name}":
            criss_cross(1, 1, 97, 97, 64, 512, _dtype, position=True),
        f"criss_cross_attention, (2,8,64,128,32), {_name}": criss_cross(2, 8, 64, 128, 32, 32, _dtype),
        f"criss_cross_attention, (2,8,64,128,32), position logits, {_name}":
            criss_cross(2, 8, 64, 128, 32, 32, _dtype, position=True),
        f"criss_cross_attention, (1,1,97,97), d 128, dv 512, {_name}": criss_cross(1, 1, 97, 97, 128, 512, _dtype),
    }  # fmt: skip
    if _dtype.itemsize == 2:  # the widest, which float32 does not fit
        CASES |= {
            f"global_attention, 1110, (2,4,32,32,256), {_name}":
                everywhere(2, 4, (32, 32), (32, 32), 256, _dtype, "1110"),
            f"sequence_attention, (2,4,512,256), wide heads, {_name}": sequence(2, 4, 512, 512, 256, _dtype, K=21),
            f"criss_cross_attention, (1,1,97,97), d 256, dv 512, {_name}":
                criss_cross(1, 1, 97, 97, 256, 512, _dtype),
        }  # fmt: skip
