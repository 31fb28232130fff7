"""Swin's attention in windows, of both versions.

Shapes: B batch, (H, W) the map, C channels, M heads, (Wh, Ww) a window, N = Wh * Ww.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...core.axes import unflatten
from ...terms.cosine_scale import cosine_operands
from ...terms.nonlocal_position import Outside, Smoothing
from ...terms.position_table import table_logits, tap_logits
from ..common.attention import attend
from ..common.checks import check_fits, check_heads, check_tensor, one_of, pair
from ..common.logits import Logits, MapLogits, SequenceLogits, WindowLogits
from ..common.tracing import one_node
from ..common.weights import map_weights, parts
from .parts.grid_terms import GridTerms
from .parts.windows import (
    Fill,
    Pair,
    Project,
    TableAttention,
    in_windows,
    masked,
    on_tokens,
    predicted_table,
    project_v2,
    window_maps,
    window_parts,
)

Position = Literal["table", "relative", "bilateral", "table+relative", "table+bilateral", "none"]
Version = Literal["v1", "v2"]
Window = Literal["partition", "centred"]
HIDDEN = 512  # hidden units of the network that predicts v2's table


def check_centred(window_size: Sequence[int]) -> None:
    """Check that both sides of the window are odd."""
    if any(n % 2 == 0 for n in window_size):
        raise ValueError(f"window_size must be odd for window='centred', got {tuple(window_size)}")


class WindowSelfAttention(GridTerms):
    """Self-attention inside the windows of a map, as in Swin Transformer (Liu et al. 2021) and V2 (Liu et al. 2022).

    ::

        v1  logit = q·k / √d + table[q - k]
        v2  logit = cos(q, k) * min(exp(logit_scale), 100) + 16 * sigmoid(cpb_mlp(log-spaced q - k))

        relative   gate * (q·R[k - q] + v·R[k - q])     ε2 and ε4 of Zhu et al. (2019), Eq. 2, by row and column
        bilateral  gate * δ / σ                         δ predicted for the k × k keys around the query, from its token
                                                        (Thesis, Eq. 3.11 and 3.12), and standardised over its keys

    The terms ``relative`` and ``bilateral`` replace the table or are added to it. ``gate`` (M) is initially 0, so the
    module initially equals Swin's attention, or without a table Swin's without positions. Stock weights load strictly
    into modules with a table.

    Parameters have timm's names and shapes: ``qkv``, ``proj``, and ``relative_position_bias_table``, or ``q_bias``,
    ``v_bias``, ``logit_scale`` and ``cpb_mlp``. A map that is not made of whole windows is rolled by the shift, then
    padded with zeros at the bottom and the right, as in timm: padding tokens are projected and attended to. Masks of
    shifted windows are -inf. timm's -100 gives the same result unless a masked logit exceeds the row's others by
    nearly 100.

    ``torch.compile(fullgraph=True, dynamic=True)`` supports symbolic sizes. It compiles separate graphs for maps with
    and without padding, and for axes of one and of more windows. Compiling the training of a shifted layer takes about
    8 s on one core.

    ``window='centred'`` has no partition: a query attends to the keys of a window around itself, and keys outside the
    map are masked instead of padded. The parameters are the same. Of the table's (2 Wh - 1) * (2 Ww - 1) offsets such
    windows use the inner Wh * Ww; the others have no effect and no gradient. With a stock layer's weights, the logit of
    a query and a key equals that of the stock layer, for v1 and v2, if both attend to the key. For the query in the
    middle of an unshifted window on the map, all keys are the same, and so is the output.

    Args:
        embed_dim: C.
        num_heads: M; must divide C.
        window_size: An int, or (Wh, Ww).
        shift_size: An int, or rows and columns, each less than the window's; Swin uses half a window in every other
            layer.
        version: ``'v1'`` or ``'v2'``.
        position: ``'table'`` (Swin's), ``'relative'``, ``'bilateral'``, ``'table+relative'``, ``'table+bilateral'`` or
            ``'none'``. Bilateral logits of a partition are held in memory, (N, N) per head and window.
        dropout: Dropout probability of the attention weights, which are then held in memory.
        bias: Whether queries, keys (v1 only) and values have biases.
        pretrained_window_size: The window that v2 scales offsets by; None for ``window_size``.
        window: ``'partition'`` (Swin's), or ``'centred'``, with an odd ``window_size`` and no shift.
        kernel_size: k, odd, of δ; None for the window's longer side, plus 1 if it is even.
        outside: δ of keys farther away: ``'learned'`` (one more predicted value), ``'zero'``, ``'min'``, ``'mean'``, or
            ``'-inf'``, which masks them regardless of the gate.
        smoothing: σ: ``'zscore'`` standardises a query's δ over its keys, ``'sqrt_d'`` divides them by √d.

    Raises:
        ValueError: An argument is out of range or inconsistent with the others.
    """

    map_axes = slice(1, 3)  # the input's H and W, for ``capture_attention``

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
        window: Window = "partition",
        kernel_size: int | None = None,
        outside: Outside = "learned",
        smoothing: Smoothing = "zscore",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_heads(embed_dim, num_heads, dropout)
        one_of(Version, version=version)
        one_of(Position, position=position)
        one_of(Window, window=window)
        terms = position.split("+")
        sides, shifts = pair("window_size", window_size), pair("shift_size", shift_size, 0)
        if "bilateral" not in terms and kernel_size is not None:
            raise ValueError(f"kernel_size must be None except for bilateral logits, got {kernel_size!r}")
        if "bilateral" in terms and kernel_size is None:
            kernel_size = max(sides) // 2 * 2 + 1
        bits = "1101" if "relative" in terms else "1000"
        super().__init__(embed_dim, num_heads, bits, -1, kernel_size, outside, smoothing)
        self.window_size, self.shift_size, self.window = sides, shifts, window
        if any(s >= n for s, n in zip(shifts, sides)):
            raise ValueError(f"shift_size must be less than window_size {sides}, got {shift_size!r}")
        if window == "centred":
            check_centred(sides)
            if any(shifts):
                raise ValueError(f"shift_size must be 0 for window='centred', got {shift_size!r}")
        if pretrained_window_size is not None and (version != "v2" or "table" not in terms):
            raise ValueError(
                f"pretrained_window_size must be None except for v2 with a table, got {pretrained_window_size!r}"
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
        if "table" in terms and version == "v1":
            Wh, Ww = self.window_size
            table = torch.empty((2 * Wh - 1) * (2 * Ww - 1), num_heads, **factory)
            self.relative_position_bias_table = nn.Parameter(table)
        elif "table" in terms:
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
        """Draw linear layers and the table with deviation 0.02, as Swin does; zero biases; call :meth:`reset_terms`."""
        for layer in (self.qkv, self.proj, *(self.cpb_mlp or ())):
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
        self.reset_positions()

    def reset_positions(self) -> None:
        """Draw the parameters that Swin's initialization of linear layers does not cover."""
        if self.relative_position_bias_table is not None:
            nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        if self.logit_scale is not None:
            nn.init.constant_(self.logit_scale, math.log(10))
        for bias in (self.q_bias, self.v_bias):
            if bias is not None:
                nn.init.zeros_(bias)
        self.reset_terms()

    @one_node
    def forward(self, x: Tensor) -> Tensor:
        """Attend from every token to the tokens of its window.

        Args:
            x: (B, H, W, C).

        Returns:
            (B, H, W, C).

        Raises:
            ValueError: A shape does not match.
            TypeError: ``x`` is not a Tensor, or does not have the module's dtype.
        """
        self._check(x)
        dropout = self._dropout()
        if self.window == "centred":
            return on_tokens(self.proj, attend(self._centred(x), dropout).permute(0, 2, 3, 1, 4).flatten(3))
        fill = self._fill(by_axes=dropout == 0)
        output = in_windows(x, *self._windows(), fill, lambda logits: attend(logits, dropout))
        return on_tokens(self.proj, output)

    def attention_maps(self, x: Tensor, queries: Tensor | None = None) -> Tensor:
        """Compute the attention weights for inspection, without dropout, in O(N²) memory without ``queries``.

        The weights of padding tokens are not part of the map, so a query's weights may sum to less than 1.

        Args:
            x: As in :meth:`forward`.
            queries: (Q, 2), rows and columns; None for all.

        Returns:
            (B, M, H, W, H, W), or (B, M, Q, H, W) with ``queries``; 0 outside a query's window.

        Raises:
            ValueError: A shape does not match, or ``queries`` are not positions on the map.
            TypeError: As in :meth:`forward`.
        """
        self._check(x)
        if self.window == "centred":
            return map_weights(self._centred(x), x.shape[1:3], queries)
        return window_maps(x, *self._windows(), self._fill(by_axes=False), queries)

    def attention_parts(self, x: Tensor, queries: Tensor | None = None) -> dict[str, Tensor]:
        """Compute the softmax of each term's own logits; arguments as in :meth:`attention_maps`.

        Returns:
            Weights by name: ``content``; ``content_position`` and ``position`` (ε2, ε4), ``table`` and ``predicted``,
            or in centred windows ``positions``, all of these together. Empty for a layer with one term.
        """
        self._check(x)
        if self.window == "centred":
            found = parts(self._centred(x))
            if len(found) < 2:
                return {}
            return {
                "positions" if name == "position" else name: map_weights(part, x.shape[1:3], queries)
                for name, part in found.items()
            }
        if self.position_kind == "none":
            return {}
        table = self.position_logits()

        def parts_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, tokens: Tensor) -> dict[str, Logits]:
            q, k = self._operands(q, k)
            terms = self.relative_terms(unflatten(q, 2, self.window_size), self.window_size)
            if table is not None:
                terms["table"] = table.unsqueeze(0)
            predicted = self.predicted_logits(tokens, self.window_size, None, None if mask is None else mask == 0)
            if predicted is not None:
                terms["predicted"] = predicted
            positions = {name: masked(logits, mask, q) for name, logits in terms.items()}
            alone = {name: SequenceLogits(None, None, v, position_logits=logits) for name, logits in positions.items()}
            return {"content": SequenceLogits(q, k, v, position_logits=masked(None, mask, q)), **alone}

        return window_parts(x, *self._windows(), parts_of, queries)

    def attention_size(self, size: Sequence[int]) -> tuple[int, int]:
        """Return the size of the map of queries for an input of ``size`` (H, W)."""
        return size[0], size[1]

    def position_logits(self) -> Tensor | None:
        """Return the table's logits for all pairs of a window's tokens, (M, N, N); None without a table."""
        table = self._offset_table()
        return None if table is None else table_logits(table, self.window_size)

    def _dropout(self) -> nn.Module | float:
        """Return the dropout of the weights now; see :func:`.attend`."""
        return self.dropout if self.training else 0.0

    def _check(self, x: Tensor) -> None:
        check_tensor("x", x)
        if x.dim() != 4 or x.shape[3] != self.embed_dim or 0 in x.shape[1:3]:
            raise ValueError(
                f"x must have shape (B, H, W, {self.embed_dim}) with at least one token, got {tuple(x.shape)}"
            )
        check_fits("x", x, self.qkv)

    def _windows(self) -> tuple[Pair, Pair, int, Project]:
        return self.window_size, self.shift_size, self.num_heads, self._project

    def _project(self, tokens: Tensor) -> Tensor:
        return self.qkv(tokens) if self.version == "v1" else project_v2(tokens, self.qkv, self.q_bias, self.v_bias)

    def _operands(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys whose product is the content term."""
        return (q * self.scale, k) if self.logit_scale is None else cosine_operands(q, k, self.logit_scale)

    def _offset_table(self) -> Tensor | None:
        if self.cpb_mlp is not None:
            assert self.logit_scale is not None
            return predicted_table(self.cpb_mlp, self.window_size, self.pretrained_window_size, self.logit_scale)
        return self.relative_position_bias_table

    def _fill(self, by_axes: bool) -> Fill:
        """Return what attention in a partition's windows adds up; ε2 + ε4 alone by rows and columns if ``by_axes``."""
        table = self.position_logits()
        if self.gate is None:
            scale = self.scale if self.logit_scale is None else 1.0
            return TableAttention(table, scale, self.logit_scale)
        by_axes = by_axes and table is None and self.predictor is None
        h, w = window = self.window_size

        def fill(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, tokens: Tensor) -> Logits:
            q, k = self._operands(q, k)
            if not by_axes:
                logits = self.sequence_logits(tokens, q, window, None, None if mask is None else mask == 0)
                if table is not None:
                    logits = table.unsqueeze(0) if logits is None else table + logits
                return SequenceLogits(q, k, v, position_logits=masked(logits, mask, q))
            q, k, v = (unflatten(tokens, 2, window) for tokens in (q, k, v))
            rows, columns = self.axis_logits(q, window)
            if mask is not None and rows is not None and columns is not None:
                mask = mask.to(q.dtype).view(h, w, h, w)  # a sum of row and column masks
                rows, columns = rows + mask[:, 0, :, 0].unsqueeze(1), columns + mask[0, :, 0, :]
            return MapLogits(q, k, v, rows, columns)

        return fill

    def _centred(self, x: Tensor) -> WindowLogits:
        """Return what attention in centred windows adds up."""
        H, W = x.shape[1:3]
        q, k, v = unflatten(on_tokens(self._project, x), 3, (3, self.num_heads, -1)).permute(3, 0, 4, 1, 2, 5).unbind(0)
        q, k = self._operands(q, k)
        radius = self.radius if self.radius is not None else max(self.window_size)
        reach = min(self.window_size[0] // 2, radius), min(self.window_size[1] // 2, radius)
        logits, kernel_size = self.window_logits(x.flatten(1, 2), q, (H, W), None, reach)
        table = self._offset_table()
        if table is not None:
            of_table = tap_logits(table, self.window_size, kernel_size)[None, :, None, None].expand(-1, -1, H, W, -1)
            logits = of_table if logits is None else logits + of_table
        return WindowLogits(q, k, v, logits, kernel_size)

    def extra_repr(self) -> str:
        text = f"{self.embed_dim}, {self.num_heads}, window_size={self.window_size}, shift_size={self.shift_size}"
        text += f", version={self.version!r}, position={self.position_kind!r}, window={self.window!r}"
        if self.kernel_size is not None:
            text += f", kernel_size={self.kernel_size}, outside={self.outside!r}, smoothing={self.smoothing!r}"
        return text
