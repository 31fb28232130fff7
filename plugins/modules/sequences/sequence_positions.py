"""Relative positions of attention on sequences: ε2 + ε4 as a band of logits around every query.

Shapes: B batch, C channels, M heads, T queries, S keys, d width per head, K offsets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...terms.attention_type import AttentionTerms
from ...terms.sine_position import sine_encoding
from ..common.sequence_cache import SequenceCache
from .sequence_heads import SequenceAttention, split_heads

_is_dynamo_compiling = getattr(torch.compiler, "is_dynamo_compiling", lambda: False)  # torch >= 2.2


class SequencePositions(SequenceAttention):
    """Base of attention on sequences: position logits."""

    if TYPE_CHECKING:
        terms: AttentionTerms
        embed_dim: int
        num_heads: int
        attention_range: int
        causal: bool
        scale: float
        position_proj: nn.Linear | None
        position_bias: nn.Parameter | None  # v

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
            larger = max if _is_dynamo_compiling() else torch.sym_max  # each traces only in its own case
            reach = larger(reach, S - 1 - start)
        return reach

    def _band_of(
        self, query: Tensor | None, v: Tensor | None, T: int, reach: int, cache: SequenceCache | None
    ) -> Tensor:
        """Compute ε2 of ``query`` plus ε4 of ``v``, or one of them."""
        assert self.position_proj is not None
        table = split_heads(self._encodings(self.position_proj, reach, cache).unsqueeze(0), self.num_heads)[0]
        v = None if v is None else self._scaled(v)
        if query is not None:
            query = query if v is None else query + v.unsqueeze(1)
            # One product per head; matmul would copy the table for every sequence of the batch.
            return torch.einsum("bmtd,mkd->bmtk", query, table.to(query.dtype))
        assert v is not None
        band = torch.einsum("md,mkd->mk", v.to(table.dtype), table)
        return band[None, :, None].expand(-1, -1, T, -1)

    def _encodings(self, projection: nn.Linear, reach: int, cache: SequenceCache | None) -> Tensor:
        """Compute R, the projected encodings of the offsets -reach ... reach, or ... 0 with ``causal``: (K, C)."""
        if cache is None:
            return self._encoded(projection, reach)
        known = -1
        if cache.table is not None:
            known = len(cache.table) - 1 if self.causal else len(cache.table) // 2
        if cache.table is None or known < reach:
            known = max(2 * reach, 32)  # grow geometrically, so that few steps need a new table
            cache.table = self._encoded(projection, known)
        return cache.table[known - reach : known + 1 + (0 if self.causal else reach)]

    def _encoded(self, projection: nn.Linear, reach: int) -> Tensor:
        weight = projection.weight
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        offsets = torch.arange(-reach, 1 if self.causal else reach + 1, device=weight.device, dtype=dtype)
        return projection(sine_encoding(offsets, self.embed_dim).to(weight.dtype))

    def _scaled(self, tensor: Tensor) -> Tensor:
        return tensor if self.scale == 1 else tensor * self.scale
