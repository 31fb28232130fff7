"""Checks shared by the tests of several operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def vary_with_order(run: Callable[[], dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of results whose bits depend on the order of the emulator's threads, in three orders."""
    runs = []
    for seed in range(3):
        monkeypatch.setenv("EMULATOR_SEED", str(seed))
        runs.append(run())
    first = runs[0]
    return [name for name in first if not all(torch.equal(other[name], first[name]) for other in runs)]


def given(*tensors: Tensor | None) -> list[Tensor]:
    """Return the tensors that are not None."""
    return [t for t in tensors if t is not None]


def relative_error(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))
