"""Base of self-attention on sequences by content and a band of position logits.

Shapes: B batch, C channels, M heads, T tokens, S keys, d width per head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ...common.attention import attend
from ...common.checks import check_heads, check_padding_mask, check_sequence
from ...common.logits import SequenceLogits
from ...common.sequence_cache import SequenceCache, check_cache
from .sequence_heads import SequenceAttention, split_heads


class BandedSelfAttention(SequenceAttention):
    """Base with the four projections, whose subclasses set ``scale`` and implement :meth:`_band`."""

    if TYPE_CHECKING:  # torch.jit, which traces fairseq's models, would read annotations and understands no strings
        scale: float  # factor of the content logits
        kept: int | None  # number of keys that a cache keeps; None for all

    def __init__(
        self, embed_dim: int, num_heads: int, causal: bool, dropout: float, bias: bool, factory: dict[str, Any]
    ) -> None:
        super().__init__()
        self.kept = None
        check_heads(embed_dim, num_heads, dropout)
        self.embed_dim, self.num_heads, self.causal, self.dropout = embed_dim, num_heads, causal, dropout
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(embed_dim, embed_dim, bias=bias, **factory) for _ in range(4)
        )

    def forward(
        self, query: Tensor, *, key_padding_mask: Tensor | None = None, cache: SequenceCache | None = None
    ) -> Tensor:
        """Attend from every token of ``query`` to all of them.

        Args:
            query: (B, T, C). With ``cache`` one or more next tokens.
            key_padding_mask: (B, T) bool, True for tokens to leave out.
            cache: For step-by-step decoding with ``causal``: the same one in every step, updated in place.

        Returns:
            (B, T, C).

        Raises:
            ValueError: A shape, a device or a combination of arguments is invalid.
            TypeError: A tensor does not have the module's dtype.
        """
        logits = self._logits(query, key_padding_mask=key_padding_mask, cache=cache)
        if cache is not None:
            cache.steps += query.shape[1]
            if self.kept is not None:
                cache.keep(self.kept)
        output = self._attended(logits, self.dropout if self.training else 0.0)
        return self.out_proj(output.transpose(1, 2).flatten(2))

    def _attended(self, logits: SequenceLogits, dropout: float) -> Tensor:
        """Compute the heads' weighted sums, (B, M, T, d)."""
        return attend(logits, dropout)

    def _logits(
        self, query: Tensor, *, key_padding_mask: Tensor | None = None, cache: SequenceCache | None = None
    ) -> SequenceLogits:
        check_sequence("query", query, self.embed_dim, self.out_proj)
        B, T, _ = query.shape
        check_padding_mask(key_padding_mask, B, T, query.device)
        if cache is not None:
            if not self.causal:
                raise ValueError("cache needs causal=True: otherwise new keys would change earlier outputs")
            check_cache(cache, B)
        content, key, value = (
            split_heads(layer(query), self.num_heads) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        content = content * self.scale
        if cache is not None:
            cache.append(key, value, key_padding_mask)
            assert cache.key is not None
            assert cache.value is not None
            key, value, key_padding_mask = cache.key, cache.value, cache.key_padding_mask
        S = value.shape[2]
        band, outside = self._band(query, content, S, S - T, key_padding_mask)
        return SequenceLogits(
            content, key, value, band, outside, causal=self.causal, key_padding_mask=key_padding_mask, start=S - T
        )

    def _band(
        self, x: Tensor, content: Tensor, S: int, start: int, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | float | None]:
        """Compute the position logits of a band around each query, (B, M, T, K), and outside it.

        Args:
            x: (B, T, C), the tokens of the queries.
            content: (B, M, T, d), scaled queries.
            S: Number of keys.
            start: Position of the first query among the keys.
            key_padding_mask: (B, S), or None.
        """
        raise NotImplementedError
