"""Attention of tokens on a grid, and of tokens without a position, with the terms of :class:`.GridTerms`.

Shapes: B batch, M heads, d width per head, P tokens without a position (class tokens, registers), then N = H * W
tokens of the grid (H, W), row by row; T = P + N.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ...ops import global_attention, sequence_attention, window_attention
from .grid_terms import Grid, GridTerms


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
        dropout: float = 0.0,
    ) -> Tensor:
        """Attend from all tokens to all tokens.

        Args:
            x: (B, T, C), from which position logits are predicted.
            q: (B, M, T, d), multiplied by ``scale``.
            k: (B, M, S, d); S = T if a term needs positions.
            v: (B, M, S, dv).
            grid: (H, W); (1, N) without positions.
            prefix: P.
            padding: (B, S), True for keys to leave out.
            mask: (T, S) or (B or 1, M or 1, T, S), bool (True leaves out) or added to the logits. With a mask or
                dropout, the weights are held in memory.
            dropout: Dropout probability of the attention weights.

        Returns:
            (B, M, T or 1, dv); fully masked queries return zeros.
        """
        if mask is not None or dropout or (prefix and padding is not None):
            return self._written_out(x, q, k, v, grid, prefix, padding, mask, dropout)
        if self.predictor is not None and (self.radius is None or prefix):
            logits = self._pair_logits(x, q, grid, prefix, padding)
            query, key, added = self._content(q, k)
            if added is not None:
                logits = logits + added.unsqueeze(2)
            return sequence_attention(query, key, v, position_logits=logits, key_padding_mask=padding)
        if prefix:
            return torch.cat((self._from_prefix(q[:, :, :prefix], k, v), self._after_prefix(q, k, v, grid, prefix)), 2)
        keys = grid if self.needs_grid else (1, k.shape[2])
        q, k, v = q.unflatten(2, grid), k.unflatten(2, keys), v.unflatten(2, keys)
        attend = self._everywhere if self.radius is None else self._in_windows
        return attend(x, q, k, v, keys, padding).flatten(2, 3)

    def _everywhere(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, keys: Grid, padding: Tensor | None) -> Tensor:
        """Attend from maps to all keys, (B, M, H, W, dv)."""
        row, column = self.axis_logits(q, keys)
        key_logits = self.key_logits(k)
        if padding is not None:
            key_logits = q.new_zeros(1) if key_logits is None else key_logits
            key_logits = key_logits.masked_fill(padding.view(-1, 1, *keys), -math.inf)
        query, key = (q, k) if self.terms.content else (None, None)
        if query is None and row is None and column is None and key_logits is None:
            key_logits = v.new_zeros(1, 1, *keys)  # the mean of all values
        return global_attention(query, key, v, row_logits=row, column_logits=column, key_logits=key_logits)

    def _in_windows(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, keys: Grid, padding: Tensor | None) -> Tensor:
        """Attend from maps to the keys in range, (B, M, H, W, dv)."""
        position, taps = self.tap_logits(x, q, keys, padding)
        query, key, key_logits = self._content(q, k)
        if key_logits is not None:  # write a key's own logit as its product with a query of 1
            query, key = torch.ones_like(key_logits).unsqueeze(-1), key_logits.unsqueeze(-1)
        if query is None and position is None:
            position = v.new_zeros(1).expand(1, 1, *keys, taps[0] * taps[1])
        return window_attention(query, key, v, position, taps)

    def _from_prefix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from the queries without a position, (B, M, P, dv)."""
        query, key, added = self._content(q, k)
        if query is None and added is None:
            return v.mean(2, keepdim=True).expand(-1, -1, q.shape[2], -1)
        logits = None if added is None else added.unsqueeze(2)
        return sequence_attention(query, key, v, position_logits=logits).expand(-1, -1, q.shape[2], -1)

    def _after_prefix(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, prefix: int) -> Tensor:
        """Attend from the queries of the grid to all keys, (B, M, N, dv)."""
        on_map = q[:, :, prefix:].unflatten(2, grid)
        row, column = self.axis_logits(on_map, grid)
        in_range = self.range_logits(grid, q)
        row, column = (a if b is None else b if a is None else a + b for a, b in zip((row, column), in_range))
        query: Tensor | None = on_map if self.terms.content else None
        if self.saliency is not None:  # ε1 + ε3 = (q + u)·k, of all keys
            u = self.saliency_query()
            everywhere = row is not None or column is not None
            query = u.expand(len(q), -1, *(grid if everywhere else (1, 1)), -1) if query is None else query + u
        output = global_attention(
            query,
            None if query is None else k[:, :, prefix:].unflatten(2, grid),
            v[:, :, prefix:].unflatten(2, grid),
            row_logits=row,
            column_logits=column,
            prefix_key=None if query is None else k[:, :, :prefix],
            prefix_value=v[:, :, :prefix],
        )
        return output.expand(-1, -1, *grid, -1).flatten(2, 3)

    def _written_out(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: Grid,
        prefix: int,
        padding: Tensor | None,
        mask: Tensor | None,
        dropout: float,
    ) -> Tensor:
        """Attend with the weights in memory, which dropout and masks need: (B, M, T, dv)."""
        B, M, T, _ = q.shape
        logits = self._pair_logits(x, q, grid, prefix, padding) if self.needs_grid else v.new_zeros(1, 1, 1, 1)
        query, key, added = self._content(q, k)
        if query is not None and key is not None:
            logits = logits + query @ key.mT
        if added is not None:
            logits = logits + added.unsqueeze(2)
        logits = logits.expand(B, M, T, v.shape[2])
        if padding is not None:
            logits = logits.masked_fill(padding[:, None, None], -math.inf)
        if mask is not None:
            logits = logits.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else logits + mask
        hidden = torch.isneginf(logits).all(-1, keepdim=True)  # fully masked queries return zeros, as in the operators
        logits = logits.masked_fill(hidden, 0.0)
        weights = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).to(v.dtype)
        return F.dropout(weights.masked_fill(hidden, 0.0), dropout) @ v

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
        """Compute the gated logits of each term; :meth:`attend` applies the softmax to their sum.

        Args:
            x: As in :meth:`attend`.
            q: As in :meth:`attend`.
            k: As in :meth:`attend`.
            grid: As in :meth:`attend`.
            prefix: As in :meth:`attend`.
            padding: As in :meth:`attend`.
            mask: As in :meth:`attend`.

        Returns:
            (B, M, T, S) by the names of :class:`.AttentionTerms`, and ``predicted``, each -inf at masked keys. A mask
            of floats is added to the first term only.
        """
        found: dict[str, Tensor] = {}
        if self.terms.content:
            found["content"] = q @ k.mT
        if self.row_table is not None:
            relative = self.relative_terms(q[:, :, prefix:].unflatten(2, grid), grid)
            found.update((name, F.pad(part, (prefix, 0, prefix, 0))) for name, part in relative.items())
        saliency = self.key_logits(k)
        if saliency is not None:
            found["saliency"] = saliency.unsqueeze(2)
        predicted = self.predicted_logits(x[:, prefix:], grid, None if padding is None else padding[:, prefix:])
        if predicted is not None:
            found["predicted"] = F.pad(predicted, (prefix, 0, prefix, 0))
        left_out = k.new_zeros(1, 1, q.shape[2], k.shape[2])
        rows, columns = self.range_logits(grid, k)
        if rows is not None and columns is not None:
            pairs = (rows.unsqueeze(5) + columns.unsqueeze(4)).flatten(4, 5).flatten(2, 3)
            left_out = left_out + F.pad(pairs, (prefix, 0, prefix, 0))
        if padding is not None:
            left_out = left_out.masked_fill(padding[:, None, None], -math.inf)
        if mask is not None and mask.dtype == torch.bool:
            left_out = left_out.masked_fill(mask, -math.inf)
        elif mask is not None:
            left_out = left_out.masked_fill(mask == -math.inf, -math.inf)
            first = next(iter(found), None)
            if first is not None:
                found[first] = found[first] + mask
        order = (*self.terms._fields, "predicted")
        return {name: (found[name] + left_out).expand(len(q), q.shape[1], -1, -1) for name in order if name in found}

    def _content(self, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return query and key of ε1 + ε3 of tokens or maps, or, without ε1, ε3 as logits of the keys."""
        if not self.terms.content:
            return None, None, self.key_logits(k)
        if self.saliency is None:
            return q, k, None
        u = self.saliency_query()
        return q + (u if q.dim() == 5 else u[:, :, 0]), k, None

    def _pair_logits(self, x: Tensor, q: Tensor, grid: Grid, prefix: int, padding: Tensor | None) -> Tensor:
        """Sum all position logits, 0 for tokens without a position: (B or 1, M or 1, T, T)."""
        logits = self.axis_pairs(q[:, :, prefix:].unflatten(2, grid), grid)
        predicted = self.predicted_logits(x[:, prefix:], grid, None if padding is None else padding[:, prefix:])
        if predicted is not None:
            logits = logits + predicted
        return F.pad(logits, (prefix, 0, prefix, 0)) if prefix else logits


def check_grid(grid: Grid, prefix_tokens: int, T: int) -> None:
    """Check that a grid has as many tokens as follow the prefix."""
    if grid[0] * grid[1] + prefix_tokens != T:
        raise ValueError(
            f"grid must hold the {T - prefix_tokens} tokens behind the prefix of {prefix_tokens}, got {grid}"
        )
