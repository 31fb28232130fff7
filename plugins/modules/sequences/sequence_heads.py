"""Heads of attention on sequences, and their weighted sums with or without dropout.

Shapes: B batch, M heads, T queries, S keys, d width per head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...ops import reference
from ...ops import sequence_attention as attend


def split_heads(projected: Tensor, num_heads: int) -> Tensor:
    """View (B, T, M * d) as (B, M, T, d)."""
    return projected.unflatten(2, (num_heads, -1)).transpose(1, 2)


def attended(arguments: dict[str, Any], dropout: float) -> Tensor:
    """Apply ``sequence_attention``, with dropout of its weights, and concatenate the heads, (B, T, M * d)."""
    if dropout == 0.0:
        output = attend(**arguments)
    else:
        value = arguments["value"]
        output = torch.matmul(F.dropout(weights_of(arguments).to(value.dtype), dropout), value)
    return output.transpose(1, 2).flatten(2)


def weights_of(arguments: dict[str, Any]) -> Tensor:
    """Compute the attention weights of ``sequence_attention``, (B, M, T, S)."""
    return reference.masked_softmax(logits_of(arguments))


def logits_of(arguments: dict[str, Any]) -> Tensor:
    """Compute the sum of the logits of ``sequence_attention``, (B, M, T, S), -inf at masked keys."""
    value, outside, start = arguments["value"], arguments.get("outside_logits"), arguments["start"]
    if isinstance(outside, float):
        outside = value.new_full((1, 1, 1), outside)
    return reference.sequence_attention_logits(
        arguments["query"],
        arguments["key"],
        value,
        arguments["band_logits"],
        outside,
        arguments.get("position_logits"),
        arguments["key_padding_mask"],
        start,
        arguments["causal"],
        1.0,
    )
