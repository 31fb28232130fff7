"""Checks shared by the tests of several operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def given(*tensors: Tensor | None) -> list[Tensor]:
    """Return the tensors that are not None."""
    return [t for t in tensors if t is not None]


def relative_error(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def check_compiled_and_exported(call: Callable[..., Tensor], terms: Sequence[Tensor | None]) -> None:
    """Check that the operator compiles to one graph and exports, with the results of eager mode."""

    class Layer(torch.nn.Module):
        def forward(self, *terms):
            return call(*terms)

    layer = call if isinstance(call, torch.nn.Module) else Layer()
    expected = layer(*terms)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(*terms), expected)
    torch.testing.assert_close(torch.export.export(layer, tuple(terms)).module()(*terms), expected)
