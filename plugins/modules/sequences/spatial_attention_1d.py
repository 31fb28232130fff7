"""Multi-head attention on sequences with any of the four terms of Transformer attention (Zhu et al. 2019).

Shapes: B batch, C channels, M heads, T queries, S keys, d width per head, K offsets.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ...terms.attention_type import parse_attention_type
from ...terms.saliency import key_saliency
from ...terms.sine_position import sine_encoding
from ..common.attention import attend
from ..common.checks import check_heads, check_padding_mask, check_range, check_sequence
from ..common.logits import SequenceLogits, as_content
from ..common.sequence_cache import SequenceCache, check_cache
from ..common.weights import rotation
from .parts.sequence_heads import SequenceAttention, split_heads

_is_dynamo_compiling = getattr(torch.compiler, "is_dynamo_compiling", lambda: False)  # torch >= 2.2


class MultiheadSpatialAttention(SequenceAttention):
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
        ValueError: An argument is out of range or inconsistent with the others.
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
        check_range("attention_range", attention_range)
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
        """Draw projections, see :meth:`reset_projections`, and u and v uniformly."""
        self.reset_projections()
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
            ValueError: A shape, a device or a combination of arguments is invalid.
            TypeError: A tensor does not have the module's dtype.
        """
        logits = self._logits(query, key, value, key_padding_mask=key_padding_mask, cache=cache)
        output = attend(logits, self.dropout if self.training else 0.0)
        output = self.out_proj(output.transpose(1, 2).flatten(2))
        if cache is not None:
            cache.steps += query.shape[1]
            if self.causal and self.attention_range != -1:
                cache.keep(self.attention_range // 2)
        return output.expand(-1, query.shape[1], -1)  # with ε3 alone, all queries have the same result

    def _logits(self, query: Tensor, *source: Any, cache: SequenceCache | None = None, **mask: Any) -> SequenceLogits:
        """Compute ε1 + ε3 as a product, the band of ε2 + ε4, and without ε1 the logits of ε3."""
        keys = self._keys(query, *source, cache=cache, **mask)
        T, S = query.shape[1], keys.value.shape[2]
        projected = self._queries(query)
        band = self._band(projected, keys.value, T, S, keys.start, cache)
        content: Tensor | None = None
        content_key, position_logits, u = keys.key, None, self.content_bias
        if self.terms.content:
            assert projected is not None
            content = projected if u is None else projected + self._scaled(u).unsqueeze(1)
        elif content_key is not None and u is not None:
            key_logits = key_saliency(content_key, self._scaled(u))
            if self.attention_range == -1:
                content_key, position_logits = None, key_logits.unsqueeze(2)
            else:  # the range needs a content term
                one, content_key = as_content(key_logits)
                content = one[:, :, :1].expand(-1, -1, T, -1)
        if content is None and band is None and self.causal:
            band = keys.value.new_zeros(1, 1, 1, 1).expand(-1, -1, T, -1)  # zeros, to define the number of queries
        return keys._replace(query=content, key=content_key, band_logits=band, position_logits=position_logits)

    def _parts(
        self, query: Tensor, *source: Any, cache: SequenceCache | None = None, **mask: Any
    ) -> dict[str, SequenceLogits]:
        """Return the attention by each term alone, by its name in :class:`.AttentionTerms`."""
        keys = self._keys(query, *source, cache=cache, **mask)
        T = query.shape[1]
        reach = self._reach(T, keys.value.shape[2], keys.start)
        # A band of zeros defines the number of queries and which keys are in range.
        taps = 1 if keys.outside_logits is None else reach + 1 if self.causal else 2 * reach + 1
        alone = keys._replace(key=None, band_logits=keys.value.new_zeros(1, 1, 1, taps).expand(-1, -1, T, -1))
        projected = self._queries(query)
        parts: dict[str, SequenceLogits] = {}
        if self.terms.content:
            parts["content"] = alone._replace(query=projected, key=keys.key)
        if self.terms.content_position:
            parts["content_position"] = alone._replace(band_logits=self._band_of(projected, None, T, reach, cache))
        if self.content_bias is not None and keys.key is not None:
            key_logits = key_saliency(keys.key, self._scaled(self.content_bias))
            parts["saliency"] = alone._replace(position_logits=key_logits.unsqueeze(2))
        if self.position_bias is not None:
            parts["position"] = alone._replace(band_logits=self._band_of(None, self.position_bias, T, reach, cache))
        return parts

    def _queries(self, query: Tensor) -> Tensor | None:
        """Project and scale queries, (B, M, T, d), if a term uses them."""
        return None if self.q_proj is None else self._scaled(split_heads(self.q_proj(query), self.num_heads))

    def _keys(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        cache: SequenceCache | None = None,
    ) -> SequenceLogits:
        """Return keys, values and masks, with those of the cache, before any logit is added."""
        key = None if key is query else key
        value = None if value is query and key is None else value
        self._check(query, key, value, cache)
        S = query.shape[1] if key is None else key.shape[1]
        check_padding_mask(key_padding_mask, query.shape[0], S, query.device)
        start, shift = 0 if cache is None else cache.steps, None
        if key is None:
            keys, values, mask = self._projected(query, query, key_padding_mask, cache)
            start = values.shape[2] - query.shape[1] if self.causal else 0
        elif cache is not None and cache.value is not None:  # projected in the first step
            keys, values, mask, shift = cache.key, cache.value, cache.key_padding_mask, cache.shift
        else:
            value = key if value is None else value
            if key_padding_mask is not None and (self.position_proj is not None or self.attention_range != -1):
                # Padding on the left would shift all source positions, so move it to the end.
                shift = key_padding_mask.int().cumprod(1).sum(1)
                order = rotation(shift, key.shape[1])
                same = value is key
                key = key.gather(1, order.unsqueeze(2).expand_as(key))
                value = key if same else value.gather(1, order.unsqueeze(2).expand_as(value))
                key_padding_mask = key_padding_mask.gather(1, order)
            keys, values, mask = self._projected(key, value, key_padding_mask, cache)
            if cache is not None:
                cache.shift = shift
        outside = -math.inf if self.attention_range != -1 else None
        return SequenceLogits(
            None, keys, values, outside_logits=outside, causal=self.causal, key_padding_mask=mask, start=start,
            shift=shift,
        )  # fmt: skip

    def _projected(
        self, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, cache: SequenceCache | None
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """Project keys and values, append them to the cache, and return all of them with their mask."""
        keys = None if self.k_proj is None else split_heads(self.k_proj(key), self.num_heads)
        values = split_heads(self.v_proj(value), self.num_heads)
        if cache is None:
            return keys, values, key_padding_mask
        cache.append(keys, values, key_padding_mask)
        assert cache.value is not None
        return cache.key, cache.value, cache.key_padding_mask

    def _band(
        self, query: Tensor | None, value: Tensor, T: int, S: int, start: int, cache: SequenceCache | None
    ) -> Tensor | None:
        """Compute ε2 + ε4 of all offsets in range, (B, M, T, K), with size 1 along axes that they do not depend on."""
        if self.position_proj is None and self.attention_range == -1:
            return None
        reach = self._reach(T, S, start)
        if self.position_proj is None:
            return value.new_zeros(1, 1, 1, reach + 1 if self.causal else 2 * reach + 1).expand(-1, -1, T, -1)
        return self._band_of(query if self.terms.content_position else None, self.position_bias, T, reach, cache)

    def _reach(self, T: int, S: int, start: int) -> int:
        """Return the largest offset of a key from a query."""
        if self.attention_range != -1:
            return self.attention_range // 2
        reach = start + T - 1
        if not self.causal:
            # Each traces only in its own cases.
            larger = max if _is_dynamo_compiling() or torch.jit.is_tracing() else torch.sym_max
            reach = larger(reach, S - 1 - start)
        return reach

    def _band_of(
        self, query: Tensor | None, v: Tensor | None, T: int, reach: int, cache: SequenceCache | None
    ) -> Tensor:
        """Compute ε2 of ``query`` plus ε4 of ``v``, or one of them."""
        assert self.position_proj is not None
        like = v if query is None else query
        assert like is not None
        table = split_heads(self._encodings(self.position_proj, reach, cache, like).unsqueeze(0), self.num_heads)[0]
        v = None if v is None else self._scaled(v)
        if query is not None:
            query = query if v is None else query + v.unsqueeze(1)
            # One product per head; matmul would copy the table for every sequence of the batch.
            return torch.einsum("bmtd,mkd->bmtk", query, table.to(query.dtype))
        assert v is not None
        band = torch.einsum("md,mkd->mk", v.to(table.dtype), table)
        return band[None, :, None].expand(-1, -1, T, -1)

    def _encodings(self, projection: nn.Linear, reach: int, cache: SequenceCache | None, like: Tensor) -> Tensor:
        """Compute R, the projected encodings of the offsets -reach ... reach, or ... 0 with ``causal``: (K, C)."""
        if cache is None:
            return self._encoded(projection, reach, like)
        known = -1
        if cache.table is not None:
            known = len(cache.table) - 1 if self.causal else len(cache.table) // 2
        if cache.table is None or known < reach:
            known = max(2 * reach, 32)  # grow geometrically, so that few steps need a new table
            cache.table = self._encoded(projection, known, like)
        return cache.table[known - reach : known + 1 + (0 if self.causal else reach)]

    def _encoded(self, projection: nn.Linear, reach: int, like: Tensor) -> Tensor:
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        offsets = torch.arange(-reach, 1 if self.causal else reach + 1, device=like.device, dtype=dtype)
        return projection(sine_encoding(offsets, self.embed_dim).to(like.dtype))

    def _scaled(self, tensor: Tensor) -> Tensor:
        return tensor if self.scale == 1 else tensor * self.scale

    def _check(self, query: Tensor, key: Tensor | None, value: Tensor | None, cache: SequenceCache | None) -> None:
        check_sequence("query", query, self.embed_dim, self.out_proj)
        B = query.shape[0]
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
            check_sequence("key", key, self.kdim, self.out_proj, B)
            if value is not None:
                check_sequence("value", value, self.kdim, self.out_proj, B)
                if value.shape[1] != key.shape[1]:
                    raise ValueError(f"value must have key's length {key.shape[1]}, got {value.shape[1]}")
        if cache is not None:
            check_cache(cache, B)
            if key is not None and cache.value is not None and cache.value.shape[2] != key.shape[1]:
                raise ValueError(f"key must be that of the cache, of length {cache.value.shape[2]}, got {key.shape[1]}")

    def extra_repr(self) -> str:
        text = f"{self.embed_dim}, num_heads={self.num_heads}, attention_type={self.attention_type!r}"
        for name, default in (
            ("attention_range", -1), ("causal", False), ("dropout", 0.0), ("scale", 1.0), ("query_key_bias", False),
            ("kdim", self.embed_dim),
        ):  # fmt: skip
            if getattr(self, name) != default:
                text += f", {name}={getattr(self, name)}"
        return text
