"""What a call of deformable convolution works on, whichever backend serves it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Terms(NamedTuple):
    """The tensors, all of which have gradients."""

    input: Tensor
    offset: Tensor
    weight: Tensor
    bias: Tensor | None
    mask: Tensor | None


class Options(NamedTuple):
    """The geometry, rows before columns."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    offset_groups: int
