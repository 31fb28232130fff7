"""A Transformer's attention over tokens on a grid, to whose content term the other three are added.

Shapes: B batch, N tokens, C channels, M heads, d width per head, (H, W) the grid, N = H * W.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops import global_attention, sequence_attention, window_attention
from ..terms.nonlocal_position import Outside, Smoothing
from .checks import check_heads, check_padding_mask, check_sequence, check_tensor
from .grid_terms import Grid, GridTerms


class SpatialSelfAttention(GridTerms):
    """``nn.MultiheadAttention`` over tokens on a grid, with more terms in its logits.

    ::

        logit = scale * (ε1 + gate * (ε2 + ε3 + ε4)) + gate * δ / σ,    scale = d ** -0.5
        1000  ε1 = q·k            query content and key content
        0100  ε2 = q·R[k - q]     query content and relative position
        0010  ε3 = u·k            key content alone
        0001  ε4 = v·R[k - q]     relative position alone
              δ                   with kernel_size: predicted from the query for the k × k keys around it

    The four terms are those of Zhu et al. (2019), Eq. 2; δ is Thesis, Eq. 3.12. ``gate`` (M) is 0 at the start: with
    the content term the module is then ``nn.MultiheadAttention``, whose weights it takes (``in_proj_weight``,
    ``in_proj_bias``, ``out_proj``). A checkpoint without the added parameters loads strictly and leaves them alone.

    Args:
        embed_dim: C.
        num_heads: M; must divide C.
        attention_type: Four bits, ε1 to ε4.
        spatial_range: n_k, odd: keys are limited to |Δ| <= (n_k - 1) / 2 rows and columns; -1: all keys.
        dropout: Share of the attention weights that is dropped in training, where they are written out then.
        bias: Whether the projections have biases.
        kernel_size: k, odd, of δ; None: without δ. Its logits are written out, (N, N) a head, unless keys are limited.
        outside: δ beyond the window: ``'learned'`` (one more predicted value), ``'zero'``, ``'min'``, ``'mean'``, or
            ``'-inf'``, which limits keys to the window, from the start and whatever the gate.
        smoothing: σ: ``'zscore'`` standardises a query's δ over its keys, ``'sqrt_d'`` divides them by √d.

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
        kernel_size: int | None = None,
        outside: Outside = "learned",
        smoothing: Smoothing = "zscore",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_heads(embed_dim, num_heads, dropout)
        super().__init__(embed_dim, num_heads, attention_type, spatial_range, kernel_size, outside, smoothing)
        self.dropout = dropout
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, **factory))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * embed_dim, **factory)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        self.make_terms(**factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projections as ``nn.MultiheadAttention`` does; what is added as :meth:`reset_terms` says."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        self.out_proj.reset_parameters()
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        self.reset_terms()

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
            key: (B, N, C), the same tokens; None for ``query``. Where no term needs places, (B, S, C): cross-attention.
            value: (B, N, C); None for ``key``.
            grid: (H, W) with H * W = N; needed for ε2, ε4, δ and a range.
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
        if attn_mask is not None:
            attn_mask = _checked_mask(attn_mask, B * self.num_heads, N, S)
        queries, keys = (1, N), (1, S)  # without places, a grid of one row
        if self.needs_grid:
            if grid is None:
                raise ValueError(f"grid must be (H, W) for {self.described()}, got None")
            if grid[0] * grid[1] != N or S != N:
                raise ValueError(f"grid must hold the {N} tokens of query, and as many of key ({S}), got {grid}")
            queries = keys = grid
        q, k, v = (
            F.linear(x, weight, bias).view(B, *size, self.num_heads, -1).permute(0, 3, 1, 2, 4)
            for x, size, weight, bias in zip((query, key, value), (queries, keys, keys), *self._projections())
        )
        q = q * self.scale
        if attn_mask is not None or (self.training and self.dropout):
            output = self._written_out(query, q, k, v, key_padding_mask, attn_mask)
        elif self.radius is not None:
            output = self._in_windows(query, q, k, v, keys, key_padding_mask)
        else:
            output = self._everywhere(query, q, k, v, keys, key_padding_mask)
        output = output.expand(B, -1, *queries, -1)  # of one query, where none differs
        return self.out_proj(output.permute(0, 2, 3, 1, 4).reshape(B, N, self.embed_dim))

    def described(self) -> str:
        """What asks for places, in words."""
        text = f"attention_type {self.attention_type!r}"
        if self.spatial_range != -1:
            text += f", spatial_range {self.spatial_range}"
        return text if self.kernel_size is None else f"{text}, kernel_size {self.kernel_size}"

    def _projections(self) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return self.in_proj_weight.chunk(3), biases

    def _content(self, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return (q, k) if self.terms.content else (None, None)

    def _everywhere(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, keys: Grid, padding: Tensor | None) -> Tensor:
        """Attend to all keys: (B, M, H, W, d)."""
        content = self._content(q, k)
        row, column = self.axis_logits(q, keys)
        key_logits = self.key_logits(k)
        predicted = self.predicted_logits(x, keys, padding)
        if predicted is not None:
            logits = predicted + _pairs(row, column, key_logits, v)
            query, key = (None if t is None else t.flatten(2, 3) for t in content)
            output = sequence_attention(query, key, v.flatten(2, 3), position_logits=logits, key_padding_mask=padding)
            return output.unflatten(2, keys)
        if padding is not None:
            key_logits = q.new_zeros(1) if key_logits is None else key_logits
            key_logits = key_logits.masked_fill(padding.view(-1, 1, *keys), -math.inf)
        if content[0] is None and row is None and column is None and key_logits is None:
            key_logits = v.new_zeros(1, 1, *keys)  # the mean of all values
        return global_attention(*content, v, row_logits=row, column_logits=column, key_logits=key_logits)

    def _in_windows(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, keys: Grid, padding: Tensor | None) -> Tensor:
        """Attend to the keys in range: (B, M, H, W, d)."""
        position, taps = self.tap_logits(x, q, keys, padding)
        content = self._content(q, k)
        key_logits = self.key_logits(k)
        if key_logits is not None:
            if content[0] is None:  # a key's own logit is the product with a query of 1
                content = torch.ones_like(key_logits).unsqueeze(-1), key_logits.unsqueeze(-1)
            else:  # ε1 + ε3 = (q + u)·k
                assert self.saliency is not None
                content = q + self._gate(3) * (self.scale * self._heads(self.saliency))[:, None, None], k
        if content[0] is None and position is None:
            position = v.new_zeros(1).expand(1, 1, *keys, taps[0] * taps[1])
        return window_attention(*content, v, position, taps)

    def _written_out(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        """Attend by weights in memory, of which training drops some: (B, M, H, W, d)."""
        B, M, Hq, Wq, _ = q.shape
        keys = (k.shape[2], k.shape[3])
        row, column = self.axis_logits(q, keys)
        logits = _pairs(row, column, self.key_logits(k), v) + _pairs(*self.range_logits(keys, q), None, v)
        predicted = self.predicted_logits(x, keys, padding)
        if predicted is not None:
            logits = logits + predicted
        if self.terms.content:
            logits = logits + q.flatten(2, 3) @ k.flatten(2, 3).mT
        logits = logits.expand(B, M, Hq * Wq, -1)
        if padding is not None:
            logits = logits.masked_fill(padding[:, None, None], -math.inf)
        if mask is not None:
            mask = mask if mask.dim() == 2 else mask.unflatten(0, (B, M))
            logits = logits.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else logits + mask
        hidden = torch.isneginf(logits).all(-1, keepdim=True)  # a query without keys gets 0, as from the operators
        logits = logits.masked_fill(hidden, 0.0)
        weights = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).to(v.dtype)
        weights = weights.masked_fill(hidden, 0.0)
        weights = F.dropout(weights, self.dropout, self.training)
        return (weights @ v.flatten(2, 3)).unflatten(2, (Hq, Wq))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name, own in self.state_dict().items():
            if name.split(".")[0] not in ("in_proj_weight", "in_proj_bias", "out_proj"):
                state_dict.setdefault(prefix + name, own)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        text = f"{self.embed_dim}, {self.num_heads}, attention_type={self.attention_type!r}"
        if self.spatial_range != -1:
            text += f", spatial_range={self.spatial_range}"
        if self.kernel_size is not None:
            text += f", kernel_size={self.kernel_size}, outside={self.outside!r}, smoothing={self.smoothing!r}"
        return text


def _pairs(row: Tensor | None, column: Tensor | None, key: Tensor | None, like: Tensor) -> Tensor:
    """Sum row, column and key logits for all pairs: (B, M, Nq, Nk), of size 1 where it does not depend on them."""
    logits = like.new_zeros(1, 1, 1, 1, 1, 1)
    for part, axes in ((row, (5,)), (column, (4,)), (key, (2, 2))):
        if part is not None:
            for axis in axes:
                part = part.unsqueeze(axis)
            logits = logits + part
    H, W = like.shape[2:4]
    return logits.expand(-1, -1, -1, -1, H, W).flatten(4, 5).flatten(2, 3)


def _checked_mask(mask: Tensor, heads: int, N: int, S: int) -> Tensor:
    """Check an ``attn_mask``; ``heads`` are those of the whole batch."""
    check_tensor("attn_mask", mask)
    if mask.shape not in ((N, S), (heads, N, S)):
        raise ValueError(
            f"attn_mask must have shape {(N, S)} or (B * M, N, S) = {(heads, N, S)}, got {tuple(mask.shape)}"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"attn_mask must be bool or floating, got {mask.dtype}")
    return mask
