"""mmcv's attention and deformable convolutions, and the Swin of mmdet and mmseg, on this package's operators.

Outputs are contiguous for contiguous inputs, and gradients equal mmcv's as in its own tests. mmcv's own code runs where
others take part in what is replaced: dropout of weights, and hooks on parts that our code does not call. On CUDA the
toolkits' Swin keeps its code where that was measured to be faster (``modules.tokens.window_speed``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mmcv.cnn import Scale
from mmengine.utils import deprecated_api_warning
from torch import Tensor, nn
from torch.nn import functional as F

from ..modules.common.bypass import has_global_hooks, untouched
from ..modules.common.checks import check_map
from ..modules.maps import criss_cross
from ..modules.maps.generalized_attention import MMCVTerms
from ..modules.maps.parts.memory_format import add_scaled, in_format_of, to_channels_last
from ..modules.tokens.deformable_attention import SampledAttention
from ..modules.tokens.parts.window_speed import stock_is_faster
from ..modules.tokens.parts.windows import TableAttention, in_windows, needs_weights
from ..ops import criss_cross_attention, deform_conv2d, reference
from ..ops.deform_conv.edge_rule import without_edge_gradients
from ..replacement import Place
from ..terms.attention_type import parse_attention_type
from ..terms.position_table import table_logits

Stock = Callable[..., Any]


# --- deformable convolution -------------------------------------------------------------------------------------------


def dcn(stock: Stock, layer: Any, x: Tensor) -> Tensor:
    """Compute ``DeformConv2dPack.forward``, for any batch size: ``im2col_step`` is ignored."""
    geometry = (layer.stride, layer.padding, layer.dilation)
    offset = without_edge_gradients(layer.conv_offset(x), layer.kernel_size, *geometry)
    return deform_conv2d(x, offset, layer.weight, None, *geometry)


def dcn_v2(stock: Stock, layer: Any, x: Tensor) -> Tensor:
    """Compute ``ModulatedDeformConv2dPack.forward``."""
    taps = layer.deform_groups * layer.kernel_size[0] * layer.kernel_size[1]
    offset, mask = layer.conv_offset(x).split((2 * taps, taps), dim=1)
    geometry = (layer.stride, layer.padding, layer.dilation)
    offset = without_edge_gradients(offset, layer.kernel_size, *geometry)
    return deform_conv2d(x, offset, layer.weight, layer.bias, *geometry, mask.sigmoid())


# --- attention on maps ------------------------------------------------------------------------------------------------


class _Generalized(MMCVTerms):
    """mmcv's ``GeneralizedAttention``, seen as ours."""

    in_windows = False
    scale = 1.0

    def __init__(self, layer: Any) -> None:
        self.attention_type = "".join(str(int(bit)) for bit in layer.attention_type)
        self.terms = parse_attention_type(self.attention_type)
        self.in_channels, self.num_heads = layer.in_channels, layer.num_heads
        self.spatial_range, self.q_stride, self.kv_stride = layer.spatial_range, layer.q_stride, layer.kv_stride
        self.position_embedding_dim = layer.position_embedding_dim
        self.position_magnitude = layer.position_magnitude
        self.value_conv, self.proj_conv, self.gamma = layer.value_conv, layer.proj_conv, layer.gamma
        self.query_conv, self.key_conv = getattr(layer, "query_conv", None), getattr(layer, "key_conv", None)
        self.appr_geom_fc_x = getattr(layer, "appr_geom_fc_x", None)
        self.appr_geom_fc_y = getattr(layer, "appr_geom_fc_y", None)
        self.appr_bias, self.geom_bias = getattr(layer, "appr_bias", None), getattr(layer, "geom_bias", None)


def generalized(stock: Stock, layer: Any, x_input: Tensor) -> Tensor:
    """Compute ``GeneralizedAttention.forward``."""
    unused = (layer.q_downsample, layer.kv_downsample)
    if has_global_hooks() or not all(part is None or untouched(part, nn.AvgPool2d) for part in unused):
        return stock(layer, x_input)
    return _Generalized(layer).forward(x_input)


def as_mmcv_computes_it(layer: Any) -> bool:
    """Return whether :func:`generalized` equals mmcv, which errs for ε2 with ε4 missing, and ignores ``q_stride``."""
    _, by_position, _, position = layer.attention_type
    return not (by_position and not position) and not (layer.spatial_range >= 0 and layer.q_stride > 1)


