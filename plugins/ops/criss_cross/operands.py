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
    """What is no tensor.

    Attributes:
        scale: Factor of the content term.
        recompute: Whether the forward keeps the log-sum-exp of each query's logits for the backward, which recomputes
            the weights, or keeps the weights. Every backend does either: results have the same shapes whoever serves.
    """

    scale: float
    recompute: bool
