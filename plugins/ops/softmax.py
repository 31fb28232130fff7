"""The softmax of every definition."""

from __future__ import annotations

from torch import Tensor


def masked_softmax(logits: Tensor) -> Tensor:
    """Softmax over the last axis; where every logit is -inf the result is 0, and so is the gradient."""
    masked = (logits == float("-inf")).all(-1, keepdim=True)
    return logits.masked_fill(masked, 0).softmax(-1).masked_fill(masked, 0)
