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
from ..common.checks import check_heads, check_padding_mask, check_sequence, one_of
from ..common.sequence_cache import SequenceCache, check_cache
from .banded_maps import BandedMaps
from .sequence_heads import attended, split_heads

SequenceSmoothing = Literal["sqrt_d", "sqrt_embed_dim", "zscore"]


class BilateralSelfAttention(BandedMaps):
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
        ValueError: an argument is out of range or inconsistent with the others.
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
        super().__init__()
        check_heads(embed_dim, num_heads, dropout)
        if kernel_size is None:
            kernel_size = 11 if causal else 21
        if not isinstance(kernel_size, int) or kernel_size < 1 or (kernel_size % 2 == 0 and not causal):
            raise ValueError(f"kernel_size must be a positive odd int, or any with causal, got {kernel_size!r}")
        one_of(Outside, outside=outside)
        one_of(SequenceSmoothing, smoothing=smoothing)
        if smoothing != "sqrt_embed_dim":
            check_smoothing(outside, smoothing)
        self.embed_dim, self.num_heads, self.kernel_size = embed_dim, num_heads, kernel_size
        self.outside, self.smoothing, self.causal, self.dropout = outside, smoothing, causal, dropout
        self.scale = (embed_dim if smoothing == "sqrt_embed_dim" else embed_dim // num_heads) ** -0.5
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(embed_dim, embed_dim, bias=bias, **factory) for _ in range(4)
        )
        self.position = nn.Sequential(  # f
            nn.Linear(embed_dim, embed_dim, **factory),
            nn.Linear(embed_dim, num_heads * predicted_values(kernel_size, outside), **factory),
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all layers by Glorot uniform initialisation, the input projections as one matrix; zero the biases."""
        joint = (self.q_proj, self.k_proj, self.v_proj)
        for layer in (*joint, self.out_proj, *self.position):
            assert isinstance(layer, nn.Linear)
            nn.init.xavier_uniform_(layer.weight, gain=1 / math.sqrt(2) if layer in joint else 1.0)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

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
            ValueError: a shape, a device or a combination of arguments is invalid.
            TypeError: a tensor does not have the module's dtype.
        """
        arguments = self._arguments(query, key_padding_mask, cache)
        output = self.out_proj(attended(arguments, self.dropout if self.training else 0.0))
        if cache is not None:
            cache.steps += query.shape[1]
            if self.outside == "-inf":
                cache.keep(self.kernel_size - 1)
        return output

    def _arguments(self, query: Tensor, key_padding_mask: Tensor | None, cache: SequenceCache | None) -> dict[str, Any]:
        """Return the arguments of ``sequence_attention``."""
        weight = self.out_proj.weight
        check_sequence("query", query, self.embed_dim, weight)
        B, T, _ = query.shape
        check_padding_mask(key_padding_mask, B, T, weight.device)
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
        start = value.shape[2] - T
        band, beyond = self._position_logits(query, value.shape[2], start, key_padding_mask)
        return dict(
            query=content, key=key, value=value, band_logits=band, outside_logits=beyond, causal=self.causal,
            key_padding_mask=key_padding_mask, start=start, scale=1.0,
        )  # fmt: skip

    def _position_logits(
        self, x: Tensor, S: int, start: int, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | float | None]:
        """Compute δ_p / σ_p inside the window, (B, M, T, k), and beyond it."""
        k = self.kernel_size
        predicted = split_heads(self.position(x), self.num_heads)
        if self.smoothing != "zscore":
            predicted = predicted * self.scale
        else:
            values = with_outside(predicted, self.outside)
            counted, number = counted_keys(x.shape[1], S, k, start, self.causal, key_padding_mask, x.device)
            return standardised_band(values[..., :k], values[..., k], counted, number)
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
