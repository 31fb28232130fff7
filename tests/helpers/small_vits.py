"""Small vision transformers of timm with this package's attention, and pictures for them."""

from __future__ import annotations

import timm
import torch
from torch import Tensor, nn

from attn_plugins.timm import ViTAttention

SMALL = dict(img_size=(48, 64), patch_size=16, embed_dim=32, depth=2, num_heads=2, num_classes=5)


def build(attn_layer: object = "attn1111", name="vit_tiny_patch16_224", **options) -> nn.Module:
    torch.manual_seed(0)
    layer = {} if attn_layer is None else dict(attn_layer=attn_layer)
    return timm.create_model(name, **{**SMALL, **layer, **options}).eval()


def layers_of(model: nn.Module) -> list[ViTAttention]:
    return [module for module in model.modules() if isinstance(module, ViTAttention)]


def open_gates(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for layer in layers_of(model):
            for name, parameter in layer.named_parameters():
                if name.split(".")[0] not in ("qkv", "proj", "norm", "q_norm", "k_norm"):
                    nn.init.normal_(parameter, std=0.5)
    return model


def picture(H=48, W=64, B=2) -> Tensor:
    return torch.randn(B, 3, H, W, generator=torch.Generator().manual_seed(1))
