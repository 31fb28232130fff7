"""Swin's attention in windows, of both versions.

Shapes: B batch, (H, W) the map, C channels, M heads, (Wh, Ww) a window, N = Wh * Ww.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..ops import global_attention
from ..terms.position_table import table_logits
from ..terms.window import WindowGroup
from .checks import check_fits, check_heads, check_tensor, one_of, pair
from .grid_terms import GridTerms
from .windows import Attend, attend_pairs, in_windows, predicted_logits, project_v2, with_cosines, with_position_logits

Position = Literal["table", "relative", "none"]
Version = Literal["v1", "v2"]
HIDDEN = 512  # units of the net that predicts v2's table


class WindowSelfAttention(GridTerms):
    """Self-attention inside the windows of a map, as in Swin Transformer (Liu et al. 2021) and V2 (Liu et al. 2022).

    ::

        v1  logit = q·k / √d + table[q - k]
        v2  logit = cos(q, k) * min(exp(logit_scale), 100) + 16 * sigmoid(cpb_mlp(log-spaced q - k))

    Parameters have timm's names and shapes: ``qkv``, ``proj``, and ``relative_position_bias_table``, or ``q_bias``,
    ``v_bias``, ``logit_scale`` and ``cpb_mlp``. A map that is not made of whole windows is rolled by the shift, then
    padded with zeros below and at the right, as timm does: padding tokens are projected and attended to. Masks of
    shifted windows are -inf. timm's -100 gives the same numbers unless a masked logit exceeds the row's others by
    nearly as much.

    Args:
        embed_dim: C.
        num_heads: M; must divide C.
        window_size: An int, or (Wh, Ww).
        shift_size: An int, or rows and columns, each less than the window's; half a window in every other layer.
        version: ``'v1'`` or ``'v2'``.
        position: ``'table'``, Swin's; ``'relative'``, q·R[k - q] + v·R[k - q] (ε2 and ε4 of Zhu et al. 2019, Eq. 2) by
            row and column, behind a ``gate`` of zeros; or ``'none'``.
        dropout: Share of the attention weights that is dropped in training, where they are written out then.
        bias: Whether queries, keys (v1 alone) and values have biases.
        pretrained_window_size: v2: the window that offsets are scaled by; None for ``window_size``.

    Raises:
        ValueError: an argument is out of its range, or does not fit the others.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        window_size: int | Sequence[int] = 7,
        shift_size: int | Sequence[int] = 0,
        version: Version = "v1",
        position: Position = "table",
        dropout: float = 0.0,
        bias: bool = True,
        pretrained_window_size: int | Sequence[int] | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_heads(embed_dim, num_heads, dropout)
        one_of(Version, version=version)
        one_of(Position, position=position)
        super().__init__(embed_dim, num_heads, "1101" if position == "relative" else "1000", -1, None, "zero", "sqrt_d")
        self.window_size = pair("window_size", window_size)
        self.shift_size = pair("shift_size", shift_size, 0)
        if any(s >= n for s, n in zip(self.shift_size, self.window_size)):
            raise ValueError(f"shift_size must be less than window_size {self.window_size}, got {shift_size!r}")
        if pretrained_window_size is not None and (version, position) != ("v2", "table"):
            raise ValueError(
                "pretrained_window_size must be None but for version='v2' with position='table', "
                f"got {pretrained_window_size!r}"
            )
        self.pretrained_window_size = (
            None if pretrained_window_size is None else pair("pretrained_window_size", pretrained_window_size)
        )
        self.version, self.position_kind, self.dropout = version, position, dropout
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.relative_position_bias_table: nn.Parameter | None = None
        self.cpb_mlp: nn.Sequential | None = None
        self.logit_scale: nn.Parameter | None = None
        self.q_bias: nn.Parameter | None = None
        self.v_bias: nn.Parameter | None = None
        if version == "v2":
            self.logit_scale = nn.Parameter(torch.empty(num_heads, 1, 1, **factory))
            if bias:
                self.q_bias, self.v_bias = (nn.Parameter(torch.empty(embed_dim, **factory)) for _ in range(2))
        if position == "table" and version == "v1":
            Wh, Ww = self.window_size
            table = torch.empty((2 * Wh - 1) * (2 * Ww - 1), num_heads, **factory)
            self.relative_position_bias_table = nn.Parameter(table)
        elif position == "table":
            self.cpb_mlp = nn.Sequential(
                nn.Linear(2, HIDDEN, **factory),
                nn.ReLU(inplace=True),
                nn.Linear(HIDDEN, num_heads, bias=False, **factory),
            )
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=bias and version == "v1", **factory)
        self.proj = nn.Linear(embed_dim, embed_dim, **factory)
        self.make_terms(**factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw linear layers and the table as Swin does, σ = 0.02, biases 0; ε2 and ε4 as :meth:`reset_terms` says."""
        for layer in (self.qkv, self.proj, *(self.cpb_mlp or ())):
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
        self.reset_positions()

    def reset_positions(self) -> None:
        """Draw what is no linear layer's."""
        if self.relative_position_bias_table is not None:
            nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        if self.logit_scale is not None:
            nn.init.constant_(self.logit_scale, math.log(10))
        for bias in (self.q_bias, self.v_bias):
            if bias is not None:
                nn.init.zeros_(bias)
        self.reset_terms()

    def forward(self, x: Tensor) -> Tensor:
        """Attend from every token to those of its window.

        Args:
            x: (B, H, W, C).

        Returns:
            (B, H, W, C).

        Raises:
            ValueError: a shape does not fit.
            TypeError: ``x`` is no Tensor, or not of the module's dtype.
        """
        check_tensor("x", x)
        if x.dim() != 4 or x.shape[3] != self.embed_dim or 0 in x.shape[1:3]:
            raise ValueError(
                f"x must have shape (B, H, W, {self.embed_dim}) with at least one token, got {tuple(x.shape)}"
            )
        check_fits("x", x, self.qkv.weight)
        return self.proj(
            in_windows(x, self.window_size, self.shift_size, self.num_heads, self._project, self._attention())
        )

    def position_logits(self) -> Tensor | None:
        """The logits of the table for all pairs of a window's tokens, (M, N, N); None without a table."""
        if self.relative_position_bias_table is not None:
            return table_logits(self.relative_position_bias_table, self.window_size)
        if self.cpb_mlp is not None:
            return predicted_logits(self.cpb_mlp, self.window_size, self.pretrained_window_size)
        return None

    def _project(self, tokens: Tensor) -> Tensor:
        return self.qkv(tokens) if self.version == "v1" else project_v2(tokens, self.qkv, self.q_bias, self.v_bias)

    def _attention(self) -> Attend:
        dropout = self.dropout if self.training else 0.0
        scale = self.scale if self.logit_scale is None else 1.0
        attend: Attend
        if self.position_kind == "relative":
            attend = self._attend_by_axes if self.logit_scale is not None else self._scaled
        else:
            attend = with_position_logits(self.position_logits(), scale, dropout)
        return attend if self.logit_scale is None else with_cosines(attend, self.logit_scale)

    def _scaled(self, q: Tensor, k: Tensor, v: Tensor, group: WindowGroup) -> Tensor:
        return self._attend_by_axes(q * self.scale, k, v, group)

    def _attend_by_axes(self, q: Tensor, k: Tensor, v: Tensor, group: WindowGroup) -> Tensor:
        """Attention with ε2 + ε4 of rows and of columns, of queries that are scaled."""
        h, w = window = self.window_size
        if self.training and self.dropout:
            pairs = self.axis_pairs(q.unflatten(2, window), window)
            pairs = pairs if group.logits is None else pairs + group.logits.to(pairs.dtype)
            return attend_pairs(q, k, v, pairs, dropout=self.dropout)
        q, k, v = (tokens.unflatten(2, window) for tokens in (q, k, v))
        rows, columns = self.axis_logits(q, window)
        if group.logits is not None and rows is not None and columns is not None:
            mask = group.logits.to(q.dtype).view(h, w, h, w)  # a sum of rows' and columns'
            rows, columns = rows + mask[:, 0, :, 0].unsqueeze(1), columns + mask[0, :, 0, :]
        return global_attention(q, k, v, row_logits=rows, column_logits=columns).flatten(2, 3)

    def extra_repr(self) -> str:
        text = f"{self.embed_dim}, {self.num_heads}, window_size={self.window_size}, shift_size={self.shift_size}"
        return f"{text}, version={self.version!r}, position={self.position_kind!r}"
