"""Logits that attention over tokens on a grid adds to its content term, and their parameters.

Shapes: B batch, N tokens, C channels, M heads, d width per head, (H, W) the grid, N = H * W, k side of the window of
predicted position logits, n taps of a window.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....core.axes import unflatten, unfold
from ....terms.attention_type import parse_attention_type
from ....terms.nonlocal_position import (
    Outside,
    Smoothing,
    check_smoothing,
    map_index,
    predicted_values,
    realign,
    standardised,
    tap_index,
    with_outside,
)
from ....terms.relative_position import axis_encoding, relative_logits
from ....terms.saliency import key_saliency
from ....terms.window import shared_axis_window, window_position_logits
from ...common.axis_table import axis_table
from ...common.checks import check_range, one_of
from ...common.tracing import Unscriptable

Grid = tuple[int, int]
ADDED = ("row_table", "column_table", "saliency", "position", "predictor", "gate")


class GridTerms(Unscriptable, nn.Module):
    """Base of attention over tokens on a grid: ε2, ε3, ε4, predicted position logits and the range of keys.

    Its methods compute logits, gated if they are added to the content term; subclasses attend with them.
    """

    gate_init = 0.0  # initial gate of the added terms

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        attention_type: str,
        spatial_range: int,
        kernel_size: int | None,
        outside: Outside,
        smoothing: Smoothing,
    ) -> None:
        super().__init__()
        self.terms = parse_attention_type(attention_type)
        check_range("spatial_range", spatial_range)
        if kernel_size is not None and (not isinstance(kernel_size, int) or kernel_size < 1 or kernel_size % 2 == 0):
            raise ValueError(f"kernel_size must be a positive odd int (k), or None, got {kernel_size!r}")
        one_of(Outside, outside=outside)
        one_of(Smoothing, smoothing=smoothing)
        check_smoothing(outside, smoothing)
        if self.terms.relative and embed_dim % 2:
            raise ValueError(f"embed_dim must be even (sines and cosines of positions), got {embed_dim}")
        self.embed_dim, self.num_heads, self.attention_type = embed_dim, num_heads, attention_type
        self.spatial_range, self.kernel_size = spatial_range, kernel_size
        self.outside, self.smoothing = outside, smoothing
        # whether tokens need positions: for ε2, ε4, predicted position logits or a range
        self.needs_grid = self.terms.relative or spatial_range != -1 or kernel_size is not None
        self.scale = (embed_dim // num_heads) ** -0.5
        ranges = [n for n in (spatial_range, kernel_size if outside == "-inf" else None) if n is not None and n != -1]
        self.radius = min(ranges) // 2 if ranges else None  # radius of the window that keys are limited to

    def make_terms(self, **factory: Any) -> None:
        """Create the parameters of the added terms."""
        C, M = self.embed_dim, self.num_heads

        def vector() -> nn.Parameter:
            return nn.Parameter(torch.empty(C, **factory))

        def table() -> nn.Linear:
            return nn.Linear(C, C, bias=False, **factory)

        self.row_table = table() if self.terms.relative else None
        self.column_table = table() if self.terms.relative else None
        self.saliency = vector() if self.terms.saliency else None  # u
        self.position = vector() if self.terms.position else None  # v
        self.predictor = None  # f of Thesis, Eq. 3.11
        if self.kernel_size is not None:
            values = M * predicted_values(self.kernel_size**2, self.outside)
            self.predictor = nn.Sequential(nn.Linear(C, C, **factory), nn.Linear(C, values, **factory))
        added = self.terms.relative or self.terms.saliency or self.predictor is not None
        self.gate = nn.Parameter(torch.empty(M, **factory)) if added else None

    def reset_terms(self) -> None:
        """Draw tables and the predictor by Glorot initialization, u and v uniformly by fan-in; reset the gate."""
        if self.gate is not None:
            nn.init.constant_(self.gate, self.gate_init)
        for table in (self.row_table, self.column_table):
            if table is not None:
                nn.init.xavier_uniform_(table.weight)
        bound = 1 / math.sqrt(2 * (self.embed_dim // self.num_heads))
        for vector in (self.saliency, self.position):
            if vector is not None:
                nn.init.uniform_(vector, -bound, bound)
        for layer in self.predictor or ():
            assert isinstance(layer, nn.Linear)
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def described(self) -> str:
        """Describe the options that need positions, for error messages."""
        text = f"attention_type {self.attention_type!r}"
        if self.spatial_range != -1:
            text += f", spatial_range {self.spatial_range}"
        return text if self.kernel_size is None else f"{text}, kernel_size {self.kernel_size}"

    def key_logits(self, k: Tensor) -> Tensor | None:
        """Compute ε3, gated, (B, M, ...), of keys (B, M, ..., d)."""
        if self.saliency is None:
            return None
        return key_saliency(k, self.saliency_query()[0, :, 0, 0])

    def saliency_query(self) -> Tensor:
        """Return u, gated, whose product with a key is ε3: (1, M, 1, 1, d)."""
        assert self.saliency is not None
        return (self._gate(1) * self.scale * self._heads(self.saliency))[None, :, None, None]

    def axis_logits(self, q: Tensor, grid: Grid) -> tuple[Tensor | None, Tensor | None]:
        """Compute ε2 + ε4, gated, of scaled queries (B, M, H, W, d), as row and column logits (B, M, H, W, H or W)."""
        if self.row_table is None or self.column_table is None:
            return None, None
        return self._relative(self._position_query(q), grid)

    def _relative(self, moved: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Compute the products of (B, M, H or 1, W or 1, d) with R, with shapes as in :meth:`axis_logits`."""
        assert self.row_table is not None
        assert self.column_table is not None
        moved = moved.expand(-1, -1, *grid, -1)
        rows, columns = (
            relative_logits(moved, self._table(table, n, moved), n, axis)
            for table, n, axis in zip((self.row_table, self.column_table), grid, ("row", "column"))
        )
        return rows, columns

    def relative_terms(self, q: Tensor, grid: Grid) -> dict[str, Tensor]:
        """Compute ε2 and ε4 separately, gated, of scaled queries (B, M, H, W, d): (B, M, N, N) by name."""
        moved: dict[str, Tensor] = {}
        if self.terms.content_position:
            moved["content_position"] = q
        if self.position is not None:
            moved["position"] = (self.scale * self._heads(self.position))[None, :, None, None]
        return {name: pairs_of(*self._relative(query * self._gate(3), grid)) for name, query in moved.items()}

    def range_logits(self, grid: Grid, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return row logits (1, 1, H, 1, H) and column logits (1, 1, 1, W, W), 0 in range, else -inf, or None."""
        if self.radius is None:
            return None, None
        rows, columns = (shared_axis_window(n, n, self.radius, 1, 1, like.device, like.dtype) for n in grid)
        return rows[None, None, :, None], columns[None, None, None]

    def sequence_logits(
        self, x: Tensor, q: Tensor, grid: Grid, padding: Tensor | None, seen: Tensor | None = None
    ) -> Tensor | None:
        """Sum all position logits and the range of all pairs: (B or 1, M or 1, N, N), or None.

        Args:
            x: (B, N, C), tokens.
            q: (B, M, N, d), scaled queries.
            grid: (H, W).
            padding: (B, N), True for padding; or None.
            seen: (N, N), keys that :meth:`predicted_logits` counts; None for all.
        """
        logits = self.predicted_logits(x, grid, padding, seen)
        for row, column in (self.axis_logits(unflatten(q, 2, grid), grid), self.range_logits(grid, q)):
            if row is not None and column is not None:
                pairs = pairs_of(row, column)
                logits = pairs if logits is None else logits + pairs
        return logits

    def predicted_logits(
        self, x: Tensor, grid: Grid, padding: Tensor | None, seen: Tensor | None = None
    ) -> Tensor | None:
        """Compute predicted position logits of all keys, smoothed and gated: (B, M, N, N) of tokens (B, N, C).

        They are standardised over the keys that are not ``padding``, (B, N), and that are ``seen``, (N, N).
        """
        if self.predictor is None or self.kernel_size is None:
            return None
        N = grid[0] * grid[1]
        index = map_index(torch.arange(N, device=x.device), grid, (self.kernel_size, self.kernel_size))
        counted = x.new_ones(1, 1, N, N, dtype=torch.bool)
        if self.radius is not None:
            window = (2 * self.radius + 1,) * 2
            counted = (map_index(torch.arange(N, device=x.device), grid, window) >= 0)[None, None]
        if padding is not None:
            counted = counted & ~padding[:, None, None]
        if seen is not None:
            counted = counted & seen
        return self._smoothed(realign(self._predicted(x), index), counted)

    def window_logits(
        self, x: Tensor, q: Tensor, grid: Grid, padding: Tensor | None, reach: Grid | None = None
    ) -> tuple[Tensor | None, Grid]:
        """Sum all position logits for the taps of the window that keys are limited to, -inf at padding.

        Args:
            x: (B, N, C), tokens.
            q: (B, M, H, W, d), scaled queries.
            grid: (H, W).
            padding: (B, N), True for padding; or None.
            reach: Rows and columns from the query to the window's border; None for ``radius`` of both.

        Returns:
            (B or 1, M or 1, H, W, n), or None; and the window's sides, cut to at most twice the map's side minus 1.
        """
        if reach is None:
            assert self.radius is not None
            reach = self.radius, self.radius
        H, W = grid
        ry, rx = (min(r, n - 1) if isinstance(n, int) else r for r, n in zip(reach, grid))  # r where n is symbolic
        radius, taps = (ry, rx), (2 * ry + 1, 2 * rx + 1)
        logits: Tensor | None = None
        if self.row_table is not None and self.column_table is not None:
            moved = self._position_query(q)
            rows, columns = (
                torch.einsum("bmhwd,mdn->bmhwn", moved, self._table(table, r + 1, moved))
                for table, r in zip((self.row_table, self.column_table), radius)
            )
            logits = window_position_logits(rows, columns, H, W)
        real = None if padding is None else ~padding
        if self.predictor is not None and self.kernel_size is not None:
            index = tap_index(taps, (self.kernel_size, self.kernel_size), x.device).expand(H * W, -1)
            everywhere = x.new_ones(1, H * W, dtype=torch.bool)
            counted = _at_taps(everywhere if real is None else real, grid, radius).flatten(2, 3)
            predicted = unflatten(self._smoothed(realign(self._predicted(x), index), counted), 2, grid)
            logits = predicted if logits is None else logits + predicted
        if real is not None:
            hidden = ~_at_taps(real, grid, radius)
            logits = q.new_zeros(1) if logits is None else logits
            logits = logits.masked_fill(hidden, -math.inf)
        return logits, taps

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load a checkpoint without any added parameter strictly, leaving these parameters unchanged."""
        added = {prefix + name: own for name, own in self.state_dict().items() if name.split(".")[0] in ADDED}
        if added.keys().isdisjoint(state_dict):
            state_dict.update(added)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _position_query(self, q: Tensor) -> Tensor:
        """Return q + v, gated, whose product with R is ε2 + ε4: (B, M, H, W, d), or (1, M, 1, 1, d) without ε2."""
        _, by_position, _, _ = self.terms
        moved = q if by_position else q.new_zeros(1, self.num_heads, 1, 1, q.shape[-1])
        if self.position is not None:
            moved = moved + (self.scale * self._heads(self.position))[:, None, None]
        return moved * self._gate(3)

    def _table(self, projection: nn.Linear, size: int, like: Tensor) -> Tensor:
        """Project the encodings of the offsets among ``size`` rows or columns, (M, d, 2 * size - 1)."""
        encoding = axis_encoding(size, size, 1, 1, 1.0, self.embed_dim, 10000.0, like.device, like.dtype)
        return axis_table(projection, encoding, self.num_heads)

    def _predicted(self, x: Tensor) -> Tensor:
        """Predict f(x), with the value outside last, (B, M, N, k * k + 1)."""
        assert self.predictor is not None
        values = unflatten(self.predictor(x), 2, (self.num_heads, -1)).transpose(1, 2)
        return with_outside(values, "zero" if self.outside == "-inf" else self.outside)  # -inf is applied as a range

    def _smoothed(self, logits: Tensor, counted: Tensor) -> Tensor:
        smooth = logits * self.scale if self.smoothing == "sqrt_d" else standardised(logits, counted)
        return smooth * self._gate(2)

    def _gate(self, axes: int) -> Tensor:
        """Return the gate, (M, 1, ...), with ``axes`` axes after the heads."""
        assert self.gate is not None
        return self.gate.view([-1] + [1] * axes)

    def _heads(self, vector: Tensor) -> Tensor:
        return vector.view(self.num_heads, -1)


def pairs_of(row: Tensor, column: Tensor) -> Tensor:
    """Sum row and column logits of a grid for all pairs of its tokens, (B or 1, M or 1, N, N)."""
    return (row.unsqueeze(5) + column.unsqueeze(4)).flatten(4, 5).flatten(2, 3)


def _at_taps(real: Tensor, grid: Grid, radius: Grid) -> Tensor:
    """Return whether each window tap is on a key, (B, 1, H, W, n), from ``real`` (B, N), True for keys."""
    (H, W), (ry, rx) = grid, radius
    padded = F.pad(real.view(-1, 1, H, W), (rx, rx, ry, ry))
    return unfold(unfold(padded, 2, 2 * ry + 1), 3, 2 * rx + 1).flatten(4)
