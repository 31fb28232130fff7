"""Operands of window attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Terms(NamedTuple):
    """Tensors that have gradients; a sequence is a map with one row."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor
    position_logits: Tensor | None

    def grid(self) -> tuple[int, int]:
        """Return (Hq, Wq), rows and columns of queries."""
        leader = self.position_logits if self.query is None else self.query
        assert leader is not None
        return leader.shape[2], leader.shape[3]


class Options(NamedTuple):
    """Geometry, rows before columns, border and scale: a tap's key is at query * stride - padding + tap * dilation."""

    kernel_size: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    border: str
    scale: float

    def numbers(self) -> list[int]:
        """Return the geometry in the kernels' order."""
        return [*self.kernel_size, *self.stride, *self.padding, *self.dilation]
