"""The calls whose Triton kernels :mod:`tools.triton_report` compiles: main shapes, tensors that hold nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tools.requires import extras

with extras():
    import torch

    from attn_plugins.ops.operator import Operator

Case = Callable[[], tuple[Operator, Any, Any]]  # an operator, its terms, its options
CASES: dict[str, Case] = {}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without contents."""
    return torch.empty(shape, dtype=dtype, device="meta")
