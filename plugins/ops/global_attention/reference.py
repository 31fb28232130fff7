"""Definition of global attention; see :mod:`attn_plugins.ops.reference`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.arguments import at_least_float32
from ...core.axes import unflatten
from ...core.softmax import masked_softmax


def global_attention_logits(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    row_logits: Tensor | None,
    column_logits: Tensor | None,
    key_logits: Tensor | None,
    scale: float,
) -> Tensor:
    """Return the sum of all logits, (B, M, Hq, Wq, Hk, Wk); Hq = Wq = 1 if no argument has query axes."""
    B, M, Hk, Wk, _ = value.shape
    query, key, row_logits, column_logits, key_logits = at_least_float32(
        query, key, row_logits, column_logits, key_logits
    )
    dtype = torch.promote_types(value.dtype, torch.float32)
    logits = value.new_zeros(B, M, 1, 1, Hk, Wk, dtype=dtype)
    if query is not None and key is not None:
        logits = logits + torch.einsum("bmhwd,bmyxd->bmhwyx", query, key) * scale
    if row_logits is not None:
        logits = logits + row_logits.unsqueeze(-1)
    if column_logits is not None:
        logits = logits + column_logits.unsqueeze(-2)
    if key_logits is not None:
        logits = logits + key_logits[:, :, None, None]
    return logits


def global_attention_probabilities(*operands: Any) -> Tensor:
    """Return the softmax over the keys of :func:`global_attention_logits`, in its shape; 0 for fully masked queries."""
    logits = global_attention_logits(*operands)
    return unflatten(masked_softmax(logits.flatten(-2)), -1, logits.shape[-2:])


def global_attention(query: Tensor | None, key: Tensor | None, value: Tensor, *others: Any) -> Tensor:
    """See :func:`attn_plugins.ops.global_attention`; the operands are those of the logits."""
    weights = global_attention_probabilities(query, key, value, *others)
    return torch.einsum("bmhwyx,bmyxd->bmhwd", weights, value.to(weights.dtype)).to(value.dtype)
