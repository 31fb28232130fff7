"""Definitions of global and of sequence attention; see :mod:`attn_plugins.ops.reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import at_least_float32
from ..softmax import masked_softmax


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


def global_attention_probabilities(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    row_logits: Tensor | None,
    column_logits: Tensor | None,
    key_logits: Tensor | None,
    scale: float,
) -> Tensor:
    """Return the attention weights, in the shape of :func:`global_attention_logits`; 0 for fully masked queries."""
    logits = global_attention_logits(query, key, value, row_logits, column_logits, key_logits, scale)
    return masked_softmax(logits.flatten(-2)).unflatten(-1, value.shape[2:4])


def global_attention(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    row_logits: Tensor | None,
    column_logits: Tensor | None,
    key_logits: Tensor | None,
    scale: float,
) -> Tensor:
    """See :func:`attn_plugins.ops.global_attention`."""
    weights = global_attention_probabilities(query, key, value, row_logits, column_logits, key_logits, scale)
    return torch.einsum("bmhwyx,bmyxd->bmhwd", weights, value.to(weights.dtype)).to(value.dtype)


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
        found = band_logits.expand(b, m, T, K).gather(3, tap.clamp(0, K - 1).expand(b, m, T, S))
        outside = 0.0 if outside_logits is None else outside_logits.unsqueeze(-1)
        logits = logits + torch.where((tap >= 0) & (tap < K), found, outside)
    if causal:
        logits = logits.masked_fill(offset > 0, float("-inf"))
    if key_padding_mask is not None:
        logits = logits.masked_fill(key_padding_mask[:, None, None], float("-inf"))
    if segment_ids is not None:
        ids = segment_ids.repeat(B // segment_ids.shape[0], 1)
        others = ids[:, start : start + T].unsqueeze(2) != ids.unsqueeze(1)
        logits = logits.masked_fill(others.unsqueeze(1), float("-inf"))
    return logits


def sequence_attention_probabilities(
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
    """Return the attention weights, (B, M, T, S); 0 for fully masked queries."""
    options = key_padding_mask, start, causal, scale, segment_ids
    return masked_softmax(
        sequence_attention_logits(query, key, value, band_logits, outside_logits, position_logits, *options)
    )


def sequence_attention(
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
    """See :func:`attn_plugins.ops.sequence_attention`."""
    options = key_padding_mask, start, causal, scale, segment_ids
    weights = sequence_attention_probabilities(
        query, key, value, band_logits, outside_logits, position_logits, *options
    )
    return torch.matmul(weights, value.to(weights.dtype)).to(value.dtype)
