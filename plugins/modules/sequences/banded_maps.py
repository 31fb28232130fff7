"""The attention maps of self-attention on sequences, by content and a band of positions.

Shapes: B batch, M heads, T queries, S keys, Q chosen queries.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from ..common.sequence_cache import SequenceCache
from .sequence_heads import logits_of, weights_of


class BandedMaps(nn.Module):
    """Mixin for attention maps and logits, from the ``_arguments`` that a module passes to ``sequence_attention``."""

    def _arguments(self, query: Tensor, key_padding_mask: Tensor | None, cache: SequenceCache | None) -> dict[str, Any]:
        """Return the arguments of ``sequence_attention``."""
        raise NotImplementedError

    @torch.no_grad()
    def attention_maps(
        self,
        query: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        cache: SequenceCache | None = None,
        queries: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention weights of ``forward`` for inspection, in O(T S) memory. The cache is not changed.

        Args:
            query: As in ``forward``.
            key_padding_mask: As in ``forward``.
            cache: As in ``forward``.
            queries: (Q,), positions in ``query``; None for all.

        Returns:
            (B, M, T, S), or (B, M, Q, S) with ``queries``; S includes the keys of the cache.
        """
        cache = None if cache is None else dataclasses.replace(cache)
        maps = weights_of(self._arguments(query, key_padding_mask, cache))
        return maps if queries is None else maps[:, :, queries]

    @torch.no_grad()
    def attention_logits(
        self,
        query: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        cache: SequenceCache | None = None,
        queries: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Compute the logits of content and of position, -inf at masked keys.

        The softmax of their sum is :meth:`attention_maps`, whose arguments and axes are the same.
        """
        cache = None if cache is None else dataclasses.replace(cache)
        arguments = self._arguments(query, key_padding_mask, cache)
        found = {
            "content": logits_of({**arguments, "band_logits": None, "outside_logits": None}),
            "position": logits_of({**arguments, "query": None, "key": None}),
        }
        return found if queries is None else {name: part[:, :, queries] for name, part in found.items()}
