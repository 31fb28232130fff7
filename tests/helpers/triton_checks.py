"""Where tests run Triton's kernels, and how exact they are: on CUDA where there is a device, else interpreted."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Relative norms against float64. The interpreter truncates where the device rounds to bfloat16.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))
needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed")
SLOW_INTERPRETED = [pytest.mark.slow] if DEVICE == "cpu" else []  # seconds in the interpreter, none on a device


def slow_interpreted(test: Callable) -> Callable:
    return pytest.mark.slow(test) if DEVICE == "cpu" else test


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random numbers, the same on every device."""
    random = torch.Generator().manual_seed(seed + sum(n * 31**i for i, n in enumerate(shape)) % 2**31)
    return torch.randn(shape, generator=random, dtype=torch.float64).to(DEVICE, dtype)
