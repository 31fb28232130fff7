"""A Transformer's attention over tokens on a grid, with terms added to its content term.

Shapes: B batch, N tokens, C channels, M heads, d width per head, (H, W) the grid, N = H * W.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.arguments import is_size
from ...core.axes import unflatten
from ...terms.nonlocal_position import Outside, Smoothing
from ..common.checks import check_heads, check_padding_mask, check_sequence, check_tensor
from .parts.grid_attention import GridAttention, check_grid
from .parts.grid_terms import Grid


class SpatialSelfAttention(GridAttention):
    """``nn.MultiheadAttention`` over tokens on a grid, with additional terms in its logits.

    ::

        logit = scale * (ε1 + gate * (ε2 + ε3 + ε4)) + gate * δ / σ,    scale = d ** -0.5
        1000  ε1 = q·k            query content and key content
        0100  ε2 = q·R[k - q]     query content and relative position
        0010  ε3 = u·k            key content alone
        0001  ε4 = v·R[k - q]     relative position alone
              δ                   with kernel_size: predicted from the query for the k × k keys around it

    The four terms are those of Zhu et al. (2019), Eq. 2; δ is Thesis, Eq. 3.12. ``gate`` (M) is initially 0, so that
    with the content term the module equals ``nn.MultiheadAttention``, whose parameter names it has
    (``in_proj_weight``, ``in_proj_bias``, ``out_proj``). A checkpoint without the added parameters loads strictly and
    leaves them unchanged.

    Args:
        embed_dim: C.
        num_heads: M; must divide C.
        attention_type: Four bits, ε1 to ε4.
        spatial_range: n_k, odd: keys are limited to |Δ| <= (n_k - 1) / 2 rows and columns; -1: all keys.
        dropout: Dropout probability of the attention weights, which are then held in memory.
        bias: Whether the projections have biases.
        kernel_size: k, odd, of δ; None for no δ. Its logits are held in memory, (N, N) per head, unless a window limits
            the keys.
        outside: δ beyond the window: ``'learned'`` (one more predicted value), ``'zero'``, ``'min'``, ``'mean'``, or
            ``'-inf'``, which limits keys to the window regardless of the gate.
        smoothing: σ: ``'zscore'`` standardises a query's δ over its keys, ``'sqrt_d'`` divides them by √d.
        gate_init: Initial gate. At 0 a layer without the content term starts with equal weights for all keys.

    Raises:
        ValueError: An argument is out of range or inconsistent with the others.
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
        gate_init: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_heads(embed_dim, num_heads, dropout)
        super().__init__(embed_dim, num_heads, attention_type, spatial_range, kernel_size, outside, smoothing)
        self.dropout, self.gate_init = dropout, gate_init
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, **factory))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * embed_dim, **factory)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        self.make_terms(**factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projections as ``nn.MultiheadAttention`` does, and the added terms by :meth:`reset_terms`."""
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
        prefix_tokens: int = 0,
    ) -> Tensor:
        """Attend from every token to all others.

        Args:
            query: (B, P + N, C): P tokens without a position, then those of the grid, row by row.
            key: (B, P + N, C), the same tokens; None for ``query``. If no term needs positions, (B, S, C) for
                cross-attention.
            value: (B, P + N, C); None for ``key``.
            grid: (H, W) with H * W = N; needed for ε2, ε4, δ and a range.
            key_padding_mask: (B, P + N), bool; True for padding.
            attn_mask: (T, S) or (B * M, T, S), T = P + N, bool (True leaves out) or added to the logits, which
                are then held in memory.
            prefix_tokens: P, class tokens and registers, which attend and are attended to by ε1 and ε3 alone.

        Returns:
            (B, P + N, C).

        Raises:
            ValueError: A shape does not match, or a required grid is missing.
            TypeError: An argument is not a Tensor, or does not have the module's dtype.
        """
        q, k, v, places, P, mask = self._prepared(query, key, value, grid, key_padding_mask, attn_mask, prefix_tokens)
        dropout = self.dropout if self.training else 0.0
        output = self.attend(query, q, k, v, places, P, key_padding_mask, mask, dropout)
        # A single row if all queries have the same result.
        output = output.expand(query.shape[0], -1, query.shape[1], -1)
        return self.out_proj(output.transpose(1, 2).reshape(query.shape))

    @torch.no_grad()
    def attention_logits(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        grid: tuple[int, int] | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        prefix_tokens: int = 0,
    ) -> dict[str, Tensor]:
        """Compute the gated logits of each term; the softmax of their sum gives the attention weights.

        Arguments and errors are those of :meth:`forward`.

        Returns:
            (B, M, T, S), by name; see :meth:`.GridAttention.term_logits`.
        """
        q, k, _, places, P, mask = self._prepared(query, key, value, grid, key_padding_mask, attn_mask, prefix_tokens)
        return self.term_logits(query, q, k, places, P, key_padding_mask, mask)

    def _prepared(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        grid: tuple[int, int] | None,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        prefix_tokens: int,
    ) -> tuple[Tensor, Tensor, Tensor, Grid, int, Tensor | None]:
        """Return scaled query, key and value (B, M, ·, d), grid and prefix, and the mask with an axis of heads."""
        check_sequence("query", query, self.embed_dim, self.in_proj_weight)
        B, T, _ = query.shape
        for name, tokens in (("key", key), ("value", value)):
            if tokens is not None:
                check_sequence(name, tokens, self.embed_dim, self.in_proj_weight, B)
        key = query if key is None else key
        value = key if value is None else value
        S = key.shape[1]
        if not is_size(prefix_tokens) or not 0 <= prefix_tokens <= min(T, S):
            raise ValueError(f"prefix_tokens must be an int from 0 to query's {T}, got {prefix_tokens!r}")
        if value.shape[1] != S:
            raise ValueError(f"value must have as many tokens as key, {S}, got {value.shape[1]}")
        check_padding_mask(key_padding_mask, B, S, query.device)
        if attn_mask is not None:
            attn_mask = _checked_mask(attn_mask, B, self.num_heads, T, S)
        if self.needs_grid:
            if grid is None:
                raise ValueError(f"grid must be (H, W) for {self.described()}, got None")
            check_grid(grid, prefix_tokens, T)
            if S != T:
                raise ValueError(f"key must be the {T} tokens of query for {self.described()}, got {S}")
        else:
            grid, prefix_tokens = (1, T), 0
        q, k, v = [
            unflatten(F.linear(tokens, weight, bias), 2, (self.num_heads, -1)).transpose(1, 2)
            for tokens, weight, bias in zip((query, key, value), *self._projections())
        ]
        return q * self.scale, k, v, grid, prefix_tokens, attn_mask

    def _projections(self) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return self.in_proj_weight.chunk(3), biases

    def extra_repr(self) -> str:
        text = f"{self.embed_dim}, {self.num_heads}, attention_type={self.attention_type!r}"
        if self.spatial_range != -1:
            text += f", spatial_range={self.spatial_range}"
        if self.kernel_size is not None:
            text += f", kernel_size={self.kernel_size}, outside={self.outside!r}, smoothing={self.smoothing!r}"
        return text


def _checked_mask(mask: Tensor, B: int, num_heads: int, N: int, S: int) -> Tensor:
    """Check an ``attn_mask`` and return it with an axis of heads."""
    heads = B * num_heads
    check_tensor("attn_mask", mask)
    if mask.shape not in ((N, S), (heads, N, S)):
        raise ValueError(
            f"attn_mask must have shape {(N, S)} or (B * M, N, S) = {(heads, N, S)}, got {tuple(mask.shape)}"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"attn_mask must be bool or floating-point, got {mask.dtype}")
    return mask if mask.dim() == 2 else unflatten(mask, 0, (-1, num_heads))
