"""Terms that an attention adds up, in one record: computed by an operator, or written out for inspection and dropout.

Shapes: B batch, M heads, T or (Hq, Wq) queries, S or (Hk, Wk) keys, d and dv widths, P prefix keys, n taps of a window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...ops import global_attention, reference, sequence_attention, window_attention
from ...ops.common.axes import unflatten

Pair = tuple[int, int]


class Geometry(NamedTuple):
    """Geometry of the window around each query, rows before columns; see ``window_attention``."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    zero_border: bool = False

    @classmethod
    def around(cls, kernel_size: Pair) -> Geometry:
        """Return the window of an odd size that is centred on its query."""
        return cls(kernel_size, (1, 1), (kernel_size[0] // 2, kernel_size[1] // 2), (1, 1))


class Attention(NamedTuple):
    """Queries, keys, values, and every logit that is added to their products; absent terms are 0.

    Values (B, M, Hk, Wk, dv) are a map: of windows if ``window`` is given, else of all keys. Values (B, M, S, dv) are a
    sequence. The fields are the arguments of ``global_attention``, ``window_attention`` and ``sequence_attention``,
    whose shapes and rules for size 1 apply.

    Attributes:
        query: (B, M, Hq, Wq, d) or (B, M, T, d); None, together with ``key``, for no content.
        key: (B, M, Hk, Wk, d) or (B, M, S, d).
        value: (B, M, Hk, Wk, dv) or (B, M, S, dv).
        row: (B, M, Hq, Wq, Hk), for all keys of a map.
        column: (B, M, Hq, Wq, Wk), for all keys of a map.
        by_key: (B, M, Hk, Wk) or (B, M, S), the same for all queries; in windows for no content.
        prefix_key: (B, M, P, d), keys without a place before those of a map.
        prefix_value: (B, M, P, dv).
        taps: (B, M, Hq, Wq, n), of a window.
        window: Which keys of a map a query attends to; None for all.
        pair: (B, M, T, S), of a sequence.
        band: (B, M, T, K), around each query of a sequence.
        outside: (B, M, T) or a number, outside the band.
        key_padding_mask: (B, S) bool, True at keys of a sequence to leave out.
        segment_ids: (·, S) int32, segments of a sequence.
        start: Position of a sequence's first query among the keys.
        causal: Whether the keys of a sequence after the query are left out.
        shift: (B,), number of leading keys of a sequence that were moved to its end.
        scale: Factor of the content term.
    """

    query: Tensor | None
    key: Tensor | None
    value: Tensor
    row: Tensor | None = None
    column: Tensor | None = None
    by_key: Tensor | None = None
    prefix_key: Tensor | None = None
    prefix_value: Tensor | None = None
    taps: Tensor | None = None
    window: Geometry | None = None
    pair: Tensor | None = None
    band: Tensor | None = None
    outside: Tensor | float | None = None
    key_padding_mask: Tensor | None = None
    segment_ids: Tensor | None = None
    start: int = 0
    causal: bool = False
    shift: Tensor | None = None
    scale: float = 1.0

    def attend(self, dropout: nn.Module | float = 0.0) -> Tensor:
        """Compute the weighted sums of values by the operator for this kind of keys.

        Args:
            dropout: Dropout probability of the weights, or a module that is called with them. They are then held in
                memory.

        Returns:
            (B, M, Hq, Wq, dv) or (B, M, T, dv); size 1 along axes of queries that no term has.
        """
        if isinstance(dropout, nn.Module) or dropout:
            weights = self.weights().to(self.value.dtype)
            return self.mixed(dropout(weights) if isinstance(dropout, nn.Module) else F.dropout(weights, dropout))
        if self.window is not None:
            query, key, taps = self._in_window()
            kernel, stride, padding, dilation, zero_border = self.window
            return window_attention(
                query, key, self.value, taps, kernel, stride=stride, padding=padding, dilation=dilation,
                border="zero" if zero_border else "exclude", scale=self.scale,
            )  # fmt: skip
        if self.value.dim() == 5:
            return global_attention(
                self.query, self.key, self.value, row_logits=self.row, column_logits=self.column,
                key_logits=self.by_key, prefix_key=self.prefix_key, prefix_value=self.prefix_value, scale=self.scale,
            )  # fmt: skip
        return sequence_attention(
            self.query, self.key, self.value, band_logits=self.band, outside_logits=self.outside,
            position_logits=self._pairs(), causal=self.causal, key_padding_mask=self.key_padding_mask,
            scale=self.scale, start=self.start, segment_ids=self.segment_ids,
        )  # fmt: skip

    def logits(self) -> Tensor:
        """Write out the sum of all logits, -inf at masked keys: (B, M, *queries, keys).

        Keys, or the taps of a window, are one axis; prefix keys come first.
        """
        if self.window is not None:
            query, key, taps = self._in_window()
            logits = reference.window_attention_logits(
                query, key, taps, self._windows(), self.window.zero_border, self.scale
            )
            return logits.expand(*self.value.shape[:2], -1, -1, -1)
        if self.value.dim() == 5:
            terms = self.query, self.key, self.value, self.row, self.column, self.by_key
            logits = reference.global_attention_logits(*terms, self.scale).flatten(4)
            return logits if self.prefix_value is None else torch.cat((self._prefix_logits(logits), logits), 4)
        outside = self.outside
        if isinstance(outside, (int, float)):
            outside = self.value.new_full((1, 1, 1), outside)
        terms = self.query, self.key, self.value, self.band, outside, self._pairs()
        options = self.key_padding_mask, self.start, self.causal, self.scale, self.segment_ids
        return reference.sequence_attention_logits(*terms, *options)

    def weights(self) -> Tensor:
        """Write out the attention weights, shaped like :meth:`logits`; 0 for fully masked queries."""
        return reference.masked_softmax(self.logits())

    def mixed(self, weights: Tensor) -> Tensor:
        """Sum the values with ``weights``, shaped like :meth:`logits`."""
        if self.window is not None:
            return (weights.unsqueeze(4) @ self._windows().gather(self.value)).squeeze(4)
        if self.value.dim() == 4:
            return weights @ self.value
        value = self.value.flatten(2, 3)
        value = value if self.prefix_value is None else torch.cat((self.prefix_value, value), 2)
        return weights @ value.unsqueeze(2)

    def parts(self) -> dict[str, Attention]:
        """Split into ``content`` and ``position`` by what is there; masks apply to both."""
        absent: dict[str, Any] = dict(row=None, column=None, by_key=None, taps=None, pair=None, band=None, outside=None)
        parts = {}
        if self.query is not None:
            parts["content"] = self._replace(**absent)
        if any(getattr(self, name) is not None for name in absent):
            parts["position"] = self._replace(query=None, key=None)
        return parts

    def map_weights(self, size: Sequence[int], queries: Tensor | None = None) -> Tensor:
        """Write out the weights of some queries of a map on the map of keys, 0 outside their windows.

        The weights of prefix keys are not part of the map.

        Args:
            size: (Hq, Wq).
            queries: (Q, 2), rows and columns; None for all.

        Returns:
            (B, M, Hq, Wq, Hk, Wk), or (B, M, Q, Hk, Wk) with ``queries``.

        Raises:
            ValueError: ``queries`` are not positions on the map.
        """
        return self._on_map(True, size, queries)

    def map_logits(self, size: Sequence[int], queries: Tensor | None = None) -> Tensor:
        """Write out the sum of logits, -inf outside the windows; otherwise like :meth:`map_weights`."""
        return self._on_map(False, size, queries)

    def sequence_weights(self, T: int, queries: Tensor | None = None) -> Tensor:
        """Write out the weights of some queries of a sequence, with keys in their original order.

        Args:
            T: Number of queries.
            queries: (Q,), positions among them; None for all.

        Returns:
            (B, M, T, S), or (B, M, Q, S) with ``queries``.
        """
        return self._in_order(self.weights(), T, queries)

    def sequence_logits(self, T: int, queries: Tensor | None = None) -> Tensor:
        """Write out the sum of logits, -inf at masked keys; otherwise like :meth:`sequence_weights`."""
        return self._in_order(self.logits(), T, queries)

    def _in_order(self, pairs: Tensor, T: int, queries: Tensor | None) -> Tensor:
        pairs = pairs.expand(-1, -1, T, -1)
        if self.shift is not None:
            pairs = pairs.gather(3, rotation(-self.shift, pairs.shape[3])[:, None, None].expand_as(pairs))
        return pairs if queries is None else pairs[:, :, queries]

    def _on_map(self, softmax: bool, size: Sequence[int], queries: Tensor | None) -> Tensor:
        H, W = size
        keys = self.value.shape[2:4]
        attention, index = self, torch.arange(H * W, device=self.value.device)
        if queries is not None:
            y, x = checked_queries(queries, size, self.value.device)
            index = y * W + x
            attention = self if self.window is not None else self._of(y, x)
        values = attention.weights() if softmax else attention.logits()
        if self.window is None:
            grid = (H, W) if queries is None else (len(index), 1)
            prefix = 0 if self.prefix_value is None else self.prefix_value.shape[2]
            values = values.expand(-1, -1, *grid, -1).flatten(2, 3)[..., prefix:]
        else:
            values = _laid_out(
                values.flatten(2, 3)[:, :, index], self._windows(), keys, index, 0.0 if softmax else -math.inf
            )
        values = unflatten(values, 3, keys)
        return unflatten(values, 2, (H, W)) if queries is None else values

    def _of(self, y: Tensor, x: Tensor) -> Attention:
        """Select the queries at rows ``y`` and columns ``x`` of a map, as a column."""

        def chosen(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            return tensor[:, :, y if tensor.shape[2] > 1 else 0 * y, x if tensor.shape[3] > 1 else 0 * x].unsqueeze(3)

        return self._replace(query=chosen(self.query), row=chosen(self.row), column=chosen(self.column))

    def _prefix_logits(self, logits: Tensor) -> Tensor:
        """Return the logits of the prefix keys beside those of the map, (B, M, Hq, Wq, P): content alone."""
        assert self.prefix_value is not None
        size = *logits.shape[:4], self.prefix_value.shape[2]
        if self.query is None or self.prefix_key is None:
            return logits.new_zeros(1).expand(size)
        return (self.scale * self.query @ self.prefix_key.unsqueeze(2).mT).expand(size)

    def _in_window(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return query, key and tap logits, among which there is at least one."""
        if self.by_key is not None:  # write a key's own logit as its product with a query of 1
            return torch.ones_like(self.by_key).unsqueeze(-1), self.by_key.unsqueeze(-1), self.taps
        taps = self.taps
        if self.query is None and taps is None:
            assert self.window is not None
            taps = self.value.new_zeros(1).expand(1, 1, *self.value.shape[2:4], math.prod(self.window.kernel_size))
        return self.query, self.key, taps

    def _windows(self) -> reference.Windows:
        assert self.window is not None
        query, _, taps = self._in_window()
        leader = taps if query is None else query
        assert leader is not None
        return reference.Windows(leader.shape[2:4], self.value.shape[2:4], *self.window[:4], self.value.device)

    def _pairs(self) -> Tensor | None:
        """Return the logits of a sequence's pairs; zeros for one query where no other term has queries."""
        pair = self.pair
        if self.by_key is not None:
            pair = self.by_key.unsqueeze(2) if pair is None else pair + self.by_key.unsqueeze(2)
        if pair is None and self.query is None and self.band is None:
            pair = self.value.new_zeros(1, 1, 1, self.value.shape[2])
        return pair


class MapAttention(nn.Module):
    """Base of attention modules over a map: the weights and the logits for inspection."""

    def _attention(self, x: Tensor) -> Attention:
        """Check an input and return what its attention adds up."""
        raise NotImplementedError

    def attention_size(self, size: Sequence[int]) -> Pair:
        """Return the size of the map of queries for an input of ``size`` (H, W)."""
        return size[0], size[1]

    def attention_maps(self, x: Tensor, queries: Tensor | None = None) -> Tensor:
        """Compute the attention weights for inspection, in O(N²) memory without ``queries``.

        Args:
            x: As in ``forward``.
            queries: (Q, 2), rows and columns on the map of queries; None for all.

        Returns:
            (B, M, Hq, Wq, Hk, Wk), or (B, M, Q, Hk, Wk) with ``queries``; 0 outside a query's window.

        Raises:
            ValueError: as in ``forward``; a query lies outside the map; or there are no attention weights.
        """
        return self._attention(x).map_weights(self.attention_size(x.shape[2:]), queries)

    def attention_logits(self, x: Tensor, queries: Tensor | None = None) -> dict[str, Tensor]:
        """Compute the logits of ``content`` and of ``position``, -inf outside a query's window.

        The softmax of their sum is :meth:`attention_maps`, whose arguments, axes and errors are the same, unless a
        window's positions outside the map take part as zeros.
        """
        parts, size = self._attention(x).parts(), self.attention_size(x.shape[2:])
        return {name: part.map_logits(size, queries) for name, part in parts.items()}


def checked_queries(queries: Tensor, size: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rows and columns of ``queries``, (Q, 2), on a map of ``size``.

    Raises:
        ValueError: ``queries`` are not positions on the map.
    """
    H, W = size
    if queries.dim() != 2 or queries.shape[1] != 2 or queries.is_floating_point():
        raise ValueError(f"queries must be whole numbers of shape (Q, 2), got {queries.dtype} {tuple(queries.shape)}")
    y, x = queries.to(device).unbind(1)
    if len(queries) and (min(y.min(), x.min()) < 0 or y.max() >= H or x.max() >= W):
        raise ValueError(f"queries must lie on the map of {H} rows and {W} columns, got {queries.tolist()}")
    return y, x


def rotation(shift: Tensor, length: int) -> Tensor:
    """Return the positions from ``shift`` on, followed by those before it, for every row: (B, length)."""
    return (torch.arange(length, device=shift.device) + shift.unsqueeze(1)) % length


def _laid_out(taps: Tensor, windows: reference.Windows, keys: Sequence[int], queries: Tensor, beyond: float) -> Tensor:
    """Lay out values of the windows of ``queries``, (B, M, Q, n), on the map, (B, M, Q, Hk * Wk), else ``beyond``."""
    number = keys[0] * keys[1]
    index = windows.rows[:, None, :, None] * keys[1] + windows.columns[:, None, :]
    index = torch.where(windows.inside, index, number).flatten(2).flatten(0, 1)[queries]  # outside: one extra entry
    maps = taps.new_full((*taps.shape[:3], number + 1), beyond).scatter(3, index.expand_as(taps), taps)
    return maps[..., :number]
