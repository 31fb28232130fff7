"""The Transformer's multi-head attention (Vaswani et al. 2017), with exact step-by-step decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .spatial_attention_1d import MultiheadSpatialAttention


class MultiheadAttention(MultiheadSpatialAttention):
    """Multi-head attention softmax(q·k / sqrt(d)) with learned projections of queries, keys, values and outputs.

    This is :class:`MultiheadSpatialAttention` with the first term only, scaled, and with biases. Unlike
    ``torch.nn.MultiheadAttention`` it has a cache, and fully masked queries return the output's bias instead of NaN.
    The weights are the same, except that torch's module stores the three input projections as one.

    Args:
        embed_dim: C.
        num_heads: M; must divide C.
        dropout: Dropout probability of the attention weights.
        causal: Whether to use causal self-attention.

    Shapes:
        query (B, T, C), key (B, S, C) -> (B, T, C)

    Raises:
        ValueError: An argument is out of range or inconsistent with the others.
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
