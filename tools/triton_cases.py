"""The calls whose Triton kernels :mod:`tools.triton_report` compiles: main shapes, tensors that hold nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tools.requires import extras

with extras():
    import torch

    from attn_plugins.ops.operator import Operator
    from attn_plugins.ops.sampled import operands as sampled
    from attn_plugins.ops.sampled.deform_conv import CONVOLVE

Case = Callable[[], tuple[Operator, Any, Any]]  # an operator, its terms, its options
CASES: dict[str, Case] = {}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without contents."""
    return torch.empty(shape, dtype=dtype, device="meta")


def deform_conv(B: int, C: int, H: int, W: int, offset_groups: int, dtype: torch.dtype) -> Case:
    """A modulated 3x3 convolution of a map into as many channels, channels last."""

    def make() -> tuple[Operator, Any, Any]:
        shapes = (B, C, H, W), (B, 18 * offset_groups, H, W), (C, C, 3, 3), (C,), (B, 9 * offset_groups, H, W)
        input, *others = (meta(*shape, dtype=dtype) for shape in shapes)
        terms = sampled.Terms(input.to(memory_format=torch.channels_last), *others)
        return CONVOLVE, terms, sampled.Options((1, 1), (1, 1), (1, 1), 1, offset_groups)

    return make


for _name, _dtype in DTYPES.items():
    CASES |= {
        f"deform_conv2d, (16,256,64,64), {_name}": deform_conv(16, 256, 64, 64, 1, _dtype),
        f"deform_conv2d, (2,256,100,152), {_name}": deform_conv(2, 256, 100, 152, 1, _dtype),
        f"deform_conv2d, (2,256,100,152), 4 offset groups, {_name}": deform_conv(2, 256, 100, 152, 4, _dtype),
    }
