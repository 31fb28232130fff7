"""Generalized attention on maps: any of the four terms of Transformer attention (Zhu et al. 2019).

Shapes: B batch, C channels, M heads, d width per head, (Hq, Wq) queries, (Hk, Wk) keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...terms.attention_type import AttentionTerms, parse_attention_type
from ...terms.saliency import add_vector, key_saliency
from ...terms.size_cache import cached
from ...terms.window import window_logits
from ..common.attention import attend
from ..common.checks import check_map, check_range, positive
from ..common.logits import MapLogits, WindowLogits, as_content
from ..common.tracing import one_node
from ..common.weights import map_logits, map_weights
from .parts.fused_projections import project
from .parts.memory_format import add_scaled, map_heads, to_channels_last
from .parts.projection_norms import normalize, projections
from .parts.saliency_pooling import pooled_attention
from .parts.sine_positions import EncodedPositions


class FourTerms(EncodedPositions):
    """The computation of generalized attention, on the attributes of a layer, which may be another package's."""

    in_channels: int
    attention_type: str
    terms: AttentionTerms
    in_windows: bool  # whether keys are those of a window around each query
    query_conv: Any
    key_conv: Any
    value_conv: Any
    proj_conv: Any
    appr_bias: Any  # u of ε3
    geom_bias: Any  # v of ε4
    gamma: Any

    def upsample(self, output: Tensor, size: Sequence[int]) -> Tensor:
        """Interpolate the queries' outputs, at every ``q_stride``-th pixel, to all pixels."""
        covered = [(n - 1) * self.q_stride + 1 for n in output.shape[2:]]
        output = F.interpolate(output, covered, mode="bilinear", align_corners=True)
        return F.pad(output, (0, size[1] - covered[1], 0, size[0] - covered[0]), mode="replicate")

    @one_node
    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Attend from the pixels of ``x`` to those of ``context``.

        Args:
            x: (B, C, H, W), of any size and memory format.
            context: (B, C, H', W'), another map in the same coordinates (cross-attention); None for ``x``.

        Returns:
            (B, C, H, W), in the memory format of ``x``.

        Raises:
            ValueError: A shape or a device does not match.
            TypeError: A map does not have the module's dtype.
        """
        output = self._pooled(x, context)
        if output is None:
            attended = attend(self._logits(x, context))
            output = self.proj_conv(attended.permute(0, 1, 4, 2, 3).flatten(1, 2))
        if self.q_stride > 1 and output.shape[2] * output.shape[3] > 1:
            output = self.upsample(output, x.shape[2:])
        return add_scaled(x, self.gamma, output)

    def attention_maps(self, x: Tensor, context: Tensor | None = None, queries: Tensor | None = None) -> Tensor:
        """Compute the attention weights for inspection, in O(N²) memory without ``queries``.

        Args:
            x: As in :meth:`forward`.
            context: As in :meth:`forward`.
            queries: (Q, 2), rows and columns on the map of queries; None for all.

        Returns:
            (B, M, Hq, Wq, Hk, Wk), or (B, M, Q, Hk, Wk) with ``queries``.

        Raises:
            ValueError: As in :meth:`forward`, or a query lies outside the map.
        """
        return map_weights(self._logits(x, context), self.attention_size(x.shape[2:]), queries)

    def attention_logits(
        self, x: Tensor, context: Tensor | None = None, queries: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Compute the logits of each term, by its name in :class:`.AttentionTerms`, -inf for keys out of range.

        The softmax of their sum is :meth:`attention_maps`, whose arguments and axes are the same.
        """
        query, key, value, _ = self._features(x, context)
        terms, u, v = self.terms, self._vector(self.appr_bias), self._vector(self.geom_bias)
        in_range = self.position_logits(None, None, x, value)
        parts: dict[str, MapLogits] = {}
        if terms.content:
            parts["content"] = MapLogits(query, key, value, *in_range)
        if terms.content_position:
            parts["content_position"] = MapLogits(None, None, value, *self.position_logits(query, None, x, value))
        if u is not None and key is not None:
            parts["saliency"] = MapLogits(None, None, value, *in_range, key_saliency(key, u))
        if v is not None:
            parts["position"] = MapLogits(None, None, value, *self.position_logits(None, v, x, value))
        size = self.attention_size(x.shape[2:])
        return {name: map_logits(part, size, queries) for name, part in parts.items()}

    def _pooled(self, x: Tensor, context: Tensor | None) -> Tensor | None:
        """Compute what all queries add if there is ε3 alone, (B, C, 1, 1); None if :meth:`_logits` has to."""
        u = self._vector(self.appr_bias)
        if u is None or self.key_conv is None or self.attention_type != "0010" or self.spatial_range != -1:
            return None
        self._check(x, context)
        keys = _every(x if context is None else context, self.kv_stride)
        return pooled_attention(keys, u, self.key_conv, self.value_conv, self.proj_conv)

    def _logits(self, x: Tensor, context: Tensor | None) -> MapLogits | WindowLogits:
        """Compute the sum of all terms, for the keys around each query if the range is a window of a map."""
        by_content, by_position, _, _ = self.terms
        u, v = self._vector(self.appr_bias), self._vector(self.geom_bias)
        query, key, value, key_logits = self._features(x, context, None if by_content else u)
        content, content_key = (query, key) if by_content else (None, None)
        moved = query if by_position else None
        in_windows = self.in_windows and context is None
        # Before u is added: the gradient that arrives first decides the layout, and a product's is not that of a map.
        row, column = (None, None) if in_windows else self.position_logits(moved, v, x, value)
        if content is not None and u is not None:
            content = add_vector(content, u)
        if not in_windows:
            return MapLogits(content, content_key, value, row, column, key_logits)
        # A larger radius than the map's size minus 1 would add no keys; a symbolic size is not compared.
        H, W = x.shape[2], x.shape[3]
        reach = self.spatial_range // 2
        radius = min(reach, H - 1) if isinstance(H, int) else reach, min(reach, W - 1) if isinstance(W, int) else reach
        if key_logits is not None:
            content, content_key = as_content(key_logits)
        taps = self.tap_logits(moved, v, (H, W), radius)
        kernel_size = 2 * radius[0] + 1, 2 * radius[1] + 1
        return WindowLogits(content, content_key, value, taps, kernel_size, padding=radius)

    def _features(
        self, x: Tensor, context: Tensor | None, u: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
        """Compute scaled query, key and value, (B, M, ·, ·, d), as far as the terms need them.

        With the scaled ``u``, (M, d), compute ε3 of the keys as well, (B, M, Hk, Wk); the key is then None.
        """
        self._check(x, context)
        convs: dict[str, nn.Module | None] = dict(query=self.query_conv, key=self.key_conv, value=self.value_conv)
        found = {name: conv for name, conv in convs.items() if conv is not None}
        if self.query_conv is not None:
            x = to_channels_last(x)
        keys = to_channels_last(_every(x if context is None else context, self.kv_stride))
        if context is None and self.q_stride == self.kv_stride:
            maps = project(keys, found, u)
        else:
            queries = {"query": found.pop("query")(_every(x, self.q_stride))} if "query" in found else {}
            maps = queries | project(keys, found, u)
        saliency = maps.pop("saliency", None)
        heads = {name: map_heads(projected, self.num_heads) for name, projected in maps.items()}
        query, key = heads.get("query"), heads.get("key")
        query = None if query is None else self._scaled(query)
        if u is not None and key is not None:
            saliency = key_saliency(key, u)
            key = None
        return query, key, heads["value"], saliency

    def _check(self, x: Tensor, context: Tensor | None) -> None:
        check_map(x, self.in_channels, self.gamma)
        if context is not None:
            check_map(context, self.in_channels, self.gamma, "context")
            if context.shape[0] != x.shape[0]:
                raise ValueError(f"context must have x's batch size {x.shape[0]}, got {context.shape[0]}")

    def _vector(self, parameter: Tensor | None) -> Tensor | None:
        """Return u of ε3 or v of ε4, scaled, (M, d)."""
        return None if parameter is None else self._scaled(parameter.view(self.num_heads, -1))

    def _scaled(self, tensor: Tensor) -> Tensor:
        return tensor if self.scale == 1 else tensor * self.scale


class GeneralizedAttention2d(FourTerms, nn.Module):
    """Multi-head attention on a map as ``x + gamma * f(x)``, with any of the four terms as logits.

    Source: Zhu et al. (2019), Eq. 1, 2 and 8. The logit of key k for query q is the sum of the chosen terms:

        1000  ε1 = q·k            query content and key content
        0100  ε2 = q·R[k - q]     query content and relative position
        0010  ε3 = u·k            key content alone; computed once, as it is the same for all queries
        0001  ε4 = v·R[k - q]     relative position alone

    With ``'0000'`` the values are averaged. gamma starts at 0, so a new module is the identity.

    Args:
        in_channels: C, channels of the map and of ``context``.
        num_heads: M; must divide C.
        attention_type: Four bits, ε1 to ε4.
        spatial_range: n_k, odd: keys are limited to |Δ| <= (n_k - 1) / 2 pixels on both axes; -1 for all keys. A query
            without any key in range (possible if ``kv_stride`` > 1) returns only the output projection's bias.
        q_stride: Only every q_stride-th pixel is a query. The result is interpolated bilinearly between these pixels,
            and repeated beyond the last of them.
        kv_stride: Only every kv_stride-th pixel is a key, at pixel j * kv_stride.
        position_embedding_dim: Width of the sine encoding of each axis, even; -1: C.
        position_magnitude: Factor of the offsets before encoding.
        scale: Factor of the sum of all terms, such as d ** -0.5; the paper uses 1.
        norm_layer: Creates a normalization of a number of channels, such as ``nn.SyncBatchNorm``, after each
            projection; None for none. The paper has one in its segmentation networks (section 4.1).

    Raises:
        ValueError: An argument is out of range.
    """

    _abbr_ = "gen_attention_block"  # mmengine's and mmcv's name of the plug-in in checkpoints

    windowed = True  # the range is a window centred on the query

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
        norm_layer: Callable[[int], nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        positive(num_heads=num_heads, q_stride=q_stride, kv_stride=kv_stride)
        if not isinstance(in_channels, int) or in_channels < num_heads:
            raise ValueError(f"in_channels must be an int of at least num_heads = {num_heads}, got {in_channels!r}")
        if not isinstance(position_embedding_dim, int) or position_embedding_dim < -1 or position_embedding_dim == 0:
            raise ValueError(
                f"position_embedding_dim must be a positive int, or -1 for in_channels, got {position_embedding_dim!r}"
            )
        self.attention_type = attention_type
        self.terms = terms = parse_attention_type(attention_type)
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

        self.query_conv = projection() if terms.queries else None
        self.key_conv = projection() if terms.keys else None
        self.value_conv = projection()
        self.appr_geom_fc_x = table() if terms.relative else None
        self.appr_geom_fc_y = table() if terms.relative else None
        self.appr_bias = nn.Parameter(torch.empty(width, **factory)) if terms.saliency else None  # u
        self.geom_bias = nn.Parameter(torch.empty(width, **factory)) if terms.position else None  # v
        self.proj_conv = nn.Conv2d(width, in_channels, 1, **factory)
        self.gamma = nn.Parameter(torch.empty(1, **factory))
        if norm_layer is not None:
            normalize(self, ("query_conv", "key_conv", "value_conv", "proj_conv"), norm_layer)
        self.reset_parameters()

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
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> MMCVGeneralizedAttention2d:
        """Create a :class:`MMCVGeneralizedAttention2d`, the variant of mmcv's ``GeneralizedAttention``."""
        return MMCVGeneralizedAttention2d(
            in_channels, num_heads, attention_type, spatial_range, q_stride, kv_stride, position_embedding_dim,
            position_magnitude, device=device, dtype=dtype,
        )  # fmt: skip

    def check_variant(self) -> None:
        """Raise a ValueError if the arguments are invalid for this variant."""
        if self.in_channels % self.num_heads:
            raise ValueError(f"num_heads must divide in_channels = {self.in_channels}, got {self.num_heads}")
        check_range("spatial_range", self.spatial_range)
        if self.terms.relative and self.position_embedding_dim % 2:
            raise ValueError(
                f"position_embedding_dim must be even (sines and cosines), got {self.position_embedding_dim}"
            )

    def reset_parameters(self) -> None:
        """Draw projections uniformly by fan-in, and u and v uniformly; zero gamma and the output bias."""
        for module in projections(self):
            nn.init.kaiming_uniform_(module.weight, a=1)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        bound = 1 / math.sqrt(2 * (self.in_channels // self.num_heads))
        for vector in (self.appr_bias, self.geom_bias):
            if vector is not None:
                nn.init.uniform_(vector, -bound, bound)
        nn.init.zeros_(self.gamma)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # mmcv stores the range as a constant (84, 84, ...) mask, which follows from the arguments.
        state_dict.pop(prefix + "local_constraint_map", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, num_heads={self.num_heads}, attention_type={self.attention_type!r}"
        for name, default in (("spatial_range", -1), ("q_stride", 1), ("kv_stride", 1), ("scale", 1.0)):
            if getattr(self, name) != default:
                text += f", {name}={getattr(self, name)}"
        return text


class MMCVTerms(FourTerms):
    """The numerics of mmcv's ``GeneralizedAttention``, as :class:`MMCVGeneralizedAttention2d` tells."""

    wavelength = 1000.0
    offset_sign = -1
    position_factor = 1 / math.sqrt(2)

    def axis_width(self) -> int:
        return self.position_embedding_dim // 2

    def axis_range(self, queries: int, keys: int, like: Tensor) -> Tensor:
        return _half_range(queries, keys, self.spatial_range, self.q_stride, self.kv_stride, like.device, like.dtype)

    def upsample(self, output: Tensor, size: Sequence[int]) -> Tensor:
        return F.interpolate(output, list(size), mode="bilinear", align_corners=False)


class MMCVGeneralizedAttention2d(MMCVTerms, GeneralizedAttention2d):
    """Generalized attention with the numerics and the state_dict of mmcv's ``GeneralizedAttention``.

    Differences from :class:`GeneralizedAttention2d`:

    * R encodes q - k, with wavelength 1000 and half of ``position_embedding_dim`` per axis, and is divided by √2.
    * A head has C // M channels, even if M does not divide C.
    * Outputs are interpolated from ``q_stride`` with half-pixel centres.
    * ``spatial_range`` r is a half-range in pixels, at least 0: key j is in range of the query at pixel p if
      ⌊(p - r) / kv_stride⌋ <= j <= ⌊(p + r + 1) / kv_stride⌋, on maps of any size and channel count. mmcv's own mask
      ends at 84 pixels, needs 256 or 512 channels, and ignores ``q_stride``.

    mmcv's results for '0100', '0110', '1100' and '1110' are wrong (queries are transposed, and H ≠ W raises an error);
    this class computes these four correctly.
    """

    windowed = False  # the range is not centred on the query

    def check_variant(self) -> None:
        r = self.spatial_range
        if not isinstance(r, int) or r < -1:
            raise ValueError(f"spatial_range must be -1 (all keys) or a half-range of at least 0, got {r!r}")
        if self.terms.relative and self.position_embedding_dim % 4:
            raise ValueError(
                "position_embedding_dim must be a multiple of 4 (sines and cosines of two axes), "
                f"got {self.position_embedding_dim}"
            )


@cached
def _half_range(
    queries: int, keys: int, reach: int, q_stride: int, kv_stride: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return the range of :class:`MMCVGeneralizedAttention2d` along one axis."""
    pixel = torch.arange(queries, device=device).unsqueeze(1) * q_stride
    key = torch.arange(keys, device=device)
    first = (pixel - reach).div(kv_stride, rounding_mode="floor")
    last = (pixel + reach + 1).div(kv_stride, rounding_mode="floor")
    return window_logits((first <= key) & (key <= last)).to(dtype)


def _every(x: Tensor, stride: int) -> Tensor:
    return x if stride == 1 else x[:, :, ::stride, ::stride]