def _generalized_method(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(_Generalized(self), name)(*args, **kwargs)

    return method


def crossing(stock: Stock, layer: Any, x: Tensor) -> Tensor:
    """Compute ``CrissCrossAttention.forward``."""
    attended = criss_cross_attention(*_crossing_terms(layer, x), scale=1.0).squeeze(1).permute(0, 3, 1, 2)
    if untouched(layer.gamma, Scale) and not has_global_hooks():
        return add_scaled(x, layer.gamma.scale, attended)
    return x + layer.gamma(in_format_of(x, attended))


def _crossing_terms(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    check_map(x, layer.in_channels, layer.query_conv)
    return criss_cross.cross_terms(to_channels_last(x), (layer.query_conv, layer.key_conv, layer.value_conv))


def _crossing_maps(self: Any, x: Tensor, queries: Tensor | None = None) -> Tensor:
    """Compute the attention weights, 0 off the cross; see :meth:`.MapAttention.attention_maps`."""
    weights = reference.criss_cross_probabilities(*_crossing_terms(self, x), None, 1.0)
    return criss_cross.on_map(weights, 0.0, queries)


def _size_of_map(self: Any, size: Sequence[int]) -> tuple[int, int]:
    return size[0], size[1]


# --- attention on tokens ----------------------------------------------------------------------------------------------


@deprecated_api_warning({"residual": "identity"}, cls_name="MultiScaleDeformableAttention")
def deformable(
    stock: Stock,
    layer: Any,
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    identity: Tensor | None = None,
    query_pos: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    reference_points: Tensor | None = None,
    spatial_shapes: Tensor | Sequence[Sequence[int]] | None = None,
    level_start_index: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute deformable attention; see :meth:`attn_plugins.modules.MultiScaleDeformableAttention.forward`."""
    return SampledAttention.attend(
        layer, query, value, identity, query_pos, key_padding_mask, reference_points, spatial_shapes
    )


@deprecated_api_warning({"residual": "identity"}, cls_name="MultiheadAttention")
def multihead(
    stock: Stock,
    layer: Any,
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    identity: Tensor | None = None,
    query_pos: Tensor | None = None,
    key_pos: Tensor | None = None,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute attention without the weights, which mmcv requests from torch and discards.

    Args:
        stock: mmcv's ``forward``.
        layer: The layer.
        query: (Q, B, C), or (B, Q, C) with ``batch_first``, like all tensors below.
        key: (S, B, C); None for ``query``.
        value: (S, B, C); None for ``key``.
        identity: (Q, B, C), added to the result; None for ``query``.
        query_pos: (Q, B, C), added to ``query``.
        key_pos: (S, B, C), added to ``key``; None for ``query_pos`` if that has the shape of ``key``.
        attn_mask: (Q, S) or (B * M, Q, S), bool (True excludes a key) or added to the logits.
        key_padding_mask: (B, S), bool; True for padding.
        **kwargs: Ignored.

    Returns:
        (Q, B, C), or (B, Q, C) with ``batch_first``.
    """
    key = query if key is None else key
    value = key if value is None else value
    identity = query if identity is None else identity
    if key_pos is None and query_pos is not None:
        if query_pos.shape == key.shape:
            key_pos = query_pos
        else:
            warnings.warn(f"{type(layer).__name__}: key_pos is None, and query_pos does not fit key", stacklevel=4)
    query = query if query_pos is None else query + query_pos
    key = key if key_pos is None else key + key_pos
    if layer.batch_first:  # the inner layer expects the batch as second axis
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    inputs = dict(query=query, key=key, value=value, attn_mask=attn_mask, key_padding_mask=key_padding_mask)
    weights = {} if _observed(layer.attn) else dict(need_weights=False)
    output = layer.attn(**inputs, **weights)[0]
    if layer.batch_first:
        output = output.transpose(0, 1)
    return identity + layer.dropout_layer(layer.proj_drop(output))


def _observed(attention: Any) -> bool:
    """Return whether somebody sees how the inner layer is called, or its weights, or its products while traced."""
    return torch.jit.is_tracing() or has_global_hooks() or not untouched(attention, nn.MultiheadAttention)


SWIN = ("mmdet.models.backbones.swin", "mmseg.models.backbones.swin")


def shift_window(stock: Stock, layer: Any, query: Tensor, hw_shape: Sequence[int]) -> Tensor:
    """Compute ``ShiftWindowMSA.forward`` of tokens (B, H * W, C) with ``hw_shape`` (H, W)."""
    attn: Any = layer.w_msa
    inner: Any = type(attn)
    if inner.__module__ not in SWIN or needs_weights(attn, inner) or stock_is_faster("Swin", query, attn):
        return stock(layer, query, hw_shape)
    if not all(untouched(part, type(part)) for part in attn.children()):
        return stock(layer, query, hw_shape)
    B, L, C = query.shape
    H, W = hw_shape
    assert L == H * W, "input feature has wrong size"  # the toolkit's message
    n, shift = layer.window_size, layer.shift_size
    x = F.pad(query.view(B, H, W, C), (0, 0, 0, -W % n, 0, -H % n))  # before the roll, unlike timm
    attend = TableAttention(table_logits(attn.relative_position_bias_table, attn.window_size), attn.scale)
    x = in_windows(x, (n, n), (shift, shift), attn.num_heads, attn.qkv, attend)[:, :H, :W]
    return layer.drop(attn.proj_drop(attn.proj(x.reshape(B, L, C))))


# mmcv's functions of autograd are constants in a trace, or nodes that exporters refuse.
OPERATORS: dict[str, Any] = dict(exports=True, traces=True)
PLACES = (
    Place("mmcv.ops.deform_conv", "DeformConv2dPack", dcn, **OPERATORS),
    Place("mmcv.ops.modulated_deform_conv", "ModulatedDeformConv2dPack", dcn_v2, **OPERATORS),
    Place("mmcv.ops.multi_scale_deform_attn", "MultiScaleDeformableAttention", deformable, **OPERATORS),
    Place("mmcv.cnn.bricks.transformer", "MultiheadAttention", multihead, **OPERATORS),
    Place(
        "mmcv.cnn.bricks.generalized_attention", "GeneralizedAttention", generalized, supports=as_mmcv_computes_it,
        more={name: _generalized_method(name) for name in ("attention_maps", "attention_logits", "attention_size")},
    ),
    Place(
        "mmcv.ops.cc_attention", "CrissCrossAttention", crossing,
        more=dict(attention_maps=_crossing_maps, attention_size=_size_of_map),
    ),
    *(Place(module, "ShiftWindowMSA", shift_window, child=("w_msa", "WindowMSA")) for module in SWIN),
)  # fmt: skip
_BY_CLASS = {(place.module, place.layer): place for place in PLACES}


def place_of(layer: type) -> Place | None:
    """Return the place of a class of mmcv, mmdet or mmseg, or None."""
    return _BY_CLASS.get((layer.__module__, layer.__name__))
