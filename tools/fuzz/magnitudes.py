"""Sizes of numbers before they cancel, which define one rounding of a sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def largest(tensor: Any) -> float:
    """Return the largest finite number of a tensor, or 0 if there is none."""
    if not isinstance(tensor, Tensor) or tensor.numel() == 0:
        return 0.0
    return float(tensor.detach().double().nan_to_num(0, 0, 0).abs().max())


def of_attention(arguments: Mapping[str, Any], grad: Tensor) -> dict[str, float]:
    """Return the magnitudes of an attention's output and gradients, and the condition of its weights.

    The relative error of a weight is that of its logits: rounding a logit of 50 changes it by 50 roundings.
    """
    query, key, value, scale = (arguments[name] for name in ("query", "key", "value", "scale"))
    terms = [name for name in arguments if name.endswith("_logits")]
    content = 0.0 if query is None else abs(scale) * largest(query) * largest(key) * query.shape[-1] ** 0.5
    condition = 1 + (content + sum(largest(arguments[name]) for name in terms)) / 8
    slope = largest(grad) * largest(value) * max(1, value.shape[-1]) ** 0.5
    return {
        "condition": condition,
        "output": largest(value),
        "value": largest(grad),
        "query": abs(scale) * slope * largest(key),
        "key": abs(scale) * slope * largest(query),
        **dict.fromkeys(terms, slope),
    }
