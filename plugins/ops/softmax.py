"""Softmax of the operators' definitions."""

from __future__ import annotations

from torch import Tensor


def masked_softmax(logits: Tensor) -> Tensor:
    """Compute the softmax over the last axis; where every logit is -inf, the result and its gradient are 0."""
    masked = (logits == float("-inf")).all(-1, keepdim=True)
    return logits.masked_fill(masked, 0).softmax(-1).masked_fill(masked, 0)
