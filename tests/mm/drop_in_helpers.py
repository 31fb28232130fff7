"""mmcv's own layers beside ours. Tests import ``drop_in`` from here, so that the stock methods are saved first."""

from __future__ import annotations

import importlib
from typing import Any

import mmdet.models.backbones.swin  # noqa: F401
import mmseg.models.backbones.swin  # noqa: F401
import pytest
from mmcv.cnn.bricks.generalized_attention import GeneralizedAttention
from mmcv.ops import CrissCrossAttention, DeformConv2dPack, ModulatedDeformConv2dPack
from mmengine.registry import init_default_scope
from torch import nn

from attn_plugins.mmcv.places import PLACES
from attn_plugins.replacement import accelerate, forget_compiled

STOCK: dict[str, Any] = dict(
    GeneralizedAttention=GeneralizedAttention,
    CrissCrossAttention=CrissCrossAttention,
    DCN=DeformConv2dPack,
    DCNv2=ModulatedDeformConv2dPack,
)
KINDS = [getattr(importlib.import_module(place.module), place.layer) for place in PLACES]
FORWARDS = {kind: kind.forward for kind in KINDS}

from attn_plugins.mmcv import drop_in  # noqa: E402, F401  replaces the methods


def restore() -> None:
    """Give the toolkits' layers their own methods."""
    for place, kind in zip(PLACES, KINDS):
        kind.forward = FORWARDS[kind]
        for name in place.more:
            if name in vars(kind):
                delattr(kind, name)
    forget_compiled()


restore()  # after drop_in is imported: other tests compare with the stock layers


def ours(layer: nn.Module) -> nn.Module:
    """Accelerate a layer, and return it."""
    assert accelerate(layer, onednn=False) == [""]
    return layer


@pytest.fixture
def stock_layers():
    """Start and end a test with the toolkits' own layers, and end in mmdet's scope."""
    restore()
    yield
    restore()
    init_default_scope("mmdet")
