"""A Transformer's attention over tokens on a grid, to whose content term the other three are added.

Shapes: B batch, N tokens, C channels, M heads, d width per head, (H, W) the grid, N = H * W.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops import global_attention
from ..terms.attention_type import parse_attention_type
from ..terms.relative_position import axis_offsets, relative_logits
from ..terms.saliency import key_saliency
from ..terms.sine_position import sine_encoding
from ..terms.window import axis_window
from .checks import check_heads, check_padding_mask, check_sequence, check_tensor


class SpatialSelfAttention(nn.Module):
    """``nn.MultiheadAttention`` over tokens on a grid, with any of the four terms of Zhu et al. (2019) as logits.

    ::

        logit = scale * (ε1 + gate * (ε2 + ε3 + ε4)),    scale = d ** -0.5
        1000  ε1 = q·k            query content and key content
        0100  ε2 = q·R[k - q]     query content and relative position
        0010  ε3 = u·k            key content alone
        0001  ε4 = v·R[k - q]     relative position alone

    ``gate`` (M) is 0 at the start: with the content term the module is then ``nn.MultiheadAttention``, whose weights it
    takes (``in_proj_weight``, ``in_proj_bias``, ``out_proj``). A checkpoint without the added parameters loads strictly
    and leaves those as they are.

    Args:
        embed_dim: C.
        num_heads: M; must divide C.
        attention_type: Four bits, ε1 to ε4.
        spatial_range: n_k, odd: keys are limited to |Δ| <= (n_k - 1) / 2 rows and columns; -1: all keys.
        dropout: Share of the attention weights that is dropped in training, where they are written out then.
        bias: Whether the projections have biases.

    Raises:
        ValueError: an argument is out of its range, or does not fit the others.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        attention_type: str = "1111",
        spatial_range: int = -1,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads, dropout)
        self.terms = parse_attention_type(attention_type)
        if not isinstance(spatial_range, int) or (
            spatial_range != -1 and (spatial_range < 1 or spatial_range % 2 == 0)
        ):
            raise ValueError(f"spatial_range must be -1 (all keys) or a positive odd int (n_k), got {spatial_range!r}")
        if self.terms.relative and embed_dim % 2:
            raise ValueError(f"embed_dim must be even (sines and cosines of positions), got {embed_dim}")
        self.embed_dim, self.num_heads, self.attention_type = embed_dim, num_heads, attention_type
        self.spatial_range, self.dropout = spatial_range, dropout
        self.scale = (embed_dim // num_heads) ** -0.5
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, **factory))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * embed_dim, **factory)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)

        def vector() -> nn.Parameter:
            return nn.Parameter(torch.empty(embed_dim, **factory))

        def table() -> nn.Linear:
            return nn.Linear(embed_dim, embed_dim, bias=False, **factory)

        self.row_table = table() if self.terms.relative else None
        self.column_table = table() if self.terms.relative else None
        self.saliency = vector() if self.terms.saliency else None  # u
        self.position = vector() if self.terms.position else None  # v
        added = self.terms.relative or self.terms.saliency
        self.gate = nn.Parameter(torch.empty(num_heads, **factory)) if added else None
        self.reset_parameters()

    @property
    def needs_grid(self) -> bool:
        """Whether tokens must have places: for ε2, ε4 and a range."""
        return self.terms.relative or self.spatial_range != -1

    def reset_parameters(self) -> None:
        """Projections as in ``nn.MultiheadAttention``; tables and vectors uniform, the gate 0."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        self.out_proj.reset_parameters()
        for bias in (self.in_proj_bias, self.out_proj.bias, self.gate):
            if bias is not None:
                nn.init.zeros_(bias)
        for table in (self.row_table, self.column_table):
            if table is not None:
                nn.init.xavier_uniform_(table.weight)
        bound = 1 / math.sqrt(2 * (self.embed_dim // self.num_heads))
        for vector in (self.saliency, self.position):
            if vector is not None:
                nn.init.uniform_(vector, -bound, bound)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        grid: tuple[int, int] | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend from every token to all others.

        Args:
            query: (B, N, C), row by row.
            key: (B, N, C), the same tokens; None for ``query``. Without ε2, ε4 and a range, (B, S, C): cross-attention.
            value: (B, N, C); None for ``key``.
            grid: (H, W) with H * W = N; needed for ε2, ε4 and a range.
            key_padding_mask: (B, N), bool; True for padding.
            attn_mask: (N, S) or (B * M, N, S), bool (True leaves out) or added to the logits; with it the weights are
                written out.

        Returns:
            (B, N, C).

        Raises:
            ValueError: a shape does not fit, or there is no grid where one is needed.
            TypeError: an argument is no Tensor, or not of the module's dtype.
        """
        key = query if key is None else key
        value = key if value is None else value
        check_sequence("query", query, self.embed_dim, self.in_proj_weight)
        B, N, _ = query.shape
        for name, tokens in (("key", key), ("value", value)):
            check_sequence(name, tokens, self.embed_dim, self.in_proj_weight, B)
        S = key.shape[1]
        if value.shape[1] != S:
            raise ValueError(f"value must have as many tokens as key, {S}, got {value.shape[1]}")
        check_padding_mask(key_padding_mask, B, S, query.device)
        queries, keys = (1, N), (1, S)  # without places, a grid of one row
        if self.needs_grid:
            if grid is None:
                raise ValueError(f"grid must be (H, W) for attention_type {self.attention_type!r}, got None")
            if grid[0] * grid[1] != N or S != N:
                raise ValueError(f"grid must hold the {N} tokens of query, and as many of key ({S}), got {grid}")
            queries = keys = grid
        q, k, v = (
            F.linear(x, weight, bias).view(B, *size, self.num_heads, -1).permute(0, 3, 1, 2, 4)
            for x, size, weight, bias in zip((query, key, value), (queries, keys, keys), *self._projections())
        )
        q = q * self.scale
        row, column, key_logits = self._added(q, k, keys, key_padding_mask)
        content: tuple[Tensor | None, Tensor | None] = (q, k) if self.terms.content else (None, None)
        if attn_mask is not None or (self.training and self.dropout):
            output = self._written_out(
                content, v, row, column, key_logits, queries, _mask(attn_mask, B * self.num_heads, N, S)
            )
        else:
            if not self.terms.content and row is None and column is None and key_logits is None:
                key_logits = v.new_zeros(1, 1, *keys)  # the mean of all values
            output = global_attention(
                content[0], content[1], v, row_logits=row, column_logits=column, key_logits=key_logits
            )
        output = output.expand(-1, -1, *queries, -1)  # of one query, where none differs
        return self.out_proj(output.permute(0, 2, 3, 1, 4).reshape(B, N, self.embed_dim))

    def _projections(self) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return self.in_proj_weight.chunk(3), biases

    def _added(
        self, q: Tensor, k: Tensor, keys: tuple[int, int], key_padding_mask: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Row, column and key logits: the gated terms, the range, and -inf for padding."""
        row = column = key_logits = None
        if self.gate is not None:
            gate = self.gate.view(-1, 1)
            if self.saliency is not None:
                key_logits = key_saliency(k, gate * self.scale * self._heads(self.saliency))
            if self.row_table is not None and self.column_table is not None:
                moved = q if self.terms.content_position else torch.zeros_like(q[:1, :, :1, :1])
                if self.position is not None:
                    moved = moved + (self.scale * self._heads(self.position))[:, None, None]
                moved = (moved * gate[:, None, None]).expand(-1, -1, *keys, -1)
                row = relative_logits(moved, self._table(self.row_table.weight, keys[0]), keys[0], "row")
                column = relative_logits(moved, self._table(self.column_table.weight, keys[1]), keys[1], "column")
        if self.spatial_range != -1:
            limits = [axis_window(n, n, self.spatial_range // 2, device=q.device).to(q.dtype) for n in keys]
            rows, columns = limits[0][None, None, :, None], limits[1][None, None, None]
            row = rows if row is None else row + rows
            column = columns if column is None else column + columns
        if key_padding_mask is not None:
            key_logits = q.new_zeros(1) if key_logits is None else key_logits
            key_logits = key_logits.masked_fill(key_padding_mask.view(-1, 1, *keys), -math.inf)
        return row, column, key_logits

    def _table(self, weight: Tensor, size: int) -> Tensor:
        """The projected encodings of offsets along one axis, (M, d, 2 * size - 1)."""
        offsets = axis_offsets(size, size, device=weight.device)
        offsets = offsets.to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
        encoding = sine_encoding(offsets, self.embed_dim, 10000.0).to(weight.dtype)
        return F.linear(encoding, weight).unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0)

    def _heads(self, vector: Tensor) -> Tensor:
        return vector.view(self.num_heads, -1)

    def _written_out(
        self,
        content: tuple[Tensor | None, Tensor | None],
        v: Tensor,
        row: Tensor | None,
        column: Tensor | None,
        key_logits: Tensor | None,
        size: tuple[int, int],
        mask: Tensor | None,
    ) -> Tensor:
        """With weights in memory, of which training drops some: (B, M, H, W, d)."""
        q, k = content
        logits = v.new_zeros(1, 1, 1, 1, 1, 1)
        for part, axes in ((row, (5,)), (column, (4,)), (key_logits, (2, 2))):
            if part is not None:
                for axis in axes:
                    part = part.unsqueeze(axis)
                logits = logits + part
        B, M, Hk, Wk, _ = v.shape
        logits = logits.expand(B, M, *size, Hk, Wk).flatten(4, 5).flatten(2, 3)
        if q is not None and k is not None:
            logits = logits + q.flatten(2, 3) @ k.flatten(2, 3).mT
        if mask is not None:
            mask = mask if mask.dim() == 2 else mask.unflatten(0, (B, M))
            logits = logits.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else logits + mask
        weights = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).to(v.dtype)
        weights = F.dropout(weights, self.dropout, self.training)
        return (weights @ v.flatten(2, 3)).unflatten(2, size)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name, own in self.state_dict().items():
            if name.split(".")[0] not in ("in_proj_weight", "in_proj_bias", "out_proj"):
                state_dict.setdefault(prefix + name, own)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        text = f"{self.embed_dim}, {self.num_heads}, attention_type={self.attention_type!r}"
        return text + (f", spatial_range={self.spatial_range}" if self.spatial_range != -1 else "")


def _mask(mask: Tensor | None, heads: int, N: int, S: int) -> Tensor | None:
    """Check an ``attn_mask``; ``heads`` are those of the whole batch."""
    if mask is None:
        return None
    check_tensor("attn_mask", mask)
    if mask.shape not in ((N, S), (heads, N, S)):
        raise ValueError(
            f"attn_mask must have shape {(N, S)} or (B * M, N, S) = {(heads, N, S)}, got {tuple(mask.shape)}"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"attn_mask must be bool or floating, got {mask.dtype}")
    return mask
