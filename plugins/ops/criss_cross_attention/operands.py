"""Operands of criss-cross attention."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Terms(NamedTuple):
    """Tensors that have gradients."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor
    position_logits: Tensor | None


class Options(NamedTuple):
    """Arguments other than tensors.

    Attributes:
        scale: Factor of the content term.
        recompute: Whether the forward keeps, instead of the weights, the log-sum-exp of each query's logits, from
            which the backward recomputes the weights. Every backend supports both, so that the results' shapes do not
            depend on the backend.
    """

    scale: float
    recompute: bool
