"""Learned relative positions of both axes, for modules that add them to content-only attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ....terms.relative_position import both_axes_logits, relative_logits
from ....terms.relative_table import resize_table
from ...common.attention import MapAttention
from ...common.checks import check_table_size, pair

Position = Literal["none", "relative"]


class RelativeTables(MapAttention):
    """Mixin with optional tables ``height_rel`` (2H - 1, d) and ``width_rel`` (2W - 1, d).

    Row H - 1 + o of ``height_rel`` is for keys o rows below the query (Shaw et al. 2018; Bello et al. 2019).
    """

    def make_tables(
        self, position: str, input_size: int | Sequence[int] | None, width: int, resize_tables: bool, **factory: Any
    ) -> None:
        """Create the tables for ``position='relative'``, which needs an ``input_size``; :meth:`reset_tables` draws."""
        size = None if input_size is None else pair("input_size", input_size)
        self.position, self.resize_tables = position, resize_tables
        self.input_size: tuple[int, int] | None = None
        self.height_rel: nn.Parameter | None = None
        self.width_rel: nn.Parameter | None = None
        if position != "relative":
            return
        if size is None:
            raise ValueError(
                "position 'relative' needs input_size=(H, W), the size of the module's input, for its tables; "
                "other positions need none"
            )
        self.input_size = size
        H, W = self.attention_size(size)
        self.height_rel = nn.Parameter(torch.empty(2 * H - 1, width, **factory))
        self.width_rel = nn.Parameter(torch.empty(2 * W - 1, width, **factory))

    def reset_tables(self) -> None:
        """Draw the tables with deviation d^-1/2 (Bello et al. 2019, Figure 8)."""
        for table in (self.height_rel, self.width_rel):
            if table is not None:
                nn.init.normal_(table, std=table.shape[1] ** -0.5)

    def table_logits(
        self, query: Tensor, scale: float, keys: Sequence[int], stride: Sequence[int] = (1, 1)
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute the scaled products of queries and tables.

        Args:
            query: (B, M, H, W, d).
            scale: Factor of the products.
            keys: Number of key rows and of key columns.
            stride: Distance between keys, in rows and columns of queries.

        Returns:
            (B, M, H, W, keys[0]) and (B, M, H, W, keys[1]); None, None without tables.
        """
        if self.height_rel is None or self.width_rel is None:
            return None, None
        offsets = []
        for n, table in enumerate((self.height_rel, self.width_rel)):
            size = query.shape[2 + n]
            resized, covered = resize_table(table, size), size + (keys[n] - 1) * stride[n]
            # Strided keys may end before the last row of queries; drop the offsets beyond.
            offsets.append(resized if covered == resized.shape[0] else resized[:covered])
        if stride[0] == stride[1] == 1:
            return both_axes_logits(query, torch.cat(offsets).t().unsqueeze(0), keys, scale)
        # The tables are smaller than the queries.
        rows, columns = ((table.t() * scale).expand(query.shape[1], -1, -1) for table in offsets)
        return (
            relative_logits(query, rows, keys[0], "row", 1, stride[0]),
            relative_logits(query, columns, keys[1], "column", 1, stride[1]),
        )

    def check_size(self, x: Tensor) -> None:
        """Check that the tables fit the size of ``x``."""
        if self.input_size is not None and not self.resize_tables:
            made, size = (self.attention_size(size) for size in (self.input_size, x.shape[2:]))
            check_table_size(x, made, size, self.input_size)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Resize the tables of a checkpoint from another image size, with the forward's interpolation."""
        for name in ("height_rel", "width_rel"):
            made, loaded = getattr(self, name), state_dict.get(prefix + name)
            if self.resize_tables and made is not None and loaded is not None and loaded.shape[1:] == made.shape[1:]:
                state_dict[prefix + name] = resize_table(loaded, (made.shape[0] + 1) // 2)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
