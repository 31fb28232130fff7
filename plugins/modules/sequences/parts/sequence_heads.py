"""Shared parts of attention modules on sequences: heads, initial draws, and inspection.

Shapes: B batch, M heads, T queries, S keys, d width per head.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn

from ....core.axes import unflatten
from ...common.logits import SequenceLogits
from ...common.sequence_cache import SequenceCache
from ...common.weights import parts, sequence_logits, sequence_weights


def split_heads(projected: Tensor, num_heads: int) -> Tensor:
    """View (B, T, M * d) as (B, M, T, d)."""
    return unflatten(projected, 2, (num_heads, -1)).transpose(1, 2)


class SequenceAttention(nn.Module):
    """Base of attention modules on sequences: initial draws, and the weights and the logits for inspection."""

    def _logits(self, *args: Any, **kwargs: Any) -> SequenceLogits:
        """Check the arguments of ``forward`` and return what their attention adds up."""
        raise NotImplementedError

    def _parts(self, *args: Any, **kwargs: Any) -> dict[str, SequenceLogits]:
        """Return the attention by each term alone."""
        return parts(self._logits(*args, **kwargs))

    def reset_projections(self) -> None:
        """Draw linear layers by Glorot uniform initialization, the inputs' as one matrix; zero the biases."""
        joint = [getattr(self, name) for name in ("q_proj", "k_proj", "v_proj")]
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight, gain=1 / math.sqrt(2) if layer in joint else 1.0)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    @torch.no_grad()
    def attention_maps(
        self,
        query: Tensor,
        *source: Any,
        cache: SequenceCache | None = None,
        queries: Tensor | None = None,
        **mask: Any,
    ) -> Tensor:
        """Compute the attention weights of ``forward`` for inspection, in O(T S) memory. The cache is not changed.

        Args:
            query: As in ``forward``, like its other arguments.
            source: Key and value, where ``forward`` takes them; also by name.
            cache: As in ``forward``.
            queries: (Q,), positions in ``query``; None for all.
            mask: ``key_padding_mask``.

        Returns:
            (B, M, T, S), or (B, M, Q, S) with ``queries``; S includes the keys of the cache.
        """
        cache = None if cache is None else dataclasses.replace(cache)
        return sequence_weights(self._logits(query, *source, cache=cache, **mask), query.shape[1], queries)

    @torch.no_grad()
    def attention_logits(
        self,
        query: Tensor,
        *source: Any,
        cache: SequenceCache | None = None,
        queries: Tensor | None = None,
        **mask: Any,
    ) -> dict[str, Tensor]:
        """Compute the logits of each term by name, -inf at keys that are masked or out of range.

        The softmax of their sum is :meth:`attention_maps`, whose arguments and axes are the same.
        """
        cache = None if cache is None else dataclasses.replace(cache)
        found = self._parts(query, *source, cache=cache, **mask)
        return {name: sequence_logits(part, query.shape[1], queries) for name, part in found.items()}
