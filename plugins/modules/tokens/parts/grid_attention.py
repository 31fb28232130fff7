"""Attention of tokens on a grid, and of tokens without a position, with the terms of :class:`.GridTerms`.

Shapes: B batch, M heads, d width per head, P tokens without a position (class tokens, registers), then N = H * W
tokens of the grid (H, W), row by row; T = P + N.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....core.axes import unflatten
from ...common.attention import attend
from ...common.logits import MapLogits, SequenceLogits, WindowLogits, as_content
from .grid_terms import Grid, GridTerms, pairs_of


class GridAttention(GridTerms):
    """Base of attention modules over tokens on a grid.

    Tokens without a position attend and are attended to by content and saliency alone (ε1 and ε3), and are always in
    range.
    """

    def attend(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: Grid,
        prefix: int = 0,
        padding: Tensor | None = None,
        mask: Tensor | None = None,
        dropout: nn.Module | float = 0.0,
    ) -> Tensor:
        """Attend from all tokens to all tokens.

        Args:
            x: (B, T, C), from which position logits are predicted.
            q: (B, M, T, d), multiplied by ``scale``.
            k: (B, M, S, d); S = T if a term needs positions.
            v: (B, M, S, dv).
            grid: (H, W); (1, N) without positions.
            prefix: P; 0 without positions.
            padding: (B, S), True for keys to leave out.
            mask: (T, S) or (B or 1, M or 1, T, S), bool (True leaves out) or added to the logits, which are then held
                in memory.
            dropout: See :func:`.attend`.

        Returns:
            (B, M, T or 1, dv); fully masked queries return zeros.
        """
        of_pairs = self.predictor is not None and (self.radius is None or prefix > 0)
        if (
            of_pairs
            or isinstance(dropout, nn.Module)
            or dropout
            or mask is not None
            or (prefix and padding is not None)
        ):
            return attend(self.written_out(x, q, k, v, grid, prefix, padding, mask), dropout)
        if prefix:
            of_prefix = attend(self._sequence(q[:, :, :prefix], k, v, None)).expand(-1, -1, prefix, -1)
            of_grid = attend(self._behind_prefix(q, k, v, grid, prefix)).expand(-1, -1, *grid, -1)
            return torch.cat((of_prefix, of_grid.flatten(2, 3)), 2)
        keys = grid if self.needs_grid else (1, k.shape[2])
        logits = self._of_grid(x, unflatten(q, 2, grid), unflatten(k, 2, keys), unflatten(v, 2, keys), padding)
        return attend(logits).flatten(2, 3)

    def _of_grid(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> MapLogits | WindowLogits:
        """Return the attention of maps (B, M, H, W, d) to all keys, or to those in range."""
        keys = v.shape[2], v.shape[3]
        query, key, key_logits = self._content(q, k)
        if self.radius is not None:
            position_logits, kernel_size = self.window_logits(x, q, keys, padding)
            if key_logits is not None:
                query, key = as_content(key_logits)
            return WindowLogits(query, key, v, position_logits, kernel_size)
        row, column = self.axis_logits(q, keys)
        if padding is not None:
            key_logits = q.new_zeros(1) if key_logits is None else key_logits
            key_logits = key_logits.masked_fill(padding.view(-1, 1, *keys), -math.inf)
        return MapLogits(query, key, v, row, column, key_logits)

    def _sequence(
        self, q: Tensor, k: Tensor, v: Tensor, position_logits: Tensor | None, padding: Tensor | None = None
    ) -> SequenceLogits:
        """Return the attention of tokens by content and saliency, with position logits of all pairs."""
        query, key, key_logits = self._content(q, k)
        if key_logits is not None:
            of_keys = key_logits.unsqueeze(2)
            position_logits = of_keys if position_logits is None else position_logits + of_keys
        return SequenceLogits(query, key, v, position_logits=position_logits, key_padding_mask=padding)

    def _behind_prefix(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, prefix: int) -> MapLogits:
        """Return the attention of the grid's queries to all keys."""
        on_grid = unflatten(q[:, :, prefix:], 2, grid)
        axes = zip(self.axis_logits(on_grid, grid), self.range_logits(grid, q))
        row, column = (a if b is None else b if a is None else a + b for a, b in axes)
        query: Tensor | None = on_grid if self.terms.content else None
        if self.saliency is not None:  # ε1 + ε3 = (q + u)·k, of all keys
            u = self.saliency_query()
            query = u.expand(q.shape[0], -1, *grid, -1) if query is None else query + u
        key, prefix_key = (None, None) if query is None else (unflatten(k[:, :, prefix:], 2, grid), k[:, :, :prefix])
        value, prefix_value = unflatten(v[:, :, prefix:], 2, grid), v[:, :, :prefix]
        return MapLogits(query, key, value, row, column, prefix_key=prefix_key, prefix_value=prefix_value)

    def written_out(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: Grid,
        prefix: int,
        padding: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> SequenceLogits:
        """Return the attention of :meth:`attend` with position logits and masks of all pairs in memory."""
        logits: Tensor | None = None
        if self.needs_grid:
            real = None if padding is None else padding[:, prefix:]
            logits = self.sequence_logits(x[:, prefix:], q[:, :, prefix:], grid, real)
        if logits is not None and prefix:  # 0 for tokens without a position
            logits = F.pad(logits, (prefix, 0, prefix, 0))
        if mask is not None:
            logits = q.new_zeros(1, 1, 1, 1) if logits is None else logits
            logits = logits.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else logits + mask.to(q.dtype)
        if logits is None and not self.terms.content:  # a logit for each query, whose weights are dropped separately
            logits = q.new_zeros(1).expand(1, 1, q.shape[2], v.shape[2])
        return self._sequence(q, k, v, logits, padding)

    def term_logits(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        grid: Grid,
        prefix: int = 0,
        padding: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Compute the gated logits of each term, whose sum's softmax :meth:`attend` applies to the same arguments.

        Returns:
            (B, M, T, S) by the names of :class:`.AttentionTerms`, and ``predicted``, each -inf at masked keys. A mask
            of floats is added to the first term only.
        """
        terms = self.relative_terms(unflatten(q[:, :, prefix:], 2, grid), grid)
        predicted = self.predicted_logits(x[:, prefix:], grid, None if padding is None else padding[:, prefix:])
        if predicted is not None:
            terms["predicted"] = predicted
        left_out = k.new_zeros(1, 1, q.shape[2], k.shape[2])
        rows, columns = self.range_logits(grid, k)
        if rows is not None and columns is not None:
            left_out = left_out + F.pad(pairs_of(rows, columns), (prefix, 0, prefix, 0))
        if padding is not None:
            left_out = left_out.masked_fill(padding[:, None, None], -math.inf)
        if mask is not None:
            left_out = left_out.masked_fill(mask if mask.dtype == torch.bool else mask == -math.inf, -math.inf)
        terms = {name: F.pad(logits, (prefix, 0, prefix, 0)) for name, logits in terms.items()}
        if self.terms.content:
            terms["content"] = q @ k.mT
        saliency = self.key_logits(k)
        if saliency is not None:
            terms["saliency"] = saliency.unsqueeze(2)
        names = [name for name in (*self.terms._fields, "predicted") if name in terms]
        if mask is not None and mask.dtype != torch.bool and names:
            terms[names[0]] = terms[names[0]] + mask
        return {name: (terms[name] + left_out).expand(*q.shape[:2], -1, -1) for name in names}

    def _content(self, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return query and key of ε1 + ε3 of tokens or maps, or, without ε1, ε3 as logits of the keys."""
        if not self.terms.content:
            return None, None, self.key_logits(k)
        if self.saliency is None:
            return q, k, None
        u = self.saliency_query()
        return q + (u if q.dim() == 5 else u[:, :, 0]), k, None


def check_grid(grid: Grid, prefix_tokens: int, T: int) -> None:
    """Check that a grid has as many tokens as follow the prefix."""
    if grid[0] * grid[1] + prefix_tokens != T:
        raise ValueError(
            f"grid must hold the {T - prefix_tokens} tokens behind the prefix of {prefix_tokens}, got {grid}"
        )
