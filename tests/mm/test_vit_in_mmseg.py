"""timm's vision transformers with our attention as mmsegmentation backbones, by config alone."""

from __future__ import annotations

import torch
from mmengine.registry import init_default_scope
from mmseg.registry import MODELS

from attn_plugins.timm import ViTAttention


def test_a_timm_backbone_takes_our_attention():
    init_default_scope("mmseg")
    backbone = MODELS.build(
        dict(
            type="TIMMBackbone", model_name="vit_tiny_patch16_224", features_only=True, pretrained=False,
            out_indices=(0, 1), attn_layer="attn1111", img_size=(48, 64), depth=2,
        )
    )  # fmt: skip
    layers = [module for module in backbone.modules() if isinstance(module, ViTAttention)]
    assert len(layers) == 2
    assert layers[0].places.grid(torch.empty(2, 13, 192)) == (3, 4)
    features = backbone(torch.randn(2, 3, 48, 64))
    assert [tuple(feature.shape) for feature in features] == [(2, 192, 3, 4)] * 2
    sum(feature.square().sum() for feature in features).backward()
    assert all(layer.gate.grad is not None for layer in layers)
