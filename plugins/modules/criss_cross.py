"""Criss-cross attention, of content alone or with relative positions (Huang et al. 2019; Shaw et al. 2018).

Shapes: B batch, C channels, d width of queries and keys, (H, W) the map, N = H * W positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import criss_cross_attention, reference
from .bilateral import Gamma, check_queries
from .checks import check_map
from .relative_tables import RelativeTables


class CrissCrossAttention2d(RelativeTables):
    """``x + gamma * attention`` of every position to its row and its column.

    Source: Huang et al. (2019); with ``position='relative'`` the "CC+RPE" of the thesis' Table 3.2, by Shaw et al.
    (2018), Eq. 4. The logit of key j, in the row or in the column of query i, is

        scale * q_i·(k_j + r_W[j_x - i_x])  in the row,  scale * q_i·(k_j + r_H[j_y - i_y])  in the column

    with learned tables r_W (2W - 1, d) and r_H (2H - 1, d), without which r = 0. The query itself is a key of its
    row, once: r_H[0] is never read. ``gamma`` starts at 0: put into a trained network, the layer changes nothing at
    first. Without tables and with ``scale=1`` this is mmcv's ``CrissCrossAttention``, whose checkpoints load.

    Args:
        in_channels: C.
        reduction: d = C / reduction, of queries and keys; at least 1.
        position: ``'none'`` or ``'relative'``.
        input_size: (H, W) of the module's input, for which the relative tables are made.
        scale: Factor of all logits.
        resize_tables: Interpolate the tables where a map, or a loaded state_dict, is made for another size than
            ``input_size``; False: an error.

    Shapes:
        (B, C, H, W) -> (B, C, H, W)

    Raises:
        ValueError: an argument is out of its range, or does not fit the others.
    """

    def __init__(
        self,
        in_channels: int,
        reduction: int = 8,
        position: str = "none",
        input_size: int | Sequence[int] | None = None,
        scale: float = 1.0,
        *,
        resize_tables: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, number in (("in_channels", in_channels), ("reduction", reduction)):
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"{name} must be a positive int, got {number!r}")
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        width = max(in_channels // reduction, 1)
        super().__init__(position, input_size, width, resize_tables, **factory)
        self.in_channels, self.reduction, self.width, self.scale = in_channels, reduction, width, float(scale)
        self.query_conv = nn.Conv2d(in_channels, width, 1, **factory)
        self.key_conv = nn.Conv2d(in_channels, width, 1, **factory)
        self.value_conv = nn.Conv2d(in_channels, in_channels, 1, **factory)
        self.gamma = Gamma(**factory)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W).

        Raises:
            ValueError: the shape does not fit, or needs other tables and ``resize_tables`` is off.
        """
        check_map(x, self.in_channels, self.query_conv.weight)
        # Channels-last, as the result is: a sum of two memory formats takes ten times as long.
        x = x.contiguous(memory_format=torch.channels_last)
        query, key, value, logits = self._terms(x)
        attended = criss_cross_attention(query, key, value, logits, scale=self.scale)
        return self.gamma(x, attended.squeeze(1).permute(0, 3, 1, 2))

    def attention_maps(self, x: Tensor, queries: Tensor | None = None) -> Tensor:
        """The attention weights for an input, 0 off the cross: for inspection, O(N²) without ``queries``.

        Args:
            x: As ``forward``.
            queries: (Q, 2), rows and columns; None for all.

        Returns:
            (B, 1, H, W, H, W), or (B, 1, Q, H, W) of ``queries``.

        Raises:
            ValueError: as ``forward``; or a query lies outside the map.
        """
        terms = self._terms(x)
        H, W = x.shape[2:]
        if queries is not None:
            check_queries(queries, H, W)
        rows, columns = torch.arange(H, device=x.device), torch.arange(W, device=x.device)
        chosen = torch.cartesian_prod(rows, columns) if queries is None else queries.to(x.device)
        y, z = chosen.unbind(1)
        weights = reference.criss_cross_probabilities(*terms, self.scale)[:, :, y, z]
        keys = torch.cat((rows * W + z.unsqueeze(1), y.unsqueeze(1) * W + columns), 1)  # (Q, H + W)
        maps = weights.new_zeros((*weights.shape[:3], H * W))
        maps = maps.scatter_add(3, keys.expand_as(weights), weights).unflatten(3, (H, W))
        return maps.unflatten(2, (H, W)) if queries is None else maps

    def _terms(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Query, key, value (B, 1, H, W, ·) and position logits (B, 1, H, W, H + W)."""
        check_map(x, self.in_channels, self.query_conv.weight)
        self.check_size(x)
        x = x.contiguous(memory_format=torch.channels_last)
        query, key, value = (
            layer(x).permute(0, 2, 3, 1).unsqueeze(1) for layer in (self.query_conv, self.key_conv, self.value_conv)
        )
        row, column = self.table_logits(query, self.scale, x.shape[2:])
        return query, key, value, None if row is None or column is None else torch.cat((row, column), -1)

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, reduction={self.reduction}, position={self.position!r}, scale={self.scale:g}"
        return text + ("" if self.input_size is None else f", input_size={self.input_size}")
