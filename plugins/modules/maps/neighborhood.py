"""Neighborhood attention: every query attends to a window that stays inside the map (Hassani et al. 2023).

Shapes: B batch, C channels, M heads, (H, W) the map, T positions of a sequence, (K, L) the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...terms.neighborhood import neighborhood_logits
from ..common.attention import MapAttention, attend
from ..common.checks import check_fits, check_map, check_tensor, one_of, pair, positive
from ..common.logits import WindowLogits
from ..common.tracing import one_node
from ..common.weights import map_logits, map_weights, parts
from .criss_cross import Gamma
from .parts.memory_format import map_heads, to_channels_last

Position = Literal["none", "relative"]


def neighborhood(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor | None, kernel: Sequence[int], dilation: Sequence[int],
    scale: float,
) -> WindowLogits:  # fmt: skip
    """Return what neighborhood attention adds up, on maps (B, M, H, W, ·).

    Along an axis that is shorter than the window, the window has as many taps as fit.

    Args:
        table: (M, 2K - 1, 2L - 1), biases by relative position; None without.
        kernel: (K, L).
    """
    size = value.shape[2:4]
    steps = [min(step, n) for step, n in zip(dilation, size)]
    fitting = [min(taps, n // step) for taps, n, step in zip(kernel, size, steps)]
    position = None if table is None else neighborhood_logits(table, size, fitting, steps)
    return WindowLogits(query, key, value, position, fitting, steps, scale, border="inside")


class _NeighborhoodAttention(MapAttention):
    """Base of the layers with one and with two axes."""

    def make(
        self, conv: Any, in_channels: int, num_heads: int, kernel: Sequence[int], dilation: Sequence[int],
        position: str, gate_init: float, factory: dict[str, Any],
    ) -> None:  # fmt: skip
        """Check the arguments and create the layers."""
        positive(in_channels=in_channels, num_heads=num_heads)
        one_of(Position, position=position)
        if in_channels % num_heads:
            raise ValueError(f"num_heads must divide in_channels = {in_channels}, got {num_heads}")
        self.in_channels, self.num_heads, self.position = in_channels, num_heads, position
        self.kernel_size, self.dilation = tuple(kernel), tuple(dilation)
        self.scale = (in_channels // num_heads) ** -0.5
        self.qkv = conv(in_channels, 3 * in_channels, 1, **factory)
        self.proj = conv(in_channels, in_channels, 1, **factory)
        self.gamma = Gamma(gate_init, **factory)
        self.rpb: nn.Parameter | None = None
        if position == "relative":
            self.rpb = nn.Parameter(torch.empty(num_heads, *(2 * taps - 1 for taps in kernel), **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table with deviation 0.02, as NATTEN does."""
        if self.rpb is not None:
            nn.init.trunc_normal_(self.rpb, std=0.02)

    def _of(self, projected: Tensor) -> WindowLogits:
        """Split projections (B, 3 * C, H, W), queries first and heads next."""
        query, key, value = map_heads(projected, 3 * self.num_heads).chunk(3, 1)
        table = self.rpb if self.rpb is None or self.rpb.dim() == 3 else self.rpb.unsqueeze(1)
        kernel, dilation = ((1,) * (2 - len(n)) + n for n in (self.kernel_size, self.dilation))
        return neighborhood(query, key, value, table, kernel, dilation, self.scale)

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, num_heads={self.num_heads}, kernel_size={self.kernel_size}"
        return f"{text}, dilation={self.dilation}, position={self.position!r}"


