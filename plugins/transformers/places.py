"""Multi-scale deformable attention of transformers, rfdetr and Ultralytics: its places, and all of this adapter.

The stock code also runs for RT-DETR v2, D-FINE and DEIMv2 with ``method="discrete"``. A kernel of the Hub that
``use_kernels=True`` or ``kernelize`` loads later takes precedence on its devices.
"""

from __future__ import annotations

import inspect
from typing import Any

from ..replacement import Place
from . import decomposed, sampling, swin

LAYER, FUNCTION = "MultiScaleDeformableAttention", "multi_scale_deformable_attention"
ARGUMENTS = tuple(inspect.signature(sampling.layer).parameters)[1:]


def _transformers(family: str, layer: str = LAYER, function: str | None = None, attribute: str | None = None) -> Place:
    module = f"transformers.models.{family}.modeling_{family.rpartition('.')[2]}"
    ours: Any = {None: sampling.layer, FUNCTION: sampling.levels}.get(function, sampling.counted_points)
    return Place(module, layer, ours, function=function, attribute=attribute)


ALIKE = """deformable_detr grounding_dino lw_detr mm_grounding_dino omdet_turbo pp_doclayout_v2 pp_doclayout_v3
pp_doclayout_v4 rf_detr rt_detr"""
MASK2FORMER = "Mask2FormerPixelDecoderEncoderMultiscaleDeformableAttention"
ONEFORMER = "OneFormerPixelDecoderEncoderMultiscaleDeformableAttention"
RFDETR, ULTRALYTICS = "rfdetr.models.ops.modules.ms_deform_attn", "ultralytics.nn.modules.transformer"
DEFORMABLE = (
    *map(_transformers, ALIKE.split()),
    _transformers("mask2former", MASK2FORMER, FUNCTION),
    _transformers("oneformer", ONEFORMER, FUNCTION),
    _transformers("deprecated.deta", "DetaMultiscaleDeformableAttention", FUNCTION),  # up to transformers 4.57
    _transformers("rt_detr_v2", "RTDetrV2MultiscaleDeformableAttention", f"{FUNCTION}_v2"),
    _transformers("d_fine", "DFineMultiscaleDeformableAttention", f"{FUNCTION}_v2", "ms_deformable_attn_core"),
    _transformers("deimv2", "Deimv2MultiscaleDeformableAttention", f"{FUNCTION}_v2", "ms_deformable_attn_core"),
    Place(RFDETR, "MSDeformAttn", sampling.transposed_value, function="ms_deform_attn_core_pytorch"),
    Place(
        ULTRALYTICS,
        "MSDeformAttn",
        sampling.levels,
        function="multi_scale_deformable_attn_pytorch",
        caution="train() and val() of Ultralytics build a new model, which accelerate(model) does not reach: "
        "import attn_plugins.transformers.drop_in before them instead",
    ),
)
PLACES = (*DEFORMABLE, *decomposed.PLACES, *swin.PLACES)
_BY_CLASS = {(place.module, place.layer): place for place in PLACES}


def place_of(layer: type) -> Place | None:
    """Return the place of a class, or None; classes like those of ``ALIKE`` in families not listed have one too."""
    place = _BY_CLASS.get((layer.__module__, layer.__name__))
    if place is not None or layer.__name__ != LAYER or not layer.__module__.startswith("transformers.models."):
        return place
    arguments = tuple(inspect.signature(layer.forward).parameters)  # type: ignore[attr-defined]
    return Place(layer.__module__, LAYER, sampling.layer) if arguments == ARGUMENTS else None
