"""Bilateral self-attention on sequences: content and non-localized position logits (Thesis, section 3.4.4).

Shapes: B batch, C channels, M heads, T tokens, S keys, d width per head, k taps of the position logits' window.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...terms.nonlocal_band import counted_keys, standardised_band
from ...terms.nonlocal_position import Outside, check_smoothing, predicted_values, with_outside
from ..common.checks import one_of
from .parts.self_attention import BandedSelfAttention
from .parts.sequence_heads import split_heads

SequenceSmoothing = Literal["sqrt_d", "sqrt_embed_dim", "zscore"]


class BilateralSelfAttention(BandedSelfAttention):
    """Multi-head self-attention with logits of content and of position.

    Source: Thesis, Eq. 3.9 to 3.12 and section 3.4.4. In head m, the logit of key j for query i is
    θ(x_i)·φ(x_j) / √d + δ_p(x_i, i, j) / σ_p. Two linear layers f(x_i) predict δ_p for the k keys around i, or with
    ``causal`` for i and the k - 1 keys before it; for all other keys δ_p is v_i. Neither is expanded to T × T.

    Args:
        embed_dim: C.
        num_heads: M; must divide C.
        kernel_size: k, odd, or any with ``causal``; None for 21, or 11 with ``causal`` (Table 3.7).
        outside: v: ``'zero'``, ``'learned'`` (one more value predicted for each head), ``'-inf'``, ``'min'`` or
            ``'mean'`` of the window's values.
        smoothing: σ_p: ``'sqrt_d'`` divides the position logits by √d, where d = C / M is a head's width; ``'zscore'``
            standardises them over all keys of a query. ``'sqrt_embed_dim'`` divides content and position logits by
            √C, another reading of "root of embedding dimension √d" in section 3.6.2.
        causal: Whether to mask all keys after the query.
        dropout: Dropout probability of the attention weights, which are then held in memory, T × T.
        bias: Whether the layers have biases; those of f always do.

    Shapes:
        (B, T, C) -> (B, T, C)

    Raises:
        ValueError: An argument is out of range or inconsistent with the others.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 8,
        kernel_size: int | None = None,
        outside: Outside = "zero",
        smoothing: SequenceSmoothing = "sqrt_d",
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        super().__init__(embed_dim, num_heads, causal, dropout, bias, factory)
        if kernel_size is None:
            kernel_size = 11 if causal else 21
        if not isinstance(kernel_size, int) or kernel_size < 1 or (kernel_size % 2 == 0 and not causal):
            raise ValueError(f"kernel_size must be a positive odd int, or any with causal, got {kernel_size!r}")
        one_of(Outside, outside=outside)
        one_of(SequenceSmoothing, smoothing=smoothing)
        if smoothing != "sqrt_embed_dim":
            check_smoothing(outside, smoothing)
        self.kernel_size, self.outside, self.smoothing = kernel_size, outside, smoothing
        self.kept = kernel_size - 1 if outside == "-inf" else None
        self.scale = (embed_dim if smoothing == "sqrt_embed_dim" else embed_dim // num_heads) ** -0.5
        self.position = nn.Sequential(  # f
            nn.Linear(embed_dim, embed_dim, **factory),
            nn.Linear(embed_dim, num_heads * predicted_values(kernel_size, outside), **factory),
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all layers; see :meth:`reset_projections`."""
        self.reset_projections()

    def _band(
        self, x: Tensor, content: Tensor, S: int, start: int, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | float | None]:
        k = self.kernel_size
        predicted = split_heads(self.position(x), self.num_heads)
        if self.smoothing == "zscore":
            values = with_outside(predicted, self.outside)
            counted, number = counted_keys(x.shape[1], S, k, start, self.causal, key_padding_mask, x.device)
            return standardised_band(values[..., :k], values[..., k], counted, number)
        predicted = predicted * self.scale
        if self.outside in ("-inf", "zero"):
            return predicted, -math.inf if self.outside == "-inf" else None
        values = with_outside(predicted, self.outside)
        return values[..., :k], values[..., k]

    def extra_repr(self) -> str:
        text = (
            f"{self.embed_dim}, num_heads={self.num_heads}, kernel_size={self.kernel_size}, "
            f"outside={self.outside!r}, smoothing={self.smoothing!r}"
        )
        return text + (", causal=True" if self.causal else "")
