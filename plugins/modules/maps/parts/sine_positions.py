"""Logits of encoded relative positions on a map, ε2 and ε4 of Zhu et al. (2019), and the range of keys.

Shapes: B batch, C channels, M heads, d width per head, (Hq, Wq) queries, (Hk, Wk) keys, D offsets of one axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ....terms.relative_position import axis_encoding, both_axes_logits, relative_logits, spread
from ....terms.saliency import add_vector
from ....terms.window import shared_axis_window, window_position_logits
from ...common.axis_table import axis_table

Axes = tuple[Tensor | None, Tensor | None]
Pair = tuple[int, int]


class EncodedPositions:
    """Base of attention whose logits contain q·R[k - q] or v·R[k - q], with R the projected sines of an offset.

    R[k - q] is the sum of a row's and of a column's encoding, so that the logits are row and column logits. Subclasses
    set the attributes below; the projections are None if there is neither term.
    """

    num_heads: int
    spatial_range: int
    q_stride: int
    kv_stride: int
    scale: float
    position_embedding_dim: int
    position_magnitude: float
    appr_geom_fc_x: nn.Linear | None
    appr_geom_fc_y: nn.Linear | None

    wavelength = 10000.0
    offset_sign = 1  # R encodes k - q
    position_factor = 1.0  # factor of the projected R

    def axis_width(self) -> int:
        """Return the width of one axis's position encoding."""
        return self.position_embedding_dim

    def axis_range(self, queries: int, keys: int, like: Tensor) -> Tensor:
        """Return (queries, keys) logits of one axis: 0 for keys in range, else -inf. Callers do not write to them."""
        radius = (self.spatial_range - 1) // 2
        return shared_axis_window(queries, keys, radius, self.q_stride, self.kv_stride, like.device, like.dtype)

    def attention_size(self, size: Sequence[int]) -> tuple[int, int]:
        """Return the size of the map of queries for an input of ``size`` (H, W)."""
        H, W = ((n + self.q_stride - 1) // self.q_stride for n in size)  # ONNX cuts off negative quotients
        return H, W

    def position_logits(self, query: Tensor | None, v: Tensor | None, x: Tensor, value: Tensor) -> Axes:
        """Compute ε2 of ``query`` plus ε4 of ``v``, as far as given, and the range, as row and column logits.

        Args:
            query: (B, M, Hq, Wq, d), scaled.
            v: (M, d), scaled.
            x: (B, C, H, W), the map of the queries.
            value: (B, M, Hk, Wk, d).
        """
        keys = value.shape[2:4]
        queries = self.attention_size(x.shape[2:]) if query is None else query.shape[2:4]
        logits = self._products(_sum(query, v), v, queries, keys)
        if self.spatial_range != -1:
            for n, along in enumerate(logits):
                in_range = _along(self.axis_range(queries[n], keys[n], x).unsqueeze(0), n)
                logits[n] = in_range if along is None else along + in_range
        return logits[0], logits[1]

    def tap_logits(self, query: Tensor | None, v: Tensor | None, size: Sequence[int], radius: Pair) -> Tensor | None:
        """Compute the same for the taps of a window around each query, (B, M, H, W, n); None if there are no terms.

        Args:
            query: (B, M, H, W, d), scaled.
            v: (M, d), scaled.
            size: (H, W).
            radius: Rows and columns from the query to the window's border.
        """
        query = _sum(query, v)
        tables = self._tables([r + 1 for r in radius], [r + 1 for r in radius], 1, 1, v if query is None else query)
        if not tables:
            return None
        if query is not None:
            rows, columns = (torch.einsum("bmhwd,mdn->bmhwn", query, table) for table in tables)
        else:
            rows, columns = (torch.einsum("md,mdn->mn", v, table)[None, :, None, None] for table in tables)
        return window_position_logits(rows, columns, *size)

    def _products(
        self, query: Tensor | None, v: Tensor | None, queries: Sequence[int], keys: Sequence[int]
    ) -> list[Tensor | None]:
        """Compute row and column logits of ``query``, which contains v, or of v alone.

        They have size 1 along axes that they do not depend on.
        """
        strides = self.q_stride, self.kv_stride
        tables = self._tables(queries, keys, *strides, v if query is None else query)
        if not tables:
            return [None, None]
        if query is not None and self.q_stride == self.kv_stride:
            return [*both_axes_logits(query, torch.cat(tables, 2), keys)]
        if query is not None:
            axes = zip(tables, keys, ("row", "column"))
            return [relative_logits(query, table, length, axis, *strides) for table, length, axis in axes]
        biases = (torch.einsum("md,mdn->mn", v, table) for table in tables)
        return [_along(spread(bias, queries[n], keys[n], *strides), n) for n, bias in enumerate(biases)]

    def _tables(
        self, queries: Sequence[int], keys: Sequence[int], q_stride: int, kv_stride: int, like: Tensor | None
    ) -> list[Tensor]:
        """Project the encodings of the offsets of rows and of columns, in pixels, to (M, d, D); none without terms."""
        projections = self.appr_geom_fc_y, self.appr_geom_fc_x
        tables: list[Tensor] = []
        for n, projection in enumerate(projections):
            if projection is None or like is None:
                return []
            factor, width = float(self.offset_sign * self.position_magnitude), self.axis_width()
            encoding = axis_encoding(
                queries[n], keys[n], q_stride, kv_stride, factor, width, self.wavelength, like.device, like.dtype
            )
            table = axis_table(projection, encoding, self.num_heads)
            tables.append(table if self.position_factor == 1.0 else table * self.position_factor)
        return tables


def _sum(query: Tensor | None, v: Tensor | None) -> Tensor | None:
    return query if query is None or v is None else add_vector(query, v)


def _along(pairs: Tensor, axis: int) -> Tensor:
    """Reshape (·, queries, keys) to row logits (1, ·, Hq, 1, keys), or for axis 1 column logits (1, ·, 1, Wq, keys)."""
    return pairs.unsqueeze(0).unsqueeze(2 if axis else 3)
