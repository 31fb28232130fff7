"""Operands of window attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
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
    """Geometry, rows before columns, border and scale: a tap's key is at query * stride - padding + tap * dilation.

    Of windows inside the map, it is at :func:`first_keys` + tap * dilation.
    """

    kernel_size: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    border: str
    scale: float

    def numbers(self) -> list[int]:
        """Return the geometry in the kernels' order."""
        return [*self.kernel_size, *self.stride, *self.padding, *self.dilation]


def first_keys(size: int, kernel_size: int, dilation: int, device: torch.device | None = None) -> Tensor:
    """Return the key of each query's first tap along an axis, (size,), of windows that stay inside the map.

    A window is centred among the keys at multiples of the dilation from its query, and moves until it has all its taps.
    """
    query = torch.arange(size, device=device)
    phase = query % dilation
    last = (size - phase + dilation - 1) // dilation - kernel_size
    return phase + dilation * torch.minimum((query // dilation - kernel_size // 2).clamp(min=0), last)
