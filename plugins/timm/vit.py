"""Vision transformers with this package's attention: ``attn_vit_small_patch16_224`` and others."""

from __future__ import annotations

from typing import Any

from timm.data import IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

from .conventions import transformer_cfg
from .vit_attention import OPTIONS, vit_attention

WIDTHS = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}  # channels and heads, as in timm's models


default_cfgs = generate_default_cfgs(
    {
        f"attn_vit_{size}_patch16_224": transformer_cfg(mean=IMAGENET_INCEPTION_MEAN, std=IMAGENET_INCEPTION_STD)
        for size in WIDTHS
    }
)


def _create(name: str, pretrained: bool, options: dict[str, Any]) -> VisionTransformer:
    """Create a ViT of timm whose attention takes the ``options`` of :func:`vit_attention`."""
    width, heads = WIDTHS[name.split("_")[2]]
    ours = {name: options.pop(name) for name in OPTIONS if name in options}
    arguments: dict[str, Any] = dict(patch_size=16, embed_dim=width, depth=12, num_heads=heads)
    arguments["attn_layer"] = vit_attention("ViTAttention", **{"attention_type": "1111", **ours})
    return build_model_with_cfg(
        VisionTransformer,
        name,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=options.pop("out_indices", 3), feature_cls="getter"),
        **{**arguments, **options},
    )


@register_model
def attn_vit_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """Create ViT-Tiny with all four attention terms, or those of ``attention_type`` and related options."""
    return _create("attn_vit_tiny_patch16_224", pretrained, kwargs)


@register_model
def attn_vit_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """Create ViT-Small with all four attention terms, or those of ``attention_type`` and related options."""
    return _create("attn_vit_small_patch16_224", pretrained, kwargs)


@register_model
def attn_vit_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """Create ViT-Base with all four attention terms, or those of ``attention_type`` and related options."""
    return _create("attn_vit_base_patch16_224", pretrained, kwargs)
