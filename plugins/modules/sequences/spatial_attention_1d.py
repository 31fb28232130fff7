"""Multi-head attention on sequences with any of the four terms of Transformer attention (Zhu et al. 2019).

Shapes: B batch, C channels, M heads, T queries, S keys, d width per head, K offsets.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...terms.attention_type import parse_attention_type
from ...terms.saliency import key_saliency
from ..common.checks import check_heads, check_padding_mask, check_sequence
from ..common.sequence_cache import SequenceCache, check_cache
from .sequence_heads import attended, logits_of, split_heads, weights_of
from .sequence_positions import SequencePositions


class Keys(NamedTuple):
    """Projected keys and values, (B, M, S, d), including those of the cache.

    Attributes:
        key: Keys; None if no term uses them.
        value: Values.
        padding_mask: (B, S) bool, or None.
        shift: (B,), number of leading padding keys that were moved to the end; None if keys were not moved.
    """

    key: Tensor | None
    value: Tensor
    padding_mask: Tensor | None
    shift: Tensor | None = None


class MultiheadSpatialAttention(SequencePositions):
    """Self-attention, causal self-attention and encoder-decoder attention with any of the terms ε1 ... ε4.

    Source: Zhu et al. (2019), Eq. 1, 2 and 8, with the relative positions of Transformer-XL (Dai et al. 2019). The
    logit of key k for query q is ``scale`` times the sum of the chosen terms:

        1000  ε1 = q·k            query content and key content
        0100  ε2 = q·R[k - q]     query content and relative position
        0010  ε3 = u·k            key content alone
        0001  ε4 = v·R[k - q]     relative position alone

    R is the projected sine encoding, with C features, of k - q. In encoder-decoder attention k and q are positions in
    the source and in the target; source positions start at the first key that is not padding, so that padding on either
    side has no effect. With ``'0000'`` the values are averaged.

    Only ε2 holds its logits in memory, (B, M, T, K), also for the backward pass: K is ``attention_range``, or
    2 max(T, S) - 1 for all keys (T with ``causal``). The other terms take O(T + S) memory.

    Unless ``query_key_bias`` is set, queries and keys are projected without bias, which would be equivalent to u or v.

    Args:
        embed_dim: C.
        num_heads: M; must divide C.
        attention_type: Four bits, ε1 to ε4.
        attention_range: n_k, odd: keys are limited to |k - q| <= (n_k - 1) / 2, or with ``causal`` to the query and the
            (n_k - 1) / 2 keys before it; -1 for all keys. A query without a key in range returns the output's bias.
        causal: Whether to use causal self-attention.
        dropout: Dropout probability of the attention weights, which are then held in memory, T × S.
        bias: Whether the projections of values and outputs have biases.
        scale: Factor of the sum of all terms: ``(embed_dim / num_heads) ** -0.5`` in the Transformer, 1 in the paper's
            Eq. 2.
        query_key_bias: Whether queries and keys have biases, as in the Transformer of Vaswani et al. (2017); needs ε1.
        kdim: Channels of ``key`` and ``value``; None for C.

    Shapes:
        query (B, T, C), key and value (B, S, kdim) -> (B, T, C)

    Raises:
        ValueError: an argument is out of range or inconsistent with the others.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 8,
        attention_type: str = "1111",
        attention_range: int = -1,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        scale: float = 1.0,
        query_key_bias: bool = False,
        kdim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads, dropout)
        self.terms = terms = parse_attention_type(attention_type)
        if not isinstance(attention_range, int) or (
            attention_range != -1 and (attention_range < 1 or attention_range % 2 == 0)
        ):
            raise ValueError(
                f"attention_range must be -1 (all keys) or a positive odd int (n_k), got {attention_range!r}"
            )
        if terms.relative and embed_dim % 2:
            raise ValueError(f"embed_dim must be even for relative positions (sines and cosines), got {embed_dim}")
        if query_key_bias and not terms.content:
            raise ValueError(f"query_key_bias needs the first bit of attention_type, got {attention_type!r}")
        kdim = embed_dim if kdim is None else kdim
        if not isinstance(kdim, int) or kdim < 1 or (causal and kdim != embed_dim):
            raise ValueError(f"kdim must be a positive int, and embed_dim = {embed_dim} with causal, got {kdim!r}")
        self.embed_dim, self.num_heads, self.kdim = embed_dim, num_heads, kdim
        self.attention_type, self.attention_range, self.causal = attention_type, attention_range, causal
        self.dropout, self.scale, self.query_key_bias = dropout, scale, query_key_bias
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=query_key_bias, **factory) if terms.queries else None
        self.k_proj = nn.Linear(kdim, embed_dim, bias=query_key_bias, **factory) if terms.keys else None
        self.v_proj = nn.Linear(kdim, embed_dim, bias=bias, **factory)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        self.position_proj = nn.Linear(embed_dim, embed_dim, bias=False, **factory) if terms.relative else None
        heads = num_heads, embed_dim // num_heads
        self.content_bias = nn.Parameter(torch.empty(heads, **factory)) if terms.saliency else None  # u
        self.position_bias = nn.Parameter(torch.empty(heads, **factory)) if terms.position else None  # v
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw projections by Glorot uniform initialisation, the inputs' as one matrix, and u and v uniformly."""
        for layer in self.children():
            assert isinstance(layer, nn.Linear)
            joint = layer in (self.q_proj, self.k_proj, self.v_proj)
            nn.init.xavier_uniform_(layer.weight, gain=1 / math.sqrt(2) if joint else 1.0)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        bound = 1 / math.sqrt(2 * (self.embed_dim // self.num_heads))
        for vector in (self.content_bias, self.position_bias):
            if vector is not None:
                nn.init.uniform_(vector, -bound, bound)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        cache: SequenceCache | None = None,
    ) -> Tensor:
        """Attend from ``query`` to ``key``, or to itself.

        Args:
            query: (B, T, C). With ``cache`` one or more next tokens.
            key: (B, S, kdim); None or ``query`` itself for self-attention.
            value: (B, S, kdim); None for ``key``.
            key_padding_mask: (B, S) bool, True for keys to leave out. With ``causal`` and ``cache``, (B, T) of the
                new tokens.
            cache: For step-by-step decoding: the same one in every step, updated in place. In encoder-decoder
                attention the first step's keys, values and mask are kept.

        Returns:
            (B, T, C).

        Raises:
            ValueError: a shape, a device or a combination of arguments is invalid.
            TypeError: a tensor does not have the module's dtype.
        """
        arguments, _ = self._arguments(query, key, value, key_padding_mask, cache)
        output = self.out_proj(attended(arguments, self.dropout if self.training else 0.0))
        if cache is not None:
            cache.steps += query.shape[1]
            if self.causal and self.attention_range != -1:
                cache.keep(self.attention_range // 2)
        return output.expand(-1, query.shape[1], -1)  # with ε3 alone, all queries have the same result

    @torch.no_grad()
    def attention_maps(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        cache: SequenceCache | None = None,
        queries: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention weights of ``forward`` for inspection, in O(T S) memory. The cache is not changed.

        Args:
            query: As in :meth:`forward`.
            key: As in :meth:`forward`.
            value: As in :meth:`forward`.
            key_padding_mask: As in :meth:`forward`.
            cache: As in :meth:`forward`.
            queries: (Q,), positions in ``query``; None for all.

        Returns:
            (B, M, T, S), or (B, M, Q, S) with ``queries``; S includes the keys of the cache.
        """
        cache = None if cache is None else dataclasses.replace(cache)
        arguments, shift = self._arguments(query, key, value, key_padding_mask, cache)
        maps = weights_of(arguments).expand(-1, -1, query.shape[1], -1)
        if shift is not None:
            maps = maps.gather(3, _rotation(-shift, maps.shape[3])[:, None, None].expand_as(maps))
        return maps if queries is None else maps[:, :, queries]

    @torch.no_grad()
    def attention_logits(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        cache: SequenceCache | None = None,
        queries: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Compute the logits of each term, by its name in :class:`.AttentionTerms`, -inf at masked or distant keys.

        The softmax of their sum is :meth:`attention_maps`, whose arguments and axes are the same.
        """
        cache = None if cache is None else dataclasses.replace(cache)
        keys, start = self._prepared(query, key, value, key_padding_mask, cache)
        found = {}
        for name, given in self._single_terms(query, keys, start, cache).items():
            logits = logits_of({**self._frame(keys, start), **given}).expand(-1, -1, query.shape[1], -1)
            if keys.shift is not None:
                logits = logits.gather(3, _rotation(-keys.shift, logits.shape[3])[:, None, None].expand_as(logits))
            found[name] = logits if queries is None else logits[:, :, queries]
        return found

    # --- the arguments of ``sequence_attention`` --------------------------------------------------------------------

    def _arguments(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None,
        cache: SequenceCache | None,
    ) -> tuple[dict[str, Any], Tensor | None]:
        """Return the arguments of ``sequence_attention``, and the shift of the keys."""
        keys, start = self._prepared(query, key, value, key_padding_mask, cache)
        logits = self._logits(query, keys.key, keys.value, start, cache)
        return {**self._frame(keys, start), **logits}, keys.shift

    def _prepared(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None,
        cache: SequenceCache | None,
    ) -> tuple[Keys, int]:
        """Return keys and values, and the first query's position."""
        key = None if key is query else key
        value = None if value is query and key is None else value
        self._check(query, key, value, key_padding_mask, cache)
        if key is None:
            keys = self._keys(query, query, key_padding_mask, cache)
            start = keys.value.shape[2] - query.shape[1] if self.causal else 0
        else:
            start = 0 if cache is None else cache.steps
            keys = self._source(key, key if value is None else value, key_padding_mask, cache)
        return keys, start

    def _frame(self, keys: Keys, start: int) -> dict[str, Any]:
        """Return the arguments of ``sequence_attention`` other than logits."""
        mask = keys.padding_mask
        return dict(value=keys.value, causal=self.causal, key_padding_mask=mask, start=start, scale=1.0)

    def _single_terms(
        self, query: Tensor, keys: Keys, start: int, cache: SequenceCache | None
    ) -> dict[str, dict[str, Any]]:
        """Return the arguments of ``sequence_attention`` for each term alone."""
        T, S = query.shape[1], keys.value.shape[2]
        outside = -math.inf if self.attention_range != -1 else None
        reach = self._reach(T, S, start)
        # A band of zeros defines the number of queries and which keys are in range.
        taps = (reach + 1 if self.causal else 2 * reach + 1) if outside is not None else 1
        band = keys.value.new_zeros(1, 1, 1, taps).expand(-1, -1, T, -1)
        common: dict[str, Any] = dict(query=None, key=None, band_logits=band, outside_logits=outside)
        projected = None if self.q_proj is None else self._scaled(split_heads(self.q_proj(query), self.num_heads))
        found: dict[str, dict[str, Any]] = {}
        if self.terms.content:
            found["content"] = dict(query=projected, key=keys.key)
        if self.terms.content_position:
            found["content_position"] = dict(band_logits=self._band_of(projected, None, T, reach, cache))
        if self.content_bias is not None and keys.key is not None:
            saliency = key_saliency(keys.key, self._scaled(self.content_bias))
            found["saliency"] = dict(position_logits=saliency.unsqueeze(2))
        if self.position_bias is not None:
            found["position"] = dict(band_logits=self._band_of(None, self.position_bias, T, reach, cache))
        return {name: {**common, **given} for name, given in found.items()}

    def _keys(self, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, cache: SequenceCache | None) -> Keys:
        """Append the keys and values of these tokens to the cache, and return all of them."""
        projected_key = None if self.k_proj is None else split_heads(self.k_proj(key), self.num_heads)
        projected_value = split_heads(self.v_proj(value), self.num_heads)
        if cache is None:
            return Keys(projected_key, projected_value, key_padding_mask)
        cache.append(projected_key, projected_value, key_padding_mask)
        assert cache.value is not None
        return Keys(cache.key, cache.value, cache.key_padding_mask)

    def _source(self, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, cache: SequenceCache | None) -> Keys:
        """Return the keys and values of another sequence, projected only in the first step."""
        if cache is not None and cache.value is not None:
            return Keys(cache.key, cache.value, cache.key_padding_mask, cache.shift)
        shift: Tensor | None = None
        if key_padding_mask is not None and (self.position_proj is not None or self.attention_range != -1):
            # Padding on the left would shift all source positions, so move it to the end.
            shift = key_padding_mask.int().cumprod(1).sum(1)
            order = _rotation(shift, key.shape[1])
            same = value is key
            key = key.gather(1, order.unsqueeze(2).expand_as(key))
            value = key if same else value.gather(1, order.unsqueeze(2).expand_as(value))
            key_padding_mask = key_padding_mask.gather(1, order)
        keys = self._keys(key, value, key_padding_mask, cache)
        if cache is not None:
            cache.shift = shift
        return keys._replace(shift=shift)

    def _logits(
        self, query: Tensor, key: Tensor | None, value: Tensor, start: int, cache: SequenceCache | None
    ) -> dict[str, Any]:
        """Compute query (with u) and key, the band of ε2 + ε4, and the logits of ε3 if ε1 is not used."""
        T, S = query.shape[1], value.shape[2]
        projected = None
        if self.q_proj is not None:
            projected = self._scaled(split_heads(self.q_proj(query), self.num_heads))
        band = self._band(projected, value, T, S, start, cache)
        content, position_logits = None, None
        if self.terms.content:
            assert projected is not None
            u = self.content_bias
            content = projected if u is None else projected + self._scaled(u).unsqueeze(1)
        elif key is not None and self.content_bias is not None:
            saliency = key_saliency(key, self._scaled(self.content_bias))
            if self.attention_range == -1:
                key, position_logits = None, saliency.unsqueeze(2)
            else:  # the range needs a content term: write ε3 as a product with a query of 1
                key, content = saliency.unsqueeze(3), torch.ones_like(saliency[:, :, :1, None]).expand(-1, -1, T, -1)
        if content is None and band is None:
            if self.causal:  # zeros, to define the number of queries
                band = value.new_zeros(1, 1, 1, 1).expand(-1, -1, T, -1)
            elif position_logits is None:  # '0000': equal weights
                position_logits = value.new_zeros(1, 1, 1, S)
        outside = -math.inf if self.attention_range != -1 else None
        return dict(query=content, key=key, band_logits=band, outside_logits=outside, position_logits=position_logits)

    def _check(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None,
        cache: SequenceCache | None,
    ) -> None:
        weight = self.out_proj.weight
        check_sequence("query", query, self.embed_dim, weight)
        B, S = query.shape[0], query.shape[1]
        if key is None:
            if value is not None:
                raise ValueError("value must be None without key")
            if self.kdim != self.embed_dim:
                raise ValueError(f"key must be given: its kdim = {self.kdim} is not query's {self.embed_dim}")
            if cache is not None and not self.causal:
                raise ValueError("cache needs causal=True or a key: otherwise new keys would change earlier outputs")
        else:
            if self.causal:
                raise ValueError("key must be None with causal=True, which is self-attention")
            check_sequence("key", key, self.kdim, weight, B)
            S = key.shape[1]
            if value is not None:
                check_sequence("value", value, self.kdim, weight, B)
                if value.shape[1] != S:
                    raise ValueError(f"value must have key's length {S}, got {value.shape[1]}")
        check_padding_mask(key_padding_mask, B, S, weight.device)
        if cache is not None:
            check_cache(cache, B)
            if key is not None and cache.value is not None and cache.value.shape[2] != S:
                raise ValueError(f"key must be that of the cache, of length {cache.value.shape[2]}, got {S}")

    def extra_repr(self) -> str:
        text = f"{self.embed_dim}, num_heads={self.num_heads}, attention_type={self.attention_type!r}"
        for name, default in (
            ("attention_range", -1), ("causal", False), ("dropout", 0.0), ("scale", 1.0), ("query_key_bias", False),
            ("kdim", self.embed_dim),
        ):  # fmt: skip
            if getattr(self, name) != default:
                text += f", {name}={getattr(self, name)}"
        return text


def _rotation(shift: Tensor, length: int) -> Tensor:
    """Return the positions from ``shift`` on, followed by those before it, for every row: (B, length)."""
    return (torch.arange(length, device=shift.device) + shift.unsqueeze(1)) % length
