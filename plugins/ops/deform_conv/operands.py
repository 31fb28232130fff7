"""Operands of deformable convolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Terms(NamedTuple):
    """Tensors, all with gradients."""

    input: Tensor
    offset: Tensor
    weight: Tensor
    bias: Tensor | None
    mask: Tensor | None


class Options(NamedTuple):
    """Geometry, rows before columns."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    offset_groups: int
