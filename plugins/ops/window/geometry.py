"""What a call of window attention works on, whichever code serves it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

Terms = tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]  # query, key, value, position logits


class Geometry(NamedTuple):
    """Which key a tap is: query * stride - padding + tap * dilation, for rows and for columns."""

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    zero_border: bool

    def numbers(self) -> list[int]:
        """All, as the kernels take them."""
        return [*self.kernel, *self.stride, *self.padding, *self.dilation]
