"""Sampling points of deformable attention: the points of chosen queries on every level, and their weights.

Shapes: B batch, Q queries, M heads, L levels, K points of a level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_plugins.modules.tokens.deformable_attention import samples
from attn_plugins.ops.deformable_attention.deformable_attention import shapes_on_host


@dataclass
class Points:
    """A deformable attention layer and its inputs in the last forward pass."""

    name: str  # in its model
    attention: Any  # the layer
    arguments: dict[str, Any]  # of its forward, by name
    objects: bool  # whether its queries are objects rather than the pixels of all levels

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(H, W) of every level."""
        return shapes_on_host(self.arguments["spatial_shapes"])

    @property
    def references(self) -> Tensor:
        """Reference points (B, Q, L, 2), or boxes (B, Q, L, 4), as passed to the layer."""
        return self.arguments["reference_points"]

    @torch.no_grad()
    def points(self, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return locations (B, Q, M, L, K, 2) as (x, y), 0 to 1 on the map, and weights (B, Q, M, L, K)."""
        query, value = self.arguments["query"], self.arguments.get("value")
        value = query if value is None else value
        if (position := self.arguments.get("query_pos")) is not None:
            query = query + position
        if not self.attention.batch_first:
            query, value = query.transpose(0, 1), value.transpose(0, 1)
        references = self.references
        if chosen is not None:
            query, references = query.index_select(1, chosen), references.index_select(1, chosen)
        padding = self.arguments.get("key_padding_mask")
        return samples(self.attention, query, value, padding, references, self.arguments["spatial_shapes"])

    def number(self, level: int, cells: Sequence[Sequence[int]]) -> Tensor:
        """Return the numbers of the queries at (row, column) of a level's map."""
        before = sum(H * W for H, W in self.shapes[:level])
        return torch.tensor([before + y * self.shapes[level][1] + x for y, x in cells])

    def in_pixels(self, places: Tensor, picture: Sequence[int], inside: Sequence[int]) -> Tensor:
        """Convert locations on the maps to pixels of the first picture.

        Args:
            places: (Q, ..., L, K, 2) as (x, y), or references (Q, L, 2) or (Q, L, 4) as (x, y, w, h).
            picture: (H, W) with its padding.
            inside: (h, w) without its padding.
        """
        sizes, valid = (torch.tensor([n[1], n[0]], dtype=places.dtype) for n in (picture, inside))
        scale = sizes.expand(len(self.shapes), 2)
        ratios, padding = (self.arguments.get(name) for name in ("valid_ratios", "key_padding_mask"))
        if ratios is not None and padding is not None and padding[0].any():
            # In the model, picture and boxes cover this share of the maps, rounded to whole pixels of the maps.
            scale = valid / ratios[0].to(places)
        if places.dim() > 3:
            return places * scale[:, None]
        return places * (scale if places.shape[-1] == 2 else scale.repeat(1, 2))
