"""Checks shared by the tests of several operators."""

from __future__ import annotations

import pytest
from torch import Tensor

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def given(*tensors: Tensor | None) -> list[Tensor]:
    """Return the tensors that are not None."""
    return [t for t in tensors if t is not None]


def relative_error(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))
