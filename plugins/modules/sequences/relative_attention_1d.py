"""Self-attention with relative position representations (Shaw et al. 2018).

Shapes: B batch, C channels, M heads, T tokens, S keys, d width per head, k the clipping distance.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...terms.clipped_distance import clipped_band, weights_by_distance
from ..common.attention import attend
from ..common.checks import positive
from ..common.logits import SequenceLogits
from ..common.weights import mixed, weights_of
from .parts.self_attention import BandedSelfAttention


class RelativeSelfAttention(BandedSelfAttention):
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
        ValueError: An argument is out of range or inconsistent with the others.
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
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        super().__init__(embed_dim, num_heads, causal, dropout, bias, factory)
        positive(max_distance=max_distance)
        self.max_distance, self.values, self.per_head = max_distance, values, per_head
        self.scale = (embed_dim // num_heads) ** -0.5
        offsets = max_distance + 1 if causal else 2 * max_distance + 1
        table = (num_heads if per_head else 1, offsets, embed_dim // num_heads)
        self.key_table = nn.Parameter(torch.empty(table, **factory))
        self.value_table = nn.Parameter(torch.empty(table, **factory)) if values else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw projections, see :meth:`reset_projections`, and the tables by Glorot uniform initialization."""
        self.reset_projections()
        for tables in (self.key_table, self.value_table):
            for table in () if tables is None else tables.unbind():
                nn.init.xavier_uniform_(table)

    def _attended(self, logits: SequenceLogits, dropout: float) -> Tensor:
        if self.value_table is None:
            return attend(logits, dropout)
        value = logits.value
        weights = F.dropout(weights_of(logits).to(value.dtype), dropout)
        by_distance = weights_by_distance(weights, self.max_distance, logits.start, self.causal)
        return mixed(logits, weights) + by_distance.matmul(self.value_table.to(value.dtype))

    def _band(
        self, x: Tensor, content: Tensor, S: int, start: int, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | float | None]:
        band = content.matmul(self.key_table.transpose(1, 2).to(content.dtype))
        # Causal offsets beyond the table are all on one side of it, so they share one logit.
        return (band, band[..., 0]) if self.causal else (clipped_band(band, S - 1), None)

    def extra_repr(self) -> str:
        text = f"{self.embed_dim}, num_heads={self.num_heads}, max_distance={self.max_distance}, values={self.values}"
        return text + (", per_head=True" if self.per_head else "") + (", causal=True" if self.causal else "")
