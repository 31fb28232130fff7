"""Layers of other packages that compute deformable attention, and where their code does so."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

from torch import Tensor

from . import sampling

LAYER, FUNCTION = "MultiScaleDeformableAttention", "multi_scale_deformable_attention"
ARGUMENTS = tuple(inspect.signature(sampling.layer).parameters)[1:]


class Place(NamedTuple):
    """A layer, and the function of its module that we replace; None for the layer's ``forward`` itself."""

    module: str
    layer: str
    function: str | None
    ours: Callable[..., Tensor]
    attribute: str | None = None  # in which each layer keeps the function


def _transformers(family: str, layer: str = LAYER, function: str | None = None, attribute: str | None = None) -> Place:
    module = f"transformers.models.{family}.modeling_{family.rpartition('.')[2]}"
    ours: Any = {None: sampling.layer, FUNCTION: sampling.levels}.get(function, sampling.counted_points)
    return Place(module, layer, function, ours, attribute)


ALIKE = """deformable_detr grounding_dino lw_detr mm_grounding_dino omdet_turbo pp_doclayout_v2 pp_doclayout_v3
pp_doclayout_v4 rf_detr rt_detr"""
MASK2FORMER = "Mask2FormerPixelDecoderEncoderMultiscaleDeformableAttention"
ONEFORMER = "OneFormerPixelDecoderEncoderMultiscaleDeformableAttention"
RFDETR, ULTRALYTICS = "rfdetr.models.ops.modules.ms_deform_attn", "ultralytics.nn.modules.transformer"
PLACES = (
    *map(_transformers, ALIKE.split()),
    _transformers("mask2former", MASK2FORMER, FUNCTION),
    _transformers("oneformer", ONEFORMER, FUNCTION),
    _transformers("deprecated.deta", "DetaMultiscaleDeformableAttention", FUNCTION),  # up to transformers 4.57
    _transformers("rt_detr_v2", "RTDetrV2MultiscaleDeformableAttention", f"{FUNCTION}_v2"),
    _transformers("d_fine", "DFineMultiscaleDeformableAttention", f"{FUNCTION}_v2", "ms_deformable_attn_core"),
    _transformers("deimv2", "Deimv2MultiscaleDeformableAttention", f"{FUNCTION}_v2", "ms_deformable_attn_core"),
    Place(RFDETR, "MSDeformAttn", "ms_deform_attn_core_pytorch", sampling.transposed_value),
    Place(ULTRALYTICS, "MSDeformAttn", "multi_scale_deformable_attn_pytorch", sampling.levels),
)
_BY_CLASS = {(place.module, place.layer): place for place in PLACES}


def place_of(layer: type) -> Place | None:
    """Return the place of a class, or None; classes like those of ``ALIKE`` in families not listed have one too."""
    place = _BY_CLASS.get((layer.__module__, layer.__name__))
    if place is not None or layer.__name__ != LAYER or not layer.__module__.startswith("transformers.models."):
        return place
    arguments = tuple(inspect.signature(layer.forward).parameters)  # type: ignore[attr-defined]
    return Place(layer.__module__, LAYER, None, sampling.layer) if arguments == ARGUMENTS else None


def held_by(place: Place, layer: type) -> Any:
    """Return what the class computes with now: its ``forward``, or the function of its module; None without one."""
    forward: Any = layer.forward  # type: ignore[attr-defined]
    return forward if place.function is None else getattr(forward, "__globals__", {}).get(place.function)


def stock_of(function: Any) -> Any:
    """Return the function that :func:`replacement` replaced, or another ``function`` itself."""
    return getattr(function, "attn_plugins_stock", function)


def replacement(place: Place, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return our function in the place of ``stock``, with its name and signature."""
    ours = place.ours

    @functools.wraps(stock)
    def replaced(*args: Any, **kwargs: Any) -> Tensor:
        return ours(stock, *args, **kwargs)

    replaced.attn_plugins_stock = stock  # type: ignore[attr-defined]
    return replaced


def calling(forward: Any, name: str, function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return a copy of ``forward`` in which the global ``name`` is ``function``."""
    # Without the module's __name__, torch.compile reads these globals and not the module's.
    scope = {key: value for key, value in forward.__globals__.items() if key != "__name__"}
    scope[name] = function
    copied = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return functools.update_wrapper(copied, forward)
