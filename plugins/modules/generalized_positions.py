"""Positions of generalized attention along the two axes of a map: ε2 + ε4, and the range of keys.

Shapes: B batch, M heads, d width per head, (H, W) or (Hq, Wq) queries, (Hk, Wk) keys, D offsets of one axis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..terms.relative_position import axis_offsets, relative_logits, spread
from ..terms.saliency import add_vector
from ..terms.sine_position import sine_encoding


class AxisPositions(nn.Module):
    """Base of generalized attention: position logits, axis by axis, from its parameters and options."""

    if TYPE_CHECKING:  # TorchScript takes its types from the values
        geom_bias: nn.Parameter | None  # v
        num_heads: int
        q_stride: int
        kv_stride: int
        spatial_range: int
        scale: float
        wavelength: float
        offset_sign: int
        position_factor: float
        position_magnitude: float

    def axis_width(self) -> int:
        """Width of one axis' position encoding."""
        raise NotImplementedError

    def axis_range(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """0 where a key is in range of the query on one axis, else -inf: (queries, keys)."""
        raise NotImplementedError

    def _along_window(self, weight: Tensor, query: Tensor | None, radius: int) -> Tensor:
        """ε2 + ε4 of one axis for the offsets -radius ... radius: (B, M, H, W, n), or (1, M, 1, 1, n) without ε2."""
        table = self._table(weight, torch.arange(-radius, radius + 1, device=weight.device))
        v: Tensor | None = None
        if self.geom_bias is not None:
            v = self._scaled(self._vector(self.geom_bias))
        if query is not None:
            return torch.einsum("bmhwd,mdn->bmhwn", query if v is None else add_vector(query, v), table)
        assert v is not None
        return torch.einsum("md,mdn->mn", v, table)[None, :, None, None]

    def _range_logits(self, queries: list[int], keys: list[int], like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """0 in range and -inf out of it, for rows and for columns; None where all keys are in range."""
        if self.spatial_range == -1:
            return None, None
        rows = self.axis_range(queries[0], keys[0], like.device).to(like.dtype)
        columns = self.axis_range(queries[1], keys[1], like.device).to(like.dtype)
        return _along(rows.unsqueeze(0), "row"), _along(columns.unsqueeze(0), "column")

    def _axis_logits(self, weight: Tensor, query: Tensor | None, queries: int, keys: int, axis: str) -> Tensor:
        """ε2 + ε4 of one axis, by its projection of encodings; of size 1 along axes that it does not depend on."""
        table = self._table(weight, axis_offsets(queries, keys, self.q_stride, self.kv_stride, weight.device))
        v: Tensor | None = None
        if self.geom_bias is not None:
            v = self._scaled(self._vector(self.geom_bias))
        if query is not None:
            query = query if v is None else add_vector(query, v)
            return relative_logits(query, table, keys, axis, self.q_stride, self.kv_stride)
        assert v is not None
        bias = torch.einsum("md,mdn->mn", v, table)
        return _along(spread(bias, queries, keys, self.q_stride, self.kv_stride), axis)

    def _table(self, weight: Tensor, offsets: Tensor) -> Tensor:
        """The projected encodings of offsets in pixels, (M, d, D)."""
        offsets = offsets.to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
        offsets = offsets * (self.offset_sign * self.position_magnitude)
        encoding = sine_encoding(offsets, self.axis_width(), self.wavelength).to(weight.dtype)
        table = F.linear(encoding, weight).unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0)  # (M, d, D)
        if self.position_factor != 1.0:
            table = table * self.position_factor
        return table

    def _vector(self, parameter: Tensor) -> Tensor:
        return parameter.view(self.num_heads, -1)

    def _scaled(self, tensor: Tensor) -> Tensor:
        return tensor if self.scale == 1 else tensor * self.scale


def _along(pairs: Tensor, axis: str) -> Tensor:
    """(·, queries, keys) of one axis as logits (1, ·, Hq, 1, keys) or (1, ·, 1, Wq, keys)."""
    return pairs.unsqueeze(0).unsqueeze(3 if axis == "row" else 2)
