"""The Transformer's multi-head attention (Vaswani et al. 2017), with exact decoding step by step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .spatial_attention_1d import MultiheadSpatialAttention


class MultiheadAttention(MultiheadSpatialAttention):
    """softmax(q·k / sqrt(d)) in every head, between learned projections of queries, keys, values and the result.

    :class:`MultiheadSpatialAttention` of its first term alone, scaled, and with biases. torch's own has no cache, and
    gives NaN to a query whose keys are all padding; here that query gets the output's bias. The weights of
    ``torch.nn.MultiheadAttention`` are these, its three input projections in one.

    Args:
        embed_dim: C.
        num_heads: M; must divide C.
        dropout: Dropout probability of the attention weights.
        causal: Self-attention that sees no key after the query.

    Shapes:
        query (B, T, C), key (B, S, C) -> (B, T, C)

    Raises:
        ValueError: an argument is out of range or inconsistent with the others.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 8,
        dropout: float = 0.0,
        causal: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        super().__init__(embed_dim, num_heads, "1000", causal=causal, dropout=dropout, **factory)
        self.scale = (embed_dim // num_heads) ** -0.5
        self.q_proj, self.k_proj = (nn.Linear(embed_dim, embed_dim, **factory) for _ in range(2))
        self.reset_parameters()

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}" + (", causal=True" if self.causal else "")
