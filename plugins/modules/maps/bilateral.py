"""Bilateral non-local and criss-cross attention: content and non-localized position logits (Thesis, chapter 3).

Shapes: B batch, C channels, d width of queries and keys, N = H * W positions, k side of the position logits' window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...core.axes import unflatten
from ...terms.nonlocal_position import (
    Outside,
    Smoothing,
    axis_index,
    check_smoothing,
    map_index,
    predicted_values,
    realign,
    standardised,
    with_outside,
)
from ..common.attention import MapAttention
from ..common.capture import softmax_over_keys
from ..common.checks import check_map, odd_pair, one_of, positive
from ..common.tracing import one_node
from ..common.weights import checked_queries
from .criss_cross import CrissCross
from .parts.memory_format import in_format_of, to_channels_last
from .parts.zero_conv import ZeroConv2d

CHUNK = 1 << 26  # maximum number of logits that BilateralNonLocal2d holds at once


class PositionPredictor(nn.Sequential):
    """f of Eq. 3.11: a linear embedding and a linear mapping to one value per offset.

    Shapes:
        (B, in_channels, H, W) -> (B, values, H, W)
    """

    def __init__(self, in_channels: int, width: int, values: int, **factory: Any) -> None:
        super().__init__(nn.Conv2d(in_channels, width, 1, **factory), nn.Conv2d(width, values, 1, **factory))


class _Bilateral(MapAttention):
    """Common base of both modules: arguments and smoothing."""

    def __init__(
        self, in_channels: int, reduction: int, kernel_size: int | Sequence[int], outside: Outside, smoothing: Smoothing
    ) -> None:
        super().__init__()
        positive(in_channels=in_channels, reduction=reduction)
        one_of(Outside, outside=outside)
        one_of(Smoothing, smoothing=smoothing)
        check_smoothing(outside, smoothing)
        self.kernel_size = odd_pair("kernel_size", kernel_size)
        self.in_channels, self.reduction, self.outside, self.smoothing = in_channels, reduction, outside, smoothing
        self.width = max(in_channels // reduction, 1)

    def smoothed(self, logits: Tensor, counted: Tensor | None = None) -> Tensor:
        """Divide position logits by their smoothing factor."""
        return logits / math.sqrt(self.width) if self.smoothing == "sqrt_d" else standardised(logits, counted)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, kernel_size={self.kernel_size}, outside={self.outside!r}, "
            f"smoothing={self.smoothing!r}"
        )


class BilateralNonLocal2d(_Bilateral):
    """``x + conv_out(attention)`` over all positions, with logits of content and of position.

    Source: Thesis, Eq. 3.9 to 3.12, on the non-local block of Wang et al. (2018) as implemented in mmcv. The logit of
    key j for query i is θ(x_i)·φ(x_j) / √d + δ_p(x_i, i, j) / σ_p, where δ_p is predicted for the k × k window around i
    and is v_i outside it. ``conv_out`` starts at 0, so inserting the layer does not change a trained network's output.

    The logits of all N² pairs are computed a few rows of queries at a time, and again in the backward pass: about 2²⁶
    logits are held at once (256 MiB in float32, three such maps in the backward pass), while 97 × 97 positions would
    need 354 MB per image. Time stays N² (d + C) operations.

    Args:
        in_channels: C.
        reduction: d = C / reduction, the width of queries, keys, values and the position predictor.
        kernel_size: k, odd, or two ints for rows and columns.
        outside: v: ``'learned'`` (one more predicted value), ``'zero'``, ``'-inf'``, ``'min'``, ``'mean'``.
        smoothing: σ_p: ``'zscore'`` standardises a query's position logits over all keys, ``'sqrt_d'`` divides them
            by √d.

    Shapes:
        (B, C, H, W) -> (B, C, H, W)

    Raises:
        ValueError: An argument is out of range or inconsistent with the others.
    """

    def __init__(
        self,
        in_channels: int,
        reduction: int = 2,
        kernel_size: int | Sequence[int] = 31,
        outside: Outside = "learned",
        smoothing: Smoothing = "zscore",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_channels, reduction, kernel_size, outside, smoothing)
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        values = predicted_values(self.kernel_size[0] * self.kernel_size[1], outside)
        self.theta, self.phi, self.g = (nn.Conv2d(in_channels, self.width, 1, **factory) for _ in range(3))
        self.position = PositionPredictor(in_channels, self.width, values, **factory)
        self.conv_out = ZeroConv2d(self.width, in_channels, 1, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw projections from a normal distribution with deviation 0.01, as mmcv does, and zero ``conv_out``."""
        for module in (self.theta, self.phi, self.g, *self.position, self.conv_out):
            assert isinstance(module, nn.Conv2d)
            assert module.bias is not None
            nn.init.normal_(module.weight, std=0.0 if module is self.conv_out else 0.01)
            nn.init.zeros_(module.bias)

    @one_node
    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (B, C, H, W) -> (B, C, H, W)."""
        query, key, value, values = self._terms(x)
        B, _, H, W = x.shape
        rows, starts = H, [0]  # maps of symbolic sizes are not cut
        if all(isinstance(size, int) for size in (B, H, W)):
            rows = max(1, CHUNK // max(1, B * W * H * W))
            starts = [*range(0, H, rows)]
        parts = []
        for first in starts:
            here = slice(first * W, min(first + rows, H) * W)
            positions = torch.arange(here.start, here.stop, device=x.device)
            arguments = (query[:, here], key, value, values[:, here], positions, H, W)
            if torch.is_grad_enabled() and rows < H:
                parts.append(checkpoint(self._attend, *arguments, use_reentrant=False))
            else:
                parts.append(self._attend(*arguments))
        attended = unflatten(torch.cat(parts, 1).transpose(1, 2), 2, (H, W))
        return x + in_format_of(x, self.conv_out(attended))

    def attention_maps(self, x: Tensor, queries: Tensor | None = None) -> Tensor:
        """Compute the attention weights; see :meth:`.MapAttention.attention_maps`."""
        logits = self.attention_logits(x, queries)
        return softmax_over_keys(logits["content"] + logits["position"])

    def attention_logits(self, x: Tensor, queries: Tensor | None = None) -> dict[str, Tensor]:
        """Compute the logits of ``content`` and of ``position``; else as :meth:`attention_maps`."""
        query, key, _, values = self._terms(x)
        H, W = x.shape[2:]
        positions = torch.arange(H * W, device=x.device)
        if queries is not None:
            y, z = checked_queries(queries, (H, W), x.device)
            positions = y * W + z
        pair = self._both_logits(query[:, positions], key, values[:, positions], positions, H, W)
        parts = {}
        for name, logits in zip(("content", "position"), pair):
            expanded = unflatten(logits, 2, (H, W)).unsqueeze(1)
            parts[name] = unflatten(expanded, 2, (H, W)) if queries is None else expanded
        return parts

    def _terms(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return scaled queries, keys and values (B, N, d), and the predicted values with v last (B, N, n + 1)."""
        check_map(x, self.in_channels, self.theta)
        x = to_channels_last(x)
        query, key, value, predicted = (
            layer(x).flatten(2).transpose(1, 2) for layer in (self.theta, self.phi, self.g, self.position)
        )
        return query * self.width**-0.5, key, value, with_outside(predicted, self.outside)

    def _both_logits(
        self, query: Tensor, key: Tensor, values: Tensor, positions: Tensor, H: int, W: int
    ) -> tuple[Tensor, Tensor]:
        """Compute content and position logits (B, Q, N) of the queries at ``positions``, in float32 at least."""
        index = map_index(positions, (H, W), self.kernel_size)
        content = torch.matmul(query, key.transpose(1, 2))
        position = self.smoothed(realign(values, index))
        return (content, position) if content.dtype == torch.float64 else (content.float(), position.float())

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, values: Tensor, positions: Tensor, H: int, W: int
    ) -> Tensor:
        """Attend from the queries at ``positions``, (B, Q, d)."""
        content, position = self._both_logits(query, key, values, positions, H, W)
        weights = (content + position).softmax(-1)
        return torch.matmul(weights.to(value.dtype), value)