class NeighborhoodAttention2d(_NeighborhoodAttention):
    """``x + gamma * attention`` of every position to the window of K × L positions nearest to it.

    Source: Hassani et al. (2023), Eq. 1 and 2, and with ``dilation`` Hassani and Shi (2022). Near the border the window
    moves inward, so that every query has all K · L keys. The logit of key j for query i is q_i·k_j / √d + b[j - i] with
    a learned table b of biases by relative position, in dilations, (2K - 1) × (2L - 1) a head. ``gamma`` starts at 0 by
    default, so inserting the layer does not change a trained network's output. ``qkv``, ``rpb`` and ``proj`` are those
    of NATTEN's modules, whose linear weights load as 1 × 1 convolutions.

    Args:
        in_channels: C.
        num_heads: M; must divide C, and d = C / M.
        kernel_size: (K, L). A map that is smaller along an axis has a window of as many positions as fit.
        dilation: Distance of neighboring positions of a window.
        position: ``'relative'``, or ``'none'`` for content alone.
        gate_init: Initial ``gamma``.

    Shapes:
        (B, C, H, W) -> (B, C, H, W)

    Raises:
        ValueError: An argument is out of range or inconsistent with the others.
    """

    def __init__(
        self,
        in_channels: int,
        num_heads: int = 8,
        kernel_size: int | Sequence[int] = 7,
        dilation: int | Sequence[int] = 1,
        position: Position = "relative",
        *,
        gate_init: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        window = pair("kernel_size", kernel_size), pair("dilation", dilation)
        self.make(nn.Conv2d, in_channels, num_heads, *window, position, gate_init, dict(device=device, dtype=dtype))

    @one_node
    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (B, C, H, W) -> (B, C, H, W).

        Raises:
            ValueError: The shape does not match.
        """
        attended = attend(self._logits(x)).permute(0, 1, 4, 2, 3).flatten(1, 2)
        return self.gamma(x, self.proj(attended))

    def _logits(self, x: Tensor) -> WindowLogits:
        check_map(x, self.in_channels, self.qkv)
        return self._of(self.qkv(to_channels_last(x)))


class NeighborhoodAttention1d(_NeighborhoodAttention):
    """:class:`NeighborhoodAttention2d` on sequences: every position attends to the K positions nearest to it.

    Args:
        in_channels: C.
        num_heads: M; must divide C.
        kernel_size: K. A shorter sequence has a window of as many positions as fit.
        dilation: Distance of neighboring positions of a window.
        position: ``'relative'``, with a table of 2K - 1 biases a head, or ``'none'``.
        gate_init: Initial ``gamma``.

    Shapes:
        (B, C, T) -> (B, C, T)

    Raises:
        ValueError: An argument is out of range or inconsistent with the others.
    """

    def __init__(
        self,
        in_channels: int,
        num_heads: int = 8,
        kernel_size: int = 7,
        dilation: int = 1,
        position: Position = "relative",
        *,
        gate_init: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        positive(kernel_size=kernel_size, dilation=dilation)
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.make(nn.Conv1d, in_channels, num_heads, (kernel_size,), (dilation,), position, gate_init, factory)

    @one_node
    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (B, C, T) -> (B, C, T).

        Raises:
            ValueError: The shape does not match.
        """
        attended = self.proj(attend(self._logits(x)).squeeze(2).transpose(2, 3).flatten(1, 2))
        return self.gamma(x.unsqueeze(2), attended.unsqueeze(2)).squeeze(2)

    def attention_maps(self, x: Tensor, queries: Tensor | None = None) -> Tensor:
        """Compute the attention weights for inspection, in O(T²) memory.

        Args:
            x: As in :meth:`forward`.
            queries: (Q,), positions; None for all.

        Returns:
            (B, M, T, T), or (B, M, Q, T) with ``queries``; 0 outside a query's window.

        Raises:
            ValueError: As in :meth:`forward`, or a query lies outside the sequence.
        """
        return self._written(map_weights, self._logits(x), queries)

    def attention_logits(self, x: Tensor, queries: Tensor | None = None) -> dict[str, Tensor]:
        """Compute the logits of ``content`` and of ``position``, -inf outside a window; see :meth:`attention_maps`."""
        return {name: self._written(map_logits, part, queries) for name, part in parts(self._logits(x)).items()}

    @staticmethod
    def _written(write: Any, logits: WindowLogits, queries: Tensor | None) -> Tensor:
        places = None if queries is None else torch.stack((torch.zeros_like(queries), queries), -1)
        written = write(logits, (1, logits.value.shape[3]), places).squeeze(-2)
        return written.squeeze(2) if queries is None else written

    def _logits(self, x: Tensor) -> WindowLogits:
        check_tensor("x", x)
        if x.dim() != 3 or x.shape[1] != self.in_channels or x.shape[2] == 0:
            raise ValueError(
                f"x must have shape (B, {self.in_channels}, T) with at least one position, got {tuple(x.shape)}"
            )
        check_fits("x", x, self.qkv)
        return self._of(self.qkv(x).unsqueeze(2))
