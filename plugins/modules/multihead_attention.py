"""The Transformer's multi-head attention (Vaswani et al. 2017), with exact decoding step by step.

Shapes: B batch, C channels, M heads, T queries, S keys, d width per head.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn

from .sequence_cache import (
    SequenceCache,
    attended,
    check_cache,
    check_heads,
    check_padding_mask,
    check_sequence,
    split_heads,
    weights_of,
)


class MultiheadAttention(nn.Module):
    """softmax(q·k / sqrt(d)) in every head, between learned projections of queries, keys, values and the result.

    torch's own has no cache, and gives NaN to a query whose keys are all padding; here that query gets the output's
    bias. The weights of ``torch.nn.MultiheadAttention`` are these, its three input projections in one.

    Args:
        embed_dim: C.
        num_heads: M; must divide C.
        dropout: Share of the weights that is dropped in training.
        causal: Self-attention that sees no key after the query.

    Shapes:
        query (B, T, C), key (B, S, C) -> (B, T, C)

    Raises:
        ValueError: an argument is out of its range, or does not fit the others.
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
        super().__init__()
        check_heads(embed_dim, num_heads, dropout)
        self.embed_dim, self.num_heads, self.dropout, self.causal = embed_dim, num_heads, dropout, causal
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(embed_dim, embed_dim, **factory) for _ in range(4)
        )
        self.init_weights()

    def init_weights(self) -> None:
        """Draw all layers by Glorot, uniform, those of queries, keys and values as one; biases 0."""
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            nn.init.xavier_uniform_(layer.weight, gain=1.0 if layer is self.out_proj else 1 / math.sqrt(2))
            nn.init.zeros_(layer.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        cache: SequenceCache | None = None,
    ) -> Tensor:
        """Attend from ``query`` to ``key``, or to itself.

        Args:
            query: (B, T, C). With ``cache`` the next tokens, one or several.
            key: (B, S, C), for values as well; None: self-attention.
            key_padding_mask: (B, S) bool, True for keys to be left out. In self-attention with ``cache``, (B, T) of
                the new tokens.
            cache: For decoding step by step: the same one in every step, which changes it. The first step's ``key``
                and its mask stay.

        Returns:
            (B, T, C).

        Raises:
            ValueError: a shape, a device or a combination does not fit.
            TypeError: a tensor is not of the module's dtype.
        """
        arguments = self._arguments(query, key, key_padding_mask, cache)
        output = self.out_proj(attended(arguments, self.dropout if self.training else 0.0))
        if cache is not None:
            cache.steps += query.shape[1]
        return output

    @torch.no_grad()
    def attention_maps(
        self,
        query: Tensor,
        key: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        cache: SequenceCache | None = None,
        queries: Tensor | None = None,
    ) -> Tensor:
        """The attention weights that ``forward`` would have: for inspection, O(T S). The cache is left as it is.

        Args:
            query: As ``forward``, and so are the others.
            queries: (Q,), positions in ``query``; None for all.

        Returns:
            (B, M, T, S), or (B, M, Q, S) of ``queries``; S counts the keys of the cache.
        """
        cache = None if cache is None else dataclasses.replace(cache)
        maps = weights_of(self._arguments(query, key, key_padding_mask, cache))
        return maps if queries is None else maps[:, :, queries]

    def _arguments(
        self, query: Tensor, key: Tensor | None, key_padding_mask: Tensor | None, cache: SequenceCache | None
    ) -> dict[str, Any]:
        """What ``sequence_attention`` takes."""
        weight = self.out_proj.weight
        check_sequence("query", query, self.embed_dim, weight)
        B, T, _ = query.shape
        if cache is not None:
            check_cache(cache, B)
        if key is None:
            if cache is not None and not self.causal:
                raise ValueError("cache needs causal=True or key: other queries would change what was answered")
            check_padding_mask(key_padding_mask, B, T, weight.device)
            key, projected = query, False
        else:
            if self.causal:
                raise ValueError("key must be None with causal=True, which is for self-attention")
            check_sequence("key", key, self.embed_dim, weight, B)
            check_padding_mask(key_padding_mask, B, key.shape[1], weight.device)
            projected = cache is not None and cache.value is not None
        keys: Tensor | None
        values: Tensor | None
        if projected:
            assert cache is not None
            keys, values, key_padding_mask = cache.key, cache.value, cache.key_padding_mask
        else:
            keys, values = (split_heads(layer(key), self.num_heads) for layer in (self.k_proj, self.v_proj))
            if cache is not None:
                cache.append(keys, values, key_padding_mask)
                keys, values, key_padding_mask = cache.key, cache.value, cache.key_padding_mask
        assert values is not None
        start = values.shape[2] - T if self.causal else 0
        return dict(
            query=split_heads(self.q_proj(query), self.num_heads) * (self.embed_dim // self.num_heads) ** -0.5,
            key=keys, value=values, band_logits=None, causal=self.causal, key_padding_mask=key_padding_mask,
            start=start, scale=1.0,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}" + (", causal=True" if self.causal else "")
