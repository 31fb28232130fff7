"""Checks shared by the tests of several operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@contextmanager
def deterministic_mode() -> Iterator[None]:
    """Use torch's deterministic mode, in which memory that nobody writes to is NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def given(*tensors: Tensor | None) -> list[Tensor]:
    """Return the tensors that are not None."""
    return [t for t in tensors if t is not None]


def relative_error(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))