class BilateralCrissCross2d(CrissCross, _Bilateral):
    """``x + gamma * attention`` along each position's row and column, with logits of content and of position.

    Source: Thesis, Eq. 3.9 to 3.12, on criss-cross attention (Huang et al. 2019). The position logits are predicted
    for the k rows and k columns around the query, the query itself once, and are v_i beyond. ``gamma`` starts at 0 by
    default, so inserting the layer does not change a trained network's output. Parameters are named as in mmcv's
    ``CrissCrossAttention``, whose checkpoints load except for ``position``.

    Args:
        in_channels: C.
        reduction: d = C / reduction, the width of queries, keys and the position predictor.
        kernel_size: k, odd, or two ints for rows and columns.
        outside: v: ``'learned'`` (one more predicted value), ``'zero'``, ``'-inf'``, ``'min'``, ``'mean'``.
        smoothing: σ_p: ``'zscore'`` standardises a query's position logits over its keys, ``'sqrt_d'`` divides them
            by √d.
        content_scale: Factor of the content logits; d^-1/2 if None. mmcv's content-only module uses 1.
        gate_init: Initial ``gamma``.

    Shapes:
        (B, C, H, W) -> (B, C, H, W)

    Raises:
        ValueError: An argument is out of range or inconsistent with the others.
    """

    def __init__(
        self,
        in_channels: int,
        reduction: int = 8,
        kernel_size: int | Sequence[int] = 31,
        outside: Outside = "learned",
        smoothing: Smoothing = "zscore",
        content_scale: float | None = None,
        *,
        gate_init: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_channels, reduction, kernel_size, outside, smoothing)
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        values = predicted_values(sum(self.kernel_size) - 1, outside)
        self.make_layers(in_channels, self.width, gate_init, **factory)
        self.position = PositionPredictor(in_channels, self.width, values, **factory)
        self.scale = self.width**-0.5 if content_scale is None else content_scale

    def position_logits(self, x: Tensor, query: Tensor) -> Tensor:
        """Lay out the predicted values of both arms over the rows and columns of the map, and smooth them."""
        # Values: row offsets including the centre, column offsets without the centre, and the value outside.
        values = with_outside(self.position(x).permute(0, 2, 3, 1), self.outside)
        H, W = values.shape[1:3]
        ky, kx = self.kernel_size
        rows = axis_index(torch.arange(H, device=values.device), H, ky)
        columns = axis_index(torch.arange(W, device=values.device), W, kx)
        # The centre column is the query itself, whose value is among the rows; later columns move up by one.
        centre = kx // 2
        other_column = ky + columns - (columns > centre).to(columns.dtype)
        columns = torch.where(columns < 0, -1, torch.where(columns == centre, ky // 2, other_column))
        index = torch.cat((rows.unsqueeze(1).expand(H, W, H), columns.unsqueeze(0).expand(H, W, W)), -1)
        last = values.shape[-1] - 1
        logits = values.gather(-1, torch.where(index < 0, last, index).expand(values.shape[0], -1, -1, -1))
        row = torch.arange(H, device=values.device)
        own = (row.unsqueeze(1) == row).unsqueeze(1).expand(H, W, H)
        counted = torch.cat((~own, own.new_ones(H, W, W)), -1)
        return self.smoothed(logits, counted).unsqueeze(1)
