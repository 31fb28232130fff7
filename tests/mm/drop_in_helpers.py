"""mmcv's own layers beside the drop-ins. Tests import ``drop_in`` from here, so that mmcv's classes are saved first."""

from __future__ import annotations

import sys

import mmdet.models.backbones.swin
import mmseg.models.backbones.swin
import pytest
from mmcv.cnn.bricks.generalized_attention import GeneralizedAttention
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmcv.ops import CrissCrossAttention, DeformConv2dPack, ModulatedDeformConv2dPack, MultiScaleDeformableAttention
from mmengine.registry import MODELS, init_default_scope

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

from attn_plugins.mmcv import drop_in  # noqa: E402  replaces mmcv's layers


def restore() -> None:
    """Restore mmcv's layers in the registry and under their names, with their own forward methods."""
    for layer, forward in STOCK_FORWARDS.items():
        layer.forward = forward
    MODELS.module_dict.update(STOCK)
    for name, holders in drop_in.HOLDERS.items():
        for holder in holders:
            if holder in sys.modules:
                setattr(sys.modules[holder], name, STOCK[name])


restore()  # after drop_in is imported: other tests compare with mmcv's layers


@pytest.fixture
def stock_layers():
    """Start and end a test with the toolkits' own layers, and end in mmdet's scope."""
    restore()
    yield
    restore()
    init_default_scope("mmdet")
