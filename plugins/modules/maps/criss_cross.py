"""Criss-cross attention, by content alone or with relative positions (Huang et al. 2019; Shaw et al. 2018).

Shapes: B batch, C channels, d width of queries and keys, (H, W) the map, N = H * W positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.axes import unflatten
from ...ops import criss_cross_attention, reference
from ..common.attention import MapAttention
from ..common.bypass import has_global_hooks, untouched
from ..common.checks import check_map, one_of, positive
from ..common.tracing import one_node
from ..common.weights import checked_queries
from .parts.memory_format import add_scaled, to_channels_last
from .parts.relative_tables import Position, RelativeTables


class Gamma(nn.Module):
    """A learned factor, initially ``initial``, with mmcv's parameter name."""

    def __init__(self, initial: float, **factory: Any) -> None:
        super().__init__()
        self.initial = initial
        self.scale = nn.Parameter(torch.empty((), **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the factor to its initial value."""
        nn.init.constant_(self.scale, self.initial)

    def forward(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return ``x + scale * attended`` in the memory format of ``x``."""
        return add_scaled(x, self.scale, attended)


class CrissCross(MapAttention):
    """Base of attention along rows and columns: projections with mmcv's names, residual, attention maps.

    Subclasses call ``make_layers``, set ``scale``, and implement ``position_logits``.
    """

    in_channels: int
    scale: float  # factor of the content logits

    def make_layers(self, in_channels: int, width: int, gate_init: float, **factory: Any) -> None:
        """Create the projections and the residual's factor."""
        self.in_channels, self.width = in_channels, width
        self.query_conv = nn.Conv2d(in_channels, width, 1, **factory)
        self.key_conv = nn.Conv2d(in_channels, width, 1, **factory)
        self.value_conv = nn.Conv2d(in_channels, in_channels, 1, **factory)
        self.gamma = Gamma(gate_init, **factory)

    def position_logits(self, x: Tensor, query: Tensor) -> Tensor | None:
        """Compute the position logits of the H keys in a query's column, then of the W keys in its row.

        Args:
            x: (B, C, H, W), in channels-last memory.
            query: (B, 1, H, W, d).

        Returns:
            (B, 1, H, W, H + W); None for attention by content alone.
        """
        raise NotImplementedError

    @one_node
    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (B, C, H, W) -> (B, C, H, W).

        Raises:
            ValueError: The shape does not match, or needs relative tables of another size.
        """
        query, key, value, logits = self._terms(x)
        attended = criss_cross_attention(query, key, value, logits, scale=self.scale)
        return self.add(x, attended.squeeze(1).permute(0, 3, 1, 2))

    def add(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return ``x + gamma * attended`` in the memory format of ``x``, of two maps (B, C, H, W)."""
        return self.gamma(x, attended)

    def attention_maps(self, x: Tensor, queries: Tensor | None = None) -> Tensor:
        """Compute the attention weights, 0 off the cross; see :meth:`.MapAttention.attention_maps`."""
        weights = reference.criss_cross_probabilities(*self._terms(x), self.scale)
        return on_map(weights, 0.0, queries)

    def attention_logits(self, x: Tensor, queries: Tensor | None = None) -> dict[str, Tensor]:
        """Compute the logits of ``content`` and of ``position``, -inf off the cross; else as :meth:`attention_maps`."""
        query, key, value, logits = self._terms(x)
        parts = {"content": reference.criss_cross_logits(query, key, value, None, self.scale)}
        if logits is not None:
            parts["position"] = reference.criss_cross_logits(None, None, value, logits, self.scale)
        return {name: on_map(part, -math.inf, queries) for name, part in parts.items()}

    def _terms(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Compute query, key and value (B, 1, H, W, ·), and position logits."""
        check_map(x, self.in_channels, self.query_conv)
        x = to_channels_last(x)
        query, key, value = cross_terms(x, (self.query_conv, self.key_conv, self.value_conv))
        return query, key, value, self.position_logits(x, query)


def cross_terms(x: Tensor, layers: Sequence[Any]) -> tuple[Tensor, ...]:
    """Compute query, key and value, (B, 1, H, W, ·), of a map (B, C, H, W) by their 1×1 convolutions."""
    return tuple(part.permute(0, 2, 3, 1).unsqueeze(1) for part in _projected(x, layers))


def _projected(x: Tensor, layers: Sequence[Any]) -> Sequence[Tensor]:
    """Project (B, C, H, W) to maps (B, ·, H, W).

    On CUDA one product reads ``x`` once, and its gradient needs no sum of three. On CPUs the product takes 30 times as
    long as reading ``x``, and joining the gradients costs as much as that sum.
    """
    untouched_layers = all(untouched(layer, nn.Conv2d) and layer.bias is not None for layer in layers)
    if not untouched_layers or has_global_hooks() or not joins_products(x):
        return [layer(x) for layer in layers]
    weight = torch.cat([layer.weight for layer in layers])
    bias = torch.cat([layer.bias for layer in layers])
    return F.conv2d(x, weight, bias).split([len(layer.weight) for layer in layers], 1)


def joins_products(x: Tensor) -> bool:
    """Return whether projections of ``x`` are computed together."""
    return x.is_cuda


def on_map(cross: Tensor, off: float, queries: Tensor | None) -> Tensor:
    """Lay out values (B, M, H, W, H + W) of a query's column and row on the map, with ``off`` elsewhere.

    The query's own value in its row replaces that in its column, which is 0 or -inf.
    """
    H, W = cross.shape[2:4]
    rows, columns = torch.arange(H, device=cross.device), torch.arange(W, device=cross.device)
    chosen = torch.cartesian_prod(rows, columns) if queries is None else queries
    y, z = checked_queries(chosen, (H, W), cross.device)
    cross = cross[:, :, y, z]
    keys = torch.cat((rows * W + z.unsqueeze(1), y.unsqueeze(1) * W + columns), 1)  # (Q, H + W)
    maps = cross.new_full((*cross.shape[:3], H * W), off)
    maps = unflatten(maps.scatter_reduce(3, keys.expand_as(cross), cross, "amax"), 3, (H, W))
    return unflatten(maps, 2, (H, W)) if queries is None else maps


class CrissCrossAttention2d(CrissCross, RelativeTables):
    """``x + gamma * attention`` of every position to its row and its column.

    Source: Huang et al. (2019). ``position='relative'`` is "CC+RPE" of the thesis' Table 3.2, which follows Shaw et al.
    (2018), Eq. 4. The logit of key j, in the row or in the column of query i, is

        scale * q_i·(k_j + r_W[j_x - i_x])  in the row,  scale * q_i·(k_j + r_H[j_y - i_y])  in the column

    with learned tables r_W (2W - 1, d) and r_H (2H - 1, d), or r = 0 without tables. The query itself is a key of its
    row only, so r_H[0] is never read. ``gamma`` starts at 0 by default, so inserting the layer does not change a
    trained network's output. Without tables and with ``scale=1`` this is mmcv's ``CrissCrossAttention``, whose
    checkpoints load.

    Args:
        in_channels: C.
        reduction: d = C / reduction, the width of queries and keys; at least 1.
        position: ``'none'`` or ``'relative'``.
        input_size: (H, W) of the module's input, which determines the size of the relative tables.
        scale: Factor of all logits.
        gate_init: Initial ``gamma``.
        resize_tables: Whether to interpolate the tables if a map or a loaded state_dict has another size than
            ``input_size``; otherwise this is an error.

    Shapes:
        (B, C, H, W) -> (B, C, H, W)

    Raises:
        ValueError: An argument is out of range or inconsistent with the others.
    """

    def __init__(
        self,
        in_channels: int,
        reduction: int = 8,
        position: Position = "none",
        input_size: int | Sequence[int] | None = None,
        scale: float = 1.0,
        *,
        gate_init: float = 0.0,
        resize_tables: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        positive(in_channels=in_channels, reduction=reduction)
        one_of(Position, position=position)
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        width = max(in_channels // reduction, 1)
        self.make_tables(position, input_size, width, resize_tables, **factory)
        self.reset_parameters()
        self.reduction, self.scale = reduction, float(scale)
        self.make_layers(in_channels, width, gate_init, **factory)

    def reset_parameters(self) -> None:
        """Draw the tables with deviation d^-1/2 (Bello et al. 2019, Figure 8)."""
        self.reset_tables()

    def position_logits(self, x: Tensor, query: Tensor) -> Tensor | None:
        """Compute the products of queries and tables; None without tables."""
        self.check_size(x)
        row, column = self.table_logits(query, self.scale, x.shape[2:])
        return None if row is None or column is None else torch.cat((row, column), -1)

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, reduction={self.reduction}, position={self.position!r}, scale={self.scale:g}"
        return text + ("" if self.input_size is None else f", input_size={self.input_size}")
