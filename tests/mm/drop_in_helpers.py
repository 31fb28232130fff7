"""mmcv's own layers beside the drop-ins; tests take ``drop_in`` from here, after mmcv's names are taken."""

from __future__ import annotations

import sys

import mmdet.models.backbones.swin
import mmseg.models.backbones.swin
from mmcv.cnn.bricks.generalized_attention import GeneralizedAttention
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmcv.ops import CrissCrossAttention, DeformConv2dPack, ModulatedDeformConv2dPack, MultiScaleDeformableAttention
from mmengine.registry import MODELS

STOCK = dict(
    GeneralizedAttention=GeneralizedAttention,
    CrissCrossAttention=CrissCrossAttention,
    DCN=DeformConv2dPack,
    DCNv2=ModulatedDeformConv2dPack,
)
STOCK_FORWARDS = {
    layer: layer.forward
    for layer in (
        MultiheadAttention,
        MultiScaleDeformableAttention,
        mmdet.models.backbones.swin.ShiftWindowMSA,
        mmseg.models.backbones.swin.ShiftWindowMSA,
    )
}

from attn_plugins.mmcv import drop_in  # noqa: E402  replaces them


def restore() -> None:
    """mmcv's own layers in the registry and under their names, with their own forwards."""
    for layer, forward in STOCK_FORWARDS.items():
        layer.forward = forward
    MODELS.module_dict.update(STOCK)
    for name, holders in drop_in.HOLDERS.items():
        for holder in holders:
            if holder in sys.modules:
                setattr(sys.modules[holder], name, STOCK[name])


restore()  # after the import of drop_in: other tests compare with mmcv's layers
