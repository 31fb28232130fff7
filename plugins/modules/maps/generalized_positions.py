"""Positions of generalized attention along the two axes of a map: ε2 + ε4, and the range of keys.

Shapes: B batch, M heads, d width per head, (H, W) or (Hq, Wq) queries, (Hk, Wk) keys, D offsets of one axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...terms.attention_type import AttentionTerms
from ...terms.relative_position import axis_encoding, relative_logits, spread
from ...terms.saliency import add_vector, key_saliency
from ..common.attention import Attention


class AxisPositions(nn.Module):
    """Base of generalized attention: position logits of each axis."""

    if TYPE_CHECKING:
        terms: AttentionTerms
        appr_geom_fc_x: nn.Linear | None
        appr_geom_fc_y: nn.Linear | None
        appr_bias: nn.Parameter | None  # u
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
        """Return the width of one axis's position encoding."""
        raise NotImplementedError

    def attention_size(self, size: Sequence[int]) -> tuple[int, int]:
        """Return the size of the map of queries for an input of ``size`` (H, W)."""
        raise NotImplementedError

    def _features(self, x: Tensor, context: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Compute scaled query, key and value, (B, M, ·, ·, d)."""
        raise NotImplementedError

    def axis_range(self, queries: int, keys: int, like: Tensor) -> Tensor:
        """Return (queries, keys) logits of one axis: 0 for keys in range, else -inf. Callers do not write to them."""
        raise NotImplementedError

    def _along_window(self, weight: Tensor, query: Tensor | None, radius: int) -> Tensor:
        """Compute ε2 + ε4 of one axis for offsets -radius ... radius: (B, M, H, W, n), without ε2 (1, M, 1, 1, n)."""
        table = self._table(weight, radius + 1, radius + 1, 1, 1)
        v = self._position_vector()
        if query is not None:
            return torch.einsum("bmhwd,mdn->bmhwn", query if v is None else add_vector(query, v), table)
        assert v is not None
        return torch.einsum("md,mdn->mn", v, table)[None, :, None, None]

    def attention_logits(
        self, x: Tensor, context: Tensor | None = None, queries: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Compute the logits of each term, by its name in :class:`.AttentionTerms`, -inf for keys out of range.

        The softmax of their sum is ``attention_maps``, whose arguments and axes are the same.
        """
        query, key, value = self._features(x, context)
        terms, v = self.terms, self._position_vector()
        in_range = self._both_axes(None, None, x, value)
        parts: dict[str, Attention] = {}
        if terms.content:
            parts["content"] = Attention(query, key, value, *in_range)
        if terms.content_position:
            parts["content_position"] = Attention(None, None, value, *self._both_axes(query, None, x, value))
        if self.appr_bias is not None and key is not None:
            saliency = key_saliency(key, self._scaled(self._vector(self.appr_bias)))
            parts["saliency"] = Attention(None, None, value, *in_range, saliency)
        if v is not None:
            parts["position"] = Attention(None, None, value, *self._both_axes(None, v, x, value))
        size = self.attention_size(x.shape[2:])
        return {name: part.map_logits(size, queries) for name, part in parts.items()}

    def _both_axes(
        self, query: Tensor | None, v: Tensor | None, x: Tensor, value: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute scaled ε2 of ``query`` plus ε4 of ``v`` as far as given, and the range, as row and column logits.

        Args:
            query: (B, M, Hq, Wq, d).
            v: (M, d).
            x: (B, C, H, W), the map of the queries.
            value: (B, M, Hk, Wk, d).
        """
        logits: list[Tensor | None] = []
        for n, (axis, table) in enumerate((("row", self.appr_geom_fc_y), ("column", self.appr_geom_fc_x))):
            queries, keys = -(-x.shape[2 + n] // self.q_stride), value.shape[2 + n]
            along: Tensor | None = None
            if table is not None and (query is not None or v is not None):
                along = self._axis_logits(table.weight, query, v, queries, keys, axis)
            if self.spatial_range != -1:
                in_range = _along(self.axis_range(queries, keys, x).unsqueeze(0), axis)
                along = in_range if along is None else along + in_range
            logits.append(along)
        return logits[0], logits[1]

    def _axis_logits(
        self, weight: Tensor, query: Tensor | None, v: Tensor | None, queries: int, keys: int, axis: str
    ) -> Tensor:
        """Compute ε2 + ε4 of one axis, with size 1 along axes that they do not depend on."""
        table = self._table(weight, queries, keys, self.q_stride, self.kv_stride)
        if query is not None:
            query = query if v is None else add_vector(query, v)
            return relative_logits(query, table, keys, axis, self.q_stride, self.kv_stride)
        assert v is not None
        bias = torch.einsum("md,mdn->mn", v, table)
        return _along(spread(bias, queries, keys, self.q_stride, self.kv_stride), axis)

    def _table(self, weight: Tensor, queries: int, keys: int, q_stride: int, kv_stride: int) -> Tensor:
        """Project the encodings of one axis's offsets in pixels, (M, d, D)."""
        factor, width = float(self.offset_sign * self.position_magnitude), self.axis_width()
        encoding = axis_encoding(
            queries, keys, q_stride, kv_stride, factor, width, self.wavelength, weight.device, weight.dtype
        )
        table = F.linear(encoding, weight).unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0)  # (M, d, D)
        if self.position_factor != 1.0:
            table = table * self.position_factor
        return table

    def _position_vector(self) -> Tensor | None:
        """Return v of ε4, scaled, (M, d)."""
        return None if self.geom_bias is None else self._scaled(self._vector(self.geom_bias))

    def _vector(self, parameter: Tensor) -> Tensor:
        return parameter.view(self.num_heads, -1)

    def _scaled(self, tensor: Tensor) -> Tensor:
        return tensor if self.scale == 1 else tensor * self.scale


def _along(pairs: Tensor, axis: str) -> Tensor:
    """Reshape (·, queries, keys) to row logits (1, ·, Hq, 1, keys) or column logits (1, ·, 1, Wq, keys)."""
    return pairs.unsqueeze(0).unsqueeze(3 if axis == "row" else 2)
