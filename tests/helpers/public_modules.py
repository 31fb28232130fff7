"""Small instances of every public module, over which the tests of conventions run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import nn

from attn_plugins import modules
from tests.helpers.tiny_vit import TinyViT

# Arguments by class.
OPTIONS: dict[str, dict[str, Any]] = {
    "AAConv2d": dict(in_channels=6, out_channels=8, kernel_size=3, dk=4, dv=4, num_heads=2, input_size=(5, 7)),
    "AlignmentAttention": dict(score="additive", query_channels=8, source_channels=6),
    "AttendedLSTM": dict(embed_dim=8, num_layers=2),
    "BilateralCrissCross2d": dict(in_channels=16, kernel_size=5),
    "BilateralNonLocal2d": dict(in_channels=16, kernel_size=5),
    "BilateralSelfAttention": dict(embed_dim=16, num_heads=2, kernel_size=3, outside="learned"),
    "CausalDeformableConv1d": dict(in_channels=4, out_channels=4, kernel_size=3),
    "CrissCrossAttention2d": dict(in_channels=16),
    "DeformableConv1d": dict(in_channels=4, out_channels=4, kernel_size=3, padding=1),
    "DeformableConv2d": dict(in_channels=4, out_channels=4, kernel_size=3, padding=1),
    "DualWayEncoder": dict(visual_dim=12, embed_dim=16, num_layers=1, num_heads=2, ffn_dim=8),
    "DynamicConv1d": dict(in_channels=16, kernel_size=3),
    "DynamicConv2d": dict(in_channels=16, kernel_size=3),
    "EntangledAttention": dict(embed_dim=16, num_heads=2),
    "GatedBilateralController": dict(embed_dim=16),
    "GatedConvBlock": dict(embed_dim=8, kernel_size=3),
    "GeneralizedAttention2d": dict(in_channels=16, num_heads=2),
    "LocalBilateralConv2d": dict(in_channels=16, out_channels=16, kernel_size=3),
    "MultiScaleDeformableAttention": dict(embed_dims=16, num_heads=2),
    "MultiheadAttention": dict(embed_dim=16, num_heads=2),
    "MultiheadSpatialAttention": dict(embed_dim=16, num_heads=2),
    "RelativeSelfAttention": dict(embed_dim=16, num_heads=2, max_distance=3),
    "ShowAttendTell": dict(word_dim=8, source_dim=6, hidden_dim=10),
    "SpaceTimeSelfAttention": dict(embed_dim=16, num_heads=2),
    "SpatialSelfAttention": dict(embed_dim=16, num_heads=2),
    "MultimodalDecoderBlock": dict(embed_dim=16, num_heads=2, ffn_dim=8),
    "NeighborhoodAttention1d": dict(in_channels=16, num_heads=2, kernel_size=3),
    "NeighborhoodAttention2d": dict(in_channels=16, num_heads=2, kernel_size=3),
    "NonLocal1d": dict(in_channels=16),
    "NonLocal2d": dict(in_channels=16),
    "NonLocal3d": dict(in_channels=16),
    "ViTAdapter": dict(vit=TinyViT(depth=1), deform_num_heads=2, conv_inplane=4, n_points=2, use_extra_extractor=False),
    "ViTPyramid": dict(vit=TinyViT(depth=1), out_channels=6),
    "WindowSelfAttention": dict(embed_dim=16, num_heads=2, window_size=3),
}
# Of variants, which have other parameters or take other paths, what differs from their class.
OTHERS: dict[str, dict[str, Any]] = {
    "AAConv2d, no attention": dict(dk=0, dv=0),
    "AAConv2d, no convolution": dict(dv=8, position="coordconv"),
    "AAConv2d, pooled": dict(stride=2, pool=True),
    "AAConv2d, sine": dict(in_channels=8, position="sine"),
    "AlignmentAttention, cosine": dict(score="cosine", source_channels=8),
    "AlignmentAttention, dot": dict(score="dot", source_channels=8),
    "AlignmentAttention, general": dict(score="general"),
    "BilateralCrissCross2d, zero": dict(kernel_size=3, outside="zero"),
    "BilateralSelfAttention, causal": dict(outside="zero", causal=True),
    "BilateralSelfAttention, window": dict(outside="-inf"),
    "CausalDeformableConv1d, modulated": dict(modulated=True),
    "CrissCrossAttention2d, relative": dict(position="relative", input_size=(5, 7)),
    "DeformableConv1d, modulated": dict(modulated=True),
    "DeformableConv2d, modulated": dict(modulated=True),
    "DynamicConv1d, causal": dict(causal=True),
    "DynamicConv2d, normalized": dict(norm_layer=nn.BatchNorm2d),
    "GeneralizedAttention2d, normalized": dict(norm_layer=nn.BatchNorm2d),
    "GeneralizedAttention2d, 0010": dict(attention_type="0010"),
    "GeneralizedAttention2d, 0110": dict(attention_type="0110"),
    "GeneralizedAttention2d, range": dict(spatial_range=5),
    "GeneralizedAttention2d, strides": dict(attention_type="0001", q_stride=2, kv_stride=2),
    "LocalBilateralConv2d, refined": dict(stride=2, iterations=3),
    "LocalBilateralConv2d, shared": dict(shared=True),
    "MultiScaleDeformableAttention, ε3": dict(key_saliency=True),
    "MultiheadAttention, causal": dict(causal=True),
    "MultiheadSpatialAttention, causal": dict(causal=True),
    "MultiheadSpatialAttention, 0010": dict(attention_type="0010"),
    "MultiheadSpatialAttention, range": dict(attention_type="0111", attention_range=3),
    "MultimodalDecoderBlock, parallel": dict(fusion="parallel"),
    "MultimodalDecoderBlock, stacked-visual": dict(fusion="stacked-visual"),
    "NeighborhoodAttention1d, dilated": dict(dilation=2),
    "NeighborhoodAttention2d, content": dict(position="none", kernel_size=(5, 3)),
    "NeighborhoodAttention2d, dilated": dict(kernel_size=(3, 2), dilation=(1, 3)),
    "NonLocal1d, gaussian": dict(mode="gaussian", sub_sample=True),
    "NonLocal2d, concatenation": dict(mode="concatenation"),
    "NonLocal2d, dot product": dict(mode="dot_product"),
    "NonLocal2d, normalized": dict(norm_layer=nn.BatchNorm2d),
    "NonLocal2d, relative": dict(position="relative", input_size=(5, 7)),
    "NonLocal2d, sub-sampled": dict(mode="gaussian", sub_sample=True),
    "NonLocal3d, concatenation": dict(mode="concatenation"),
    "RelativeSelfAttention, causal": dict(values=False, causal=True),
    "RelativeSelfAttention, per head": dict(per_head=True),
    "SpaceTimeSelfAttention, axial": dict(pattern="axial", norm_layer=nn.LayerNorm),
    "SpaceTimeSelfAttention, joint": dict(pattern="joint"),
    "SpaceTimeSelfAttention, local_global": dict(pattern="local_global"),
    "SpatialSelfAttention, bilateral": dict(kernel_size=3),
    "WindowSelfAttention, bilateral": dict(shift_size=1, position="table+bilateral"),
    "WindowSelfAttention, centred": dict(position="bilateral", window="centred"),
    "WindowSelfAttention, relative": dict(shift_size=1, position="relative"),
    "WindowSelfAttention, V2": dict(shift_size=1, version="v2"),
}
OPTIONS |= {name: OPTIONS[name.split(",")[0]] | changes for name, changes in OTHERS.items()}


def on_a_vit(name: str, device: Any = None, dtype: Any = None, **changes: Any) -> nn.Module:
    """Build a backbone of a vision transformer of its own."""
    vit = TinyViT(depth=1, device=device, dtype=dtype)
    return getattr(modules, name)(**{**OPTIONS[name], "vit": vit, **changes}, device=device, dtype=dtype)


# Constructors that take device and dtype.
VARIANTS: dict[str, Callable[..., nn.Module]] = {
    **{name: partial(getattr(modules, name.split(",")[0]), **options) for name, options in OPTIONS.items()},
    "GeneralizedAttention2d, as mmcv's": partial(modules.GeneralizedAttention2d.mmcv_compatible, 16, num_heads=2),
    "ViTAdapter": partial(on_a_vit, "ViTAdapter"),
    "ViTPyramid": partial(on_a_vit, "ViTPyramid"),
}
MODULES = {name: build for name, build in VARIANTS.items() if "," not in name}
# Classes that start as the identity.
IDENTITIES = ["BilateralCrissCross2d", "BilateralNonLocal2d", "CrissCrossAttention2d", "DynamicConv2d",
              "GeneralizedAttention2d", "NeighborhoodAttention1d", "NeighborhoodAttention2d",
              "NonLocal1d", "NonLocal2d", "NonLocal3d"]  # fmt: skip


def often(*names: str, seldom: tuple[str, ...] = (), never: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Parametrize a costly test by these variants, and by others and one of every class where slow tests run."""
    others = [*seldom, *(name for name in MODULES if name not in (*names, *seldom, *never))]
    return pytest.mark.parametrize("name", [*names, *(pytest.param(name, marks=pytest.mark.slow) for name in others)])


def public_modules() -> dict[str, Any]:
    """Return the module classes that the package exports."""
    exported = {name: getattr(modules, name) for name in modules.__all__}
    return {name: kind for name, kind in exported.items() if isinstance(kind, type) and issubclass(kind, nn.Module)}
