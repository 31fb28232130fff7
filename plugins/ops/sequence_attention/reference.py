"""Definition of sequence attention; see :mod:`attn_plugins.ops.reference`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.arguments import at_least_float32
from ...core.softmax import masked_softmax


def sequence_attention_logits(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    band_logits: Tensor | None,
    outside_logits: Tensor | None,
    position_logits: Tensor | None,
    key_padding_mask: Tensor | None,
    start: int,
    causal: bool,
    scale: float,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """Return the sum of all logits, (B, M, T, S); -inf at masked keys."""
    query, key, band_logits, outside_logits, position_logits = at_least_float32(
        query, key, band_logits, outside_logits, position_logits
    )
    B, M, S, _ = value.shape
    leaders = (query,) if query is not None else (band_logits, outside_logits, position_logits)
    T = next((t.shape[2] for t in leaders if t is not None and t.shape[2] != 1), 1)
    logits = value.new_zeros(B, M, T, S, dtype=torch.promote_types(value.dtype, torch.float32))
    positions = torch.arange(T, device=value.device).unsqueeze(1) + start
    offset = torch.arange(S, device=value.device) - positions  # (T, S)
    if query is not None and key is not None:
        logits = logits + torch.einsum("bmtd,bmsd->bmts", query, key) * scale
    if position_logits is not None:
        logits = logits + position_logits
    if band_logits is not None:
        b, m, _, K = band_logits.shape
        tap = offset + (K - 1 if causal else K // 2)
        inside = band_logits.expand(b, m, T, K).gather(3, tap.clamp(0, K - 1).expand(b, m, T, S))
        outside = 0.0 if outside_logits is None else outside_logits.unsqueeze(-1)
        logits = logits + torch.where((tap >= 0) & (tap < K), inside, outside)
    if causal:
        logits = logits.masked_fill(offset > 0, float("-inf"))
    if key_padding_mask is not None:
        logits = logits.masked_fill(key_padding_mask[:, None, None], float("-inf"))
    if segment_ids is not None:
        ids = segment_ids.repeat(B // segment_ids.shape[0], 1)
        others = ids[:, start : start + T].unsqueeze(2) != ids.unsqueeze(1)
        logits = logits.masked_fill(others.unsqueeze(1), float("-inf"))
    return logits


def sequence_attention_probabilities(*operands: Any) -> Tensor:
    """Return the softmax of :func:`sequence_attention_logits`, (B, M, T, S); 0 for fully masked queries."""
    return masked_softmax(sequence_attention_logits(*operands))


def sequence_attention(query: Tensor | None, key: Tensor | None, value: Tensor, *others: Any) -> Tensor:
    """See :func:`attn_plugins.ops.sequence_attention`; the operands are those of the logits."""
    weights = sequence_attention_probabilities(query, key, value, *others)
    return torch.matmul(weights, value.to(weights.dtype)).to(value.dtype)
