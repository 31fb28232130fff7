"""Softmax of the operators' definitions, and in place for their PyTorch backends."""

from __future__ import annotations

from torch import Tensor


def masked_softmax(logits: Tensor) -> Tensor:
    """Compute the softmax over the last axis; where every logit is -inf, the result and its gradient are 0."""
    masked = (logits == float("-inf")).all(-1, keepdim=True)
    return logits.masked_fill(masked, 0).softmax(-1).masked_fill(masked, 0)


def softmax_(logits: Tensor) -> Tensor:
    """Replace logits by their softmax over the last axis, and return its log-sum-exp, (..., keys) to (...).

    Where every logit is -inf, the weights are 0 and the log-sum-exp is +inf. A backward computes weights with it anew:
    with a rounded log-sum-exp, those of large logits would not sum to 1.
    """
    top = logits.amax(-1, keepdim=True)
    masked = top == float("-inf")
    total = logits.sub_(top.masked_fill(masked, 0)).exp_().sum(-1, keepdim=True)
    logits.div_(total.masked_fill(masked, 1))
    return total.log_().add_(top).masked_fill_(masked, float("inf")).squeeze(-1)
