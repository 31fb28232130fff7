"""Generalized attention on maps: any of the four terms of Transformer attention (Zhu et al. 2019).

Shapes: B batch, C channels, M heads, d width per head, (Hq, Wq) queries, (Hk, Wk) keys, D offsets of one axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops import global_attention, window_attention
from ..ops.everywhere.global_attention import scripted_global_attention
from ..ops.window.window_attention import scripted_window_attention
from ..terms.relative_position import axis_offsets, relative_logits, spread
from ..terms.saliency import add_vector, key_saliency
from ..terms.sine_position import sine_encoding
from ..terms.window import axis_window, window_position_logits
from .capture import maps_of
from .checks import check_map, positive
from .memory_format import in_format_of, to_channels_last


def parse_attention_type(attention_type: str) -> tuple[bool, bool, bool, bool]:
    """Which of ε1 ... ε4 are on: ``'0110'`` is (False, True, True, False)."""
    if not isinstance(attention_type, str) or len(attention_type) != 4 or set(attention_type) - {"0", "1"}:
        raise ValueError(f"attention_type must be a string of four bits such as '1111', got {attention_type!r}")
    e1, e2, e3, e4 = (bit == "1" for bit in attention_type)
    return e1, e2, e3, e4


class GeneralizedAttention2d(nn.Module):
    """Multi-head attention on a map as ``x + gamma * f(x)``, with any of the four terms as logits.

    Source: Zhu et al. (2019), Eq. 1, 2 and 8. The logit of key k for query q is the sum of the chosen terms:

        1000  ε1 = q·k            query content and key content
        0100  ε2 = q·R[k - q]     query content and relative position
        0010  ε3 = u·k            key content alone; needs no more than one query, computed once
        0001  ε4 = v·R[k - q]     relative position alone

    With ``'0000'`` the output is the mean of the values. gamma starts at 0, so a new module is the identity.

    Args:
        in_channels: C, of the map and of ``context``.
        num_heads: M; must divide C.
        attention_type: Four bits, ε1 to ε4.
        spatial_range: n_k, odd: keys are limited to |Δ| <= (n_k - 1) / 2 pixels on both axes, exactly; -1: all
            keys. A query without any key in range (possible where ``kv_stride`` > 1) gets only the bias of
            the output projection.
        q_stride: Only every q_stride-th pixel is a query; the result is brought back by bilinear interpolation
            between exactly those pixels (beyond the last of them it is repeated).
        kv_stride: Only every kv_stride-th pixel is a key, at pixel j * kv_stride.
        position_embedding_dim: Width of the sine encoding of each axis, even; -1: C.
        position_magnitude: Factor of the offsets before they are encoded.
        scale: Factor of the sum of all terms, such as d ** -0.5; the paper uses 1.

    Raises:
        ValueError: an argument is out of its range.
    """

    _abbr_ = "gen_attention_block"  # under which mmengine and mmcv file the plug-in in checkpoints

    wavelength = 10000.0
    offset_sign = 1  # R encodes k - q
    position_factor = 1.0  # of the projected R
    windowed = True  # a range is a window centred on the query

    def __init__(
        self,
        in_channels: int,
        num_heads: int = 8,
        attention_type: str = "1111",
        spatial_range: int = -1,
        q_stride: int = 1,
        kv_stride: int = 1,
        position_embedding_dim: int = -1,
        position_magnitude: float = 1,
        *,
        scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        positive(num_heads=num_heads, q_stride=q_stride, kv_stride=kv_stride)
        if not isinstance(in_channels, int) or in_channels < num_heads:
            raise ValueError(f"in_channels must be an int of at least num_heads = {num_heads}, got {in_channels!r}")
        self.attention_type = attention_type
        # On the instance, where TorchScript finds them.
        self.wavelength, self.offset_sign = type(self).wavelength, type(self).offset_sign
        self.position_factor = type(self).position_factor
        self.terms = e1, e2, e3, e4 = parse_attention_type(attention_type)
        self.in_channels, self.num_heads = in_channels, num_heads
        self.spatial_range, self.q_stride, self.kv_stride = spatial_range, q_stride, kv_stride
        self.position_embedding_dim = position_embedding_dim if position_embedding_dim > 0 else in_channels
        self.position_magnitude, self.scale = position_magnitude, scale
        self.check_variant()
        self.in_windows = self.windowed and spatial_range != -1 and q_stride == kv_stride == 1
        width = in_channels // num_heads * num_heads
        factory: dict[str, Any] = dict(device=device, dtype=dtype)

        def projection() -> nn.Conv2d:
            return nn.Conv2d(in_channels, width, 1, bias=False, **factory)

        def table() -> nn.Linear:
            return nn.Linear(self.axis_width(), width, bias=False, **factory)

        # What a term does not need is None: TorchScript wants every name to exist.
        self.query_conv = projection() if e1 or e2 else None
        self.key_conv = projection() if e1 or e3 else None
        self.value_conv = projection()
        self.appr_geom_fc_x = table() if e2 or e4 else None
        self.appr_geom_fc_y = table() if e2 or e4 else None
        self.appr_bias = nn.Parameter(torch.empty(width, **factory)) if e3 else None  # u
        self.geom_bias = nn.Parameter(torch.empty(width, **factory)) if e4 else None  # v
        self.proj_conv = nn.Conv2d(width, in_channels, 1, **factory)
        self.gamma = nn.Parameter(torch.empty(1, **factory))
        self.init_weights()

    @staticmethod
    def mmcv_compatible(
        in_channels: int,
        spatial_range: int = -1,
        num_heads: int = 9,
        position_embedding_dim: int = -1,
        position_magnitude: float = 1,
        kv_stride: int = 2,
        q_stride: int = 1,
        attention_type: str = "1111",
    ) -> GeneralizedAttention2d:
        """The variant of mmcv's ``GeneralizedAttention``; see ``MMCVGeneralizedAttention2d``."""
        from .generalized_attention_mmcv import MMCVGeneralizedAttention2d  # which is made from this class

        return MMCVGeneralizedAttention2d(
            in_channels=in_channels,
            num_heads=num_heads,
            attention_type=attention_type,
            spatial_range=spatial_range,
            q_stride=q_stride,
            kv_stride=kv_stride,
            position_embedding_dim=position_embedding_dim,
            position_magnitude=position_magnitude,
        )

    # --- where the paper's and mmcv's variant differ --------------------------------------------------------------

    def check_variant(self) -> None:
        """Raise ValueError where the arguments do not fit this variant."""
        if self.in_channels % self.num_heads:
            raise ValueError(f"num_heads must divide in_channels = {self.in_channels}, got {self.num_heads}")
        n_k = self.spatial_range
        if not isinstance(n_k, int) or (n_k != -1 and (n_k < 1 or n_k % 2 == 0)):
            raise ValueError(f"spatial_range must be -1 (all keys) or a positive odd int (n_k), got {n_k!r}")
        if (self.terms[1] or self.terms[3]) and self.position_embedding_dim % 2:
            raise ValueError(
                f"position_embedding_dim must be even (sines and cosines), got {self.position_embedding_dim}"
            )

    def axis_width(self) -> int:
        """Width of one axis' position encoding."""
        return self.position_embedding_dim

    def axis_range(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """0 where a key is in range of the query on one axis, else -inf: (queries, keys)."""
        return axis_window(queries, keys, (self.spatial_range - 1) // 2, self.q_stride, self.kv_stride, device)

    def upsample(self, output: Tensor, size: list[int]) -> Tensor:
        """Bring the queries' outputs, at every ``q_stride``-th pixel, to all pixels."""
        covered = [(n - 1) * self.q_stride + 1 for n in output.shape[2:]]
        output = F.interpolate(output, covered, mode="bilinear", align_corners=True)
        return F.pad(output, (0, size[1] - covered[1], 0, size[0] - covered[0]), mode="replicate")

    # --------------------------------------------------------------------------------------------------------------

    def init_weights(self) -> None:
        """Projections uniform by fan-in, u and v uniform, gamma and the output bias 0."""
        for module in self.children():
            assert isinstance(module, (nn.Conv2d, nn.Linear))
            nn.init.kaiming_uniform_(module.weight, a=1)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        bound = 1 / math.sqrt(2 * (self.in_channels // self.num_heads))
        for vector in (self.appr_bias, self.geom_bias):
            if vector is not None:
                nn.init.uniform_(vector, -bound, bound)
        nn.init.zeros_(self.gamma)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Attend from the pixels of ``x`` to those of ``context``.

        Args:
            x: (B, C, H, W), of any size and memory format.
            context: (B, C, H', W'), another map in the same coordinates (cross-attention); None: ``x``.

        Returns:
            (B, C, H, W).

        Raises:
            ValueError: a shape or a device does not fit.
            TypeError: a map is not of the module's floating dtype.
        """
        if self.in_windows and context is None:
            output = self._attend_in_windows(x)
        else:
            output = self._attend(x, context)
        output = self.proj_conv(output.permute(0, 1, 4, 2, 3).flatten(1, 2))
        if self.q_stride > 1 and output.shape[2] * output.shape[3] > 1:
            output = self.upsample(output, [x.shape[2], x.shape[3]])
        output = in_format_of(x, output)
        return torch.addcmul(x, self.gamma, output) if output.dtype == x.dtype else x + self.gamma * output

    def attention_size(self, size: Sequence[int]) -> tuple[int, int]:
        """The map of queries, for an input of ``size`` (H, W)."""
        H, W = (-(-n // self.q_stride) for n in size)
        return H, W

    @torch.jit.unused
    def attention_maps(self, x: Tensor, context: Tensor | None = None, queries: Tensor | None = None) -> Tensor:
        """The attention weights for the maps that ``forward`` takes: for inspection, O(N²) without ``queries``.

        Args:
            x: As ``forward``.
            context: As ``forward``.
            queries: (Q, 2), rows and columns on the map of queries; None for all.

        Returns:
            (B, M, Hq, Wq, Hk, Wk), or (B, M, Q, Hk, Wk) of ``queries``.

        Raises:
            ValueError: as ``forward``; or a query lies outside the map.
        """
        return maps_of(self._terms(x, context), 1.0, self.attention_size(x.shape[2:]), queries)

    def _attend(self, x: Tensor, context: Tensor | None) -> Tensor:
        """(B, M, Hq, Wq, d), all keys being looked at."""
        query, key, value, row, column, key_logits = self._terms(x, context)
        if torch.jit.is_scripting():
            return scripted_global_attention(query, key, value, row, column, key_logits, 1.0)
        else:
            return global_attention(query, key, value, row_logits=row, column_logits=column, key_logits=key_logits)

    def _attend_in_windows(self, x: Tensor) -> Tensor:
        """The same where the range is a window around the query: only its keys are looked at."""
        position_query, query, key, value, key_logits = self._projected(x, None)
        # A window wider than the map has no key beyond it.
        H, W = x.shape[2], x.shape[3]
        radius = [min(self.spatial_range // 2, H - 1), min(self.spatial_range // 2, W - 1)]
        if key_logits is not None:  # a key's own logit is the product with a query of 1
            query, key = torch.ones_like(key_logits).unsqueeze(-1), key_logits.unsqueeze(-1)
        position: Tensor | None = None
        if self.appr_geom_fc_y is not None and self.appr_geom_fc_x is not None:
            position = window_position_logits(
                self._along_window(self.appr_geom_fc_y.weight, position_query, radius[0]),
                self._along_window(self.appr_geom_fc_x.weight, position_query, radius[1]),
                H,
                W,
            )
        elif query is None:
            taps = (2 * radius[0] + 1) * (2 * radius[1] + 1)
            position = value.new_zeros(1).expand(1, self.num_heads, H, W, taps)
        kernel = [2 * radius[0] + 1, 2 * radius[1] + 1]
        if torch.jit.is_scripting():
            return scripted_window_attention(query, key, value, position, kernel, [1, 1], radius, [1, 1], False, 1.0)
        else:
            return window_attention(query, key, value, position, kernel)

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

    def _terms(
        self, x: Tensor, context: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """The arguments of ``global_attention``: query, key, value, row, column and key logits."""
        position_query, query, key, value, key_logits = self._projected(x, context)
        Hq, Wq = -(-x.shape[2] // self.q_stride), -(-x.shape[3] // self.q_stride)
        Hk, Wk = value.shape[2], value.shape[3]
        row, column = self._range_logits([Hq, Wq], [Hk, Wk], x)
        if self.appr_geom_fc_y is not None and self.appr_geom_fc_x is not None:
            geometry = self.appr_geom_fc_y.weight, self.appr_geom_fc_x.weight
            row = _sum(self._axis_logits(geometry[0], position_query, Hq, Hk, "row"), row)
            column = _sum(self._axis_logits(geometry[1], position_query, Wq, Wk, "column"), column)
        return query, key, value, row, column, key_logits

    def _projected(
        self, x: Tensor, context: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor, Tensor | None]:
        """The position terms' query; query and key of the content term, with u; value; key logits."""
        if not torch.jit.is_scripting():
            check_map(x, self.in_channels, self.value_conv.weight)
            if context is not None:
                check_map(context, self.in_channels, self.value_conv.weight, "context")
                if context.shape[0] != x.shape[0]:
                    raise ValueError(f"context must have x's batch size {x.shape[0]}, got {context.shape[0]}")
        # Channels-last, every projection is one plain GEMM and its heads are views with a contiguous width.
        queries = to_channels_last(x)
        keys = queries if context is None else to_channels_last(context)
        queries, keys = _every(queries, self.q_stride), _every(keys, self.kv_stride)
        value = self._heads(self.value_conv(keys))
        query: Tensor | None = None
        key: Tensor | None = None
        if self.query_conv is not None:
            query = self._scaled(self._heads(self.query_conv(queries)))
        if self.key_conv is not None:
            key = self._heads(self.key_conv(keys))
        content = query if self.terms[0] else None
        key_logits: Tensor | None = None
        if self.appr_bias is not None and key is not None:
            u = self._scaled(self._vector(self.appr_bias))
            if content is not None:
                content = add_vector(content, u)
            else:
                key_logits = key_saliency(key, u)
        position_query = query if self.terms[1] else None
        return position_query, content, key if self.terms[0] else None, value, key_logits

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

    def _heads(self, projected: Tensor) -> Tensor:
        """(B, M * d, H, W) as (B, M, H, W, d), a view."""
        return projected.unflatten(1, (self.num_heads, -1)).permute(0, 1, 3, 4, 2)

    def _vector(self, parameter: Tensor) -> Tensor:
        return parameter.view(self.num_heads, -1)

    def _scaled(self, tensor: Tensor) -> Tensor:
        return tensor if self.scale == 1 else tensor * self.scale

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # mmcv stores the range as a constant (84, 84, ...) mask, which is a function of the arguments.
        state_dict.pop(prefix + "local_constraint_map", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, num_heads={self.num_heads}, attention_type={self.attention_type!r}"
        for name, default in (("spatial_range", -1), ("q_stride", 1), ("kv_stride", 1), ("scale", 1.0)):
            if getattr(self, name) != default:
                text += f", {name}={getattr(self, name)}"
        return text


def _every(x: Tensor, stride: int) -> Tensor:
    return x if stride == 1 else x[:, :, ::stride, ::stride]


def _sum(logits: Tensor, more: Tensor | None) -> Tensor:
    return logits if more is None else logits + more


def _along(pairs: Tensor, axis: str) -> Tensor:
    """(·, queries, keys) of one axis as logits (1, ·, Hq, 1, keys) or (1, ·, 1, Wq, keys)."""
    return pairs.unsqueeze(0).unsqueeze(3 if axis == "row" else 2)
