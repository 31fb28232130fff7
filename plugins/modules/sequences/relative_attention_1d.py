"""Self-attention with relative position representations (Shaw et al. 2018).

Shapes: B batch, C channels, M heads, T tokens, S keys, d width per head, k the clipping distance.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...terms.clipped_distance import clipped_band, weights_by_distance
from ..common.checks import check_heads, check_padding_mask, check_sequence, positive
from ..common.sequence_cache import SequenceCache, check_cache
from .banded_maps import BandedMaps
from .sequence_heads import attended, split_heads, weights_of


class RelativeSelfAttention(BandedMaps):
    """Multi-head self-attention with a learned vector of the distance added to keys and values.

    Source: Shaw et al. (2018), Eq. 3 to 5. In each head, with a_ij = w[max(-k, min(k, j - i))],

        z_i = Σ_j α_ij (v_j + a^V_ij),    α_i = softmax_j(q_i·(k_j + a^K_ij) / √d)

    Neither a^K nor a^V is expanded to T × T. With ``values`` the attention weights are held in memory, (B, M, T, S).

    Args:
        embed_dim: C.
        num_heads: M; must divide C.
        max_distance: k; more distant keys share the vector of k.
        values: Whether to add vectors to values too; else to keys only, as in the paper's Table 3.
        per_head: Whether each head has its own vectors; else all heads share one table.
        causal: Whether to mask all keys after the query; the tables then have offsets -k ... 0.
        dropout: Dropout probability of the attention weights, which are then held in memory, T × T.
        bias: Whether the four projections have biases.

    Shapes:
        (B, T, C) -> (B, T, C)

    Raises:
        ValueError: an argument is out of range or inconsistent with the others.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 8,
        max_distance: int = 16,
        values: bool = True,
        per_head: bool = False,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads, dropout)
        positive(max_distance=max_distance)
        self.embed_dim, self.num_heads, self.max_distance = embed_dim, num_heads, max_distance
        self.values, self.per_head, self.causal, self.dropout = values, per_head, causal, dropout
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(embed_dim, embed_dim, bias=bias, **factory) for _ in range(4)
        )
        offsets = max_distance + 1 if causal else 2 * max_distance + 1
        table = (num_heads if per_head else 1, offsets, embed_dim // num_heads)
        self.key_table = nn.Parameter(torch.empty(table, **factory))
        self.value_table = nn.Parameter(torch.empty(table, **factory)) if values else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw tables and projections by Glorot uniform initialisation, the inputs' as one matrix; zero the biases."""
        joint = (self.q_proj, self.k_proj, self.v_proj)
        for layer in (*joint, self.out_proj):
            nn.init.xavier_uniform_(layer.weight, gain=1 / math.sqrt(2) if layer in joint else 1.0)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        for tables in (self.key_table, self.value_table):
            for table in () if tables is None else tables.unbind():
                nn.init.xavier_uniform_(table)

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
        dropout = self.dropout if self.training else 0.0
        if cache is not None:
            cache.steps += query.shape[1]
        if self.value_table is None:
            return self.out_proj(attended(arguments, dropout))
        value = arguments["value"]
        weights = F.dropout(weights_of(arguments).to(value.dtype), dropout)
        by_distance = weights_by_distance(weights, self.max_distance, arguments["start"], self.causal)
        output = weights.matmul(value) + by_distance.matmul(self.value_table.to(value.dtype))
        return self.out_proj(output.transpose(1, 2).flatten(2))

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
        content = content * (self.embed_dim // self.num_heads) ** -0.5
        if cache is not None:
            cache.append(key, value, key_padding_mask)
            assert cache.key is not None
            assert cache.value is not None
            key, value, key_padding_mask = cache.key, cache.value, cache.key_padding_mask
        S = value.shape[2]
        band = content.matmul(self.key_table.transpose(1, 2).to(content.dtype))
        # Causal offsets beyond the table are all on one side of it, so they share one logit.
        beyond, band = (band[..., 0], band) if self.causal else (None, clipped_band(band, S - 1))
        return dict(
            query=content, key=key, value=value, band_logits=band, outside_logits=beyond, causal=self.causal,
            key_padding_mask=key_padding_mask, start=S - T, scale=1.0,
        )  # fmt: skip

    def extra_repr(self) -> str:
        text = f"{self.embed_dim}, num_heads={self.num_heads}, max_distance={self.max_distance}, values={self.values}"
        return text + (", per_head=True" if self.per_head else "") + (", causal=True" if self.causal else "")
