"""What the tests on a CUDA device share."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def on_cuda(operands: dict, dtype: torch.dtype | None = None) -> dict:
    return {k: v.to("cuda", dtype) if isinstance(v, Tensor) else v for k, v in operands.items()}


def exact(operands: dict) -> dict:
    return {k: v.detach().double() if isinstance(v, Tensor) else v for k, v in operands.items()}
