"""What a call of window attention works on, whichever backend serves it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Terms(NamedTuple):
    """The tensors that have gradients; sequences are maps of one row."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor
    position_logits: Tensor | None


class Options(NamedTuple):
    """Which key a tap is, query * stride - padding + tap * dilation for rows and for columns, and the scale."""

    kernel_size: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    zero_border: bool
    scale: float

    def numbers(self) -> list[int]:
        """Return the geometry as the kernels take it."""
        return [*self.kernel_size, *self.stride, *self.padding, *self.dilation]
