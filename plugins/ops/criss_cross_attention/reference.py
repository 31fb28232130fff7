"""Definition of criss-cross attention; see :mod:`attn_plugins.ops.reference`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.arguments import at_least_float32
from ...core.softmax import masked_softmax


def criss_cross_logits(
    query: Tensor | None, key: Tensor | None, value: Tensor, position_logits: Tensor | None, scale: float
) -> Tensor:
    """Return the sum of all logits, (B, M, H, W, H + W): the query's column, -inf at the query itself, then its row."""
    query, key, value, position_logits = at_least_float32(query, key, value, position_logits)
    H, W = value.shape[2:4]
    logits = value.new_zeros((*value.shape[:4], H + W))
    if query is not None and key is not None:
        column = torch.einsum("bmhwd,bmiwd->bmhwi", query, key)
        row = torch.einsum("bmhwd,bmhjd->bmhwj", query, key)
        logits = torch.cat((column, row), -1) * scale
    if position_logits is not None:
        logits = logits + position_logits
    rows = torch.arange(H, device=value.device).unsqueeze(1)
    own = torch.arange(H + W, device=value.device) == rows  # (H, H + W)
    return logits.masked_fill(own.unsqueeze(1), float("-inf"))


def criss_cross_probabilities(*operands: Any) -> Tensor:
    """Return the softmax of :func:`criss_cross_logits`, (B, M, H, W, H + W): 0 at the query itself in the column."""
    return masked_softmax(criss_cross_logits(*operands))


def criss_cross_attention(query: Tensor | None, key: Tensor | None, value: Tensor, *others: Any) -> Tensor:
    """See :func:`attn_plugins.ops.criss_cross_attention`; the operands are those of the logits."""
    weights = criss_cross_probabilities(query, key, value, *others)
    values, H = value.to(weights.dtype), value.shape[2]
    column = torch.einsum("bmhwi,bmiwd->bmhwd", weights[..., :H], values)
    row = torch.einsum("bmhwj,bmhjd->bmhwd", weights[..., H:], values)
    return (column + row).to(value.dtype)
