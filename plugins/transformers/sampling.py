"""Deformable attention under the signatures of transformers, rfdetr and Ultralytics, on this package's operator.

Each function takes the stock function first, followed by the stock arguments, and returns (B, Q, M * d). It calls the
stock function where our operator does not stand in for it:

* for dtypes that ``grid_sample`` refuses, so that the stock error is raised;
* for nearest sampling (``method="discrete"``), and in rfdetr's own export mode.

NaN and infinite locations give NaN on CPUs and read 0 on CUDA, as by ``grid_sample``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import FLOATS, autocast_dtype
from ..core.gradients import traced
from ..ops.deformable_attention.deformable_attention import deformable_attention, policy_of_grid_sample

Stock = Callable[..., Tensor]


def layer(
    stock: Stock,
    self: Any,
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_spatial_shapes_list: Sequence[tuple[int, int]],
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: int,
) -> Tensor:
    """Compute the ``forward`` of transformers' ``MultiScaleDeformableAttention``, a layer without parameters.

    Values are (B, S, M, d), locations (B, Q, M, L, K, 2), 0 to 1 on the map, and weights (B, Q, M, L, K).
    """
    samples = sampling_locations, attention_weights
    if not _serves(value, *samples):
        shapes = value_spatial_shapes, value_spatial_shapes_list
        return stock(self, value, *shapes, level_start_index, *samples, im2col_step)
    return _attend(value, value_spatial_shapes_list, *samples)


def levels(
    stock: Stock, value: Tensor, value_spatial_shapes: Any, sampling_locations: Tensor, attention_weights: Tensor
) -> Tensor:
    """Compute ``multi_scale_deformable_attention`` of Mask2Former, OneFormer and DETA, and Ultralytics' function.

    The latter's locations are (B, Q, M, L * K, 2) since version 8.4, others' (B, Q, M, L, K, 2).
    """
    samples = sampling_locations, attention_weights
    if not _serves(value, *samples):
        return stock(value, value_spatial_shapes, *samples)
    L = len(value_spatial_shapes)
    points = [sampling_locations.shape[3] // L] * L if sampling_locations.dim() == 5 else None
    return _attend(value, value_spatial_shapes, *samples, points)


def counted_points(
    stock: Stock,
    value: Tensor,
    value_spatial_shapes: Sequence[tuple[int, int]],
    sampling_locations: Tensor,
    attention_weights: Tensor,
    num_points_list: Sequence[int],
    method: str = "default",
) -> Tensor:
    """Compute ``multi_scale_deformable_attention_v2`` of RT-DETR v2, D-FINE and DEIMv2.

    Levels may have different numbers of points, ``num_points_list``. Locations are (B, Q, M, P, 2) and weights
    (B, Q, M, P), where P is the sum of these numbers.
    """
    if method != "default" or not _serves(value, sampling_locations, attention_weights):
        return stock(value, value_spatial_shapes, sampling_locations, attention_weights, num_points_list, method=method)
    if value.device.type == "cpu" and len(value) == 1 and value.requires_grad and not traced():
        value = _with_gradient_of_maps(value)
    return _attend(value, value_spatial_shapes, sampling_locations, attention_weights, num_points_list)


def transposed_value(
    stock: Stock,
    value: Tensor,
    value_spatial_shapes: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    value_spatial_shapes_hw: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """Compute ``ms_deform_attn_core_pytorch`` of rfdetr, whose values are (B, M, d, S)."""
    if sampling_locations.dim() == 5 or not _serves(value, sampling_locations, attention_weights):  # 5: its export
        return stock(value, value_spatial_shapes, sampling_locations, attention_weights, value_spatial_shapes_hw)
    shapes = value_spatial_shapes if value_spatial_shapes_hw is None else value_spatial_shapes_hw
    weights = attention_weights.reshape(sampling_locations.shape[:-1])
    return _attend(value.permute(0, 3, 1, 2), shapes, sampling_locations, weights)


def _with_gradient_of_maps(value: Tensor) -> Tensor:
    """Return ``value``, (1, S, M, d), with a gradient whose channels are outermost in memory, as ``grid_sample``'s.

    D-FINE and DEIMv2 do not project their values, which come from BatchNorm2d. On CPUs its backward is wrong for a
    single image with strides (C, 1, W * C, C) (torch 2.11 and 2.14).
    """
    value = value.view_as(value)
    value.register_hook(lambda grad: grad.movedim(1, 3).contiguous().movedim(3, 1))
    return value


def _serves(value: Tensor, locations: Tensor, weights: Tensor) -> bool:
    """Return whether the stock code takes these dtypes."""
    places = {value.dtype, locations.dtype}
    one = len(places) == 1 or (autocast_dtype(value.device.type) is not None and torch.float64 not in places)
    return one and {*places, weights.dtype} <= {*FLOATS}


def _attend(
    value: Tensor, shapes: Any, locations: Tensor, weights: Tensor, points: Sequence[int] | None = None
) -> Tensor:
    """Compute deformable attention in the dtype of ``grid_sample`` times ``weights``, also under autocast."""
    device, policy = value.device.type, policy_of_grid_sample(value)
    dtype = torch.promote_types(torch.promote_types(value.dtype, locations.dtype), weights.dtype)
    if autocast_dtype(device) is None:
        value, locations, weights = (tensor.to(dtype) for tensor in (value, locations, weights))
        return deformable_attention(value, shapes, locations, weights, points, nan_policy=policy)
    if device == "cpu":  # grid_sample is computed in float32 there, and in the widest dtype of its inputs elsewhere
        dtype = torch.promote_types(dtype, torch.float32)
    with torch.autocast(device, enabled=False):
        value, locations, weights = (tensor.to(dtype) for tensor in (value, locations, weights))
        return deformable_attention(value, shapes, locations, weights, points, nan_policy=policy)
