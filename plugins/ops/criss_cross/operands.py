"""What a call of criss-cross attention works on."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Terms(NamedTuple):
    """The tensors that have gradients."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor
    position_logits: Tensor | None


class Options(NamedTuple):
    """What is no tensor."""

    scale: float
