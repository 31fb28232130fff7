"""Small instances of every public module, over which the tests of conventions run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from attn_plugins import modules

Build = Callable[..., nn.Module]  # called with device and dtype

MODULES: dict[str, Build] = {
    "AAConv2d": lambda **f: modules.AAConv2d(6, 8, 3, dk=4, dv=4, num_heads=2, input_size=(5, 7), **f),
    "AlignmentAttention": lambda **f: modules.AlignmentAttention("additive", 8, 6, **f),
    "AttendedLSTM": lambda **f: modules.AttendedLSTM(8, ("visual", "semantic"), num_layers=2, **f),
    "BilateralCrissCross2d": lambda **f: modules.BilateralCrissCross2d(16, kernel_size=5, **f),
    "BilateralNonLocal2d": lambda **f: modules.BilateralNonLocal2d(16, kernel_size=5, **f),
    "BilateralSelfAttention": lambda **f: modules.BilateralSelfAttention(16, 2, kernel_size=3, outside="learned", **f),
    "CausalDeformableConv1d": lambda **f: modules.CausalDeformableConv1d(4, 4, 3, **f),
    "CrissCrossAttention2d": lambda **f: modules.CrissCrossAttention2d(16, **f),
    "DeformableConv1d": lambda **f: modules.DeformableConv1d(4, 4, 3, padding=1, **f),
    "DeformableConv2d": lambda **f: modules.DeformableConv2d(4, 4, 3, padding=1, **f),
    "DualWayEncoder": lambda **f: modules.DualWayEncoder(12, 16, num_layers=1, num_heads=2, ffn_dim=8, **f),
    "DynamicConv1d": lambda **f: modules.DynamicConv1d(16, kernel_size=3, **f),
    "DynamicConv2d": lambda **f: modules.DynamicConv2d(16, kernel_size=3, **f),
    "EntangledAttention": lambda **f: modules.EntangledAttention(16, 2, **f),
    "GatedBilateralController": lambda **f: modules.GatedBilateralController(16, **f),
    "GatedConvBlock": lambda **f: modules.GatedConvBlock(8, 3, ("visual", "semantic"), **f),
    "GeneralizedAttention2d": lambda **f: modules.GeneralizedAttention2d(16, num_heads=2, **f),
    "LocalBilateralConv2d": lambda **f: modules.LocalBilateralConv2d(16, 16, 3, **f),
    "MultiScaleDeformableAttention": lambda **f: modules.MultiScaleDeformableAttention(16, 2, **f),
    "MultiheadAttention": lambda **f: modules.MultiheadAttention(16, 2, **f),
    "MultiheadSpatialAttention": lambda **f: modules.MultiheadSpatialAttention(16, 2, **f),
    "RelativeSelfAttention": lambda **f: modules.RelativeSelfAttention(16, 2, max_distance=3, **f),
    "ShowAttendTell": lambda **f: modules.ShowAttendTell(8, 6, 10, **f),
    "SpaceTimeSelfAttention": lambda **f: modules.SpaceTimeSelfAttention(16, 2, **f),
    "SpatialSelfAttention": lambda **f: modules.SpatialSelfAttention(16, 2, **f),
    "MultimodalDecoderBlock": lambda **f: modules.MultimodalDecoderBlock(16, 2, ffn_dim=8, **f),
    "NonLocal1d": lambda **f: modules.NonLocal1d(16, **f),
    "NonLocal2d": lambda **f: modules.NonLocal2d(16, **f),
    "NonLocal3d": lambda **f: modules.NonLocal3d(16, **f),
    "WindowSelfAttention": lambda **f: modules.WindowSelfAttention(16, 2, 3, **f),
}

# Arguments that give a module other parameters than above.
VARIANTS: dict[str, Build] = {
    **MODULES,
    "MultiScaleDeformableAttention, ε3": lambda **f: modules.MultiScaleDeformableAttention(
        16, 2, key_saliency=True, **f
    ),
    "SpaceTimeSelfAttention, axial": lambda **f: modules.SpaceTimeSelfAttention(
        16, 2, "axial", norm_layer=nn.LayerNorm, **f
    ),
    "SpatialSelfAttention, bilateral": lambda **f: modules.SpatialSelfAttention(16, 2, kernel_size=3, **f),
    "AAConv2d, no attention": lambda **f: modules.AAConv2d(6, 8, 3, dk=0, dv=0, num_heads=2, **f),
    "AAConv2d, no convolution": lambda **f: modules.AAConv2d(6, 8, 3, 4, 8, 2, position="coordconv", **f),
    "AlignmentAttention, general": lambda **f: modules.AlignmentAttention("general", 8, 6, **f),
    "CrissCrossAttention2d, relative": lambda **f: modules.CrissCrossAttention2d(
        16, position="relative", input_size=(5, 7), **f
    ),
    "DeformableConv2d, modulated": lambda **f: modules.DeformableConv2d(4, 4, 3, modulated=True, padding=1, **f),
    "GeneralizedAttention2d, as mmcv's": lambda **f: modules.GeneralizedAttention2d.mmcv_compatible(
        16, num_heads=2, **f
    ),
    "LocalBilateralConv2d, shared": lambda **f: modules.LocalBilateralConv2d(16, 16, 3, shared=True, **f),
    "NonLocal2d, concatenation": lambda **f: modules.NonLocal2d(16, mode="concatenation", **f),
    "NonLocal2d, normalised": lambda **f: modules.NonLocal2d(16, norm_layer=nn.BatchNorm2d, **f),
    "NonLocal2d, relative": lambda **f: modules.NonLocal2d(16, position="relative", input_size=(5, 7), **f),
    "RelativeSelfAttention, per head": lambda **f: modules.RelativeSelfAttention(16, 2, 3, per_head=True, **f),
    "AAConv2d, pooled": lambda **f: modules.AAConv2d(6, 8, 3, 4, 4, 2, stride=2, pool=True, input_size=(5, 7), **f),
    "AAConv2d, sine": lambda **f: modules.AAConv2d(8, 8, 3, 4, 4, 2, position="sine", **f),
    "AlignmentAttention, cosine": lambda **f: modules.AlignmentAttention("cosine", 8, 8, **f),
    "AlignmentAttention, dot": lambda **f: modules.AlignmentAttention("dot", 8, 8, **f),
    "BilateralCrissCross2d, zero": lambda **f: modules.BilateralCrissCross2d(16, kernel_size=3, outside="zero", **f),
    "BilateralSelfAttention, causal": lambda **f: modules.BilateralSelfAttention(
        16, 2, kernel_size=3, outside="zero", causal=True, **f
    ),
    "BilateralSelfAttention, window": lambda **f: modules.BilateralSelfAttention(16, 2, 3, outside="-inf", **f),
    "CausalDeformableConv1d, modulated": lambda **f: modules.CausalDeformableConv1d(4, 4, 3, modulated=True, **f),
    "DeformableConv1d, modulated": lambda **f: modules.DeformableConv1d(4, 4, 3, padding=1, modulated=True, **f),
    "DynamicConv1d, causal": lambda **f: modules.DynamicConv1d(16, kernel_size=3, causal=True, **f),
    "DynamicConv2d, normalised": lambda **f: modules.DynamicConv2d(16, 3, norm_layer=nn.BatchNorm2d, **f),
    "GeneralizedAttention2d, normalised": lambda **f: modules.GeneralizedAttention2d(
        16, 2, norm_layer=nn.BatchNorm2d, **f
    ),
    "GeneralizedAttention2d, 0010": lambda **f: modules.GeneralizedAttention2d(16, 2, "0010", **f),
    "GeneralizedAttention2d, 0110": lambda **f: modules.GeneralizedAttention2d(16, 2, "0110", **f),
    "GeneralizedAttention2d, range": lambda **f: modules.GeneralizedAttention2d(16, 2, spatial_range=5, **f),
    "GeneralizedAttention2d, strides": lambda **f: modules.GeneralizedAttention2d(
        16, 2, "0001", q_stride=2, kv_stride=2, **f
    ),
    "LocalBilateralConv2d, refined": lambda **f: modules.LocalBilateralConv2d(16, 16, 3, 2, iterations=3, **f),
    "MultiheadAttention, causal": lambda **f: modules.MultiheadAttention(16, 2, causal=True, **f),
    "MultiheadSpatialAttention, causal": lambda **f: modules.MultiheadSpatialAttention(16, 2, causal=True, **f),
    "MultiheadSpatialAttention, 0010": lambda **f: modules.MultiheadSpatialAttention(16, 2, "0010", **f),
    "MultiheadSpatialAttention, range": lambda **f: modules.MultiheadSpatialAttention(
        16, 2, "0111", attention_range=3, **f
    ),
    "MultimodalDecoderBlock, parallel": lambda **f: modules.MultimodalDecoderBlock(
        16, 2, ffn_dim=8, fusion="parallel", **f
    ),
    "MultimodalDecoderBlock, stacked-visual": lambda **f: modules.MultimodalDecoderBlock(
        16, 2, ffn_dim=8, fusion="stacked-visual", **f
    ),
    "NonLocal1d, gaussian": lambda **f: modules.NonLocal1d(16, mode="gaussian", sub_sample=True, **f),
    "NonLocal2d, dot product": lambda **f: modules.NonLocal2d(16, mode="dot_product", **f),
    "NonLocal2d, sub-sampled": lambda **f: modules.NonLocal2d(16, mode="gaussian", sub_sample=True, **f),
    "NonLocal3d, concatenation": lambda **f: modules.NonLocal3d(16, mode="concatenation", **f),
    "RelativeSelfAttention, causal": lambda **f: modules.RelativeSelfAttention(
        16, 2, 3, values=False, causal=True, **f
    ),
    "SpaceTimeSelfAttention, joint": lambda **f: modules.SpaceTimeSelfAttention(16, 2, "joint", **f),
    "SpaceTimeSelfAttention, local_global": lambda **f: modules.SpaceTimeSelfAttention(16, 2, "local_global", **f),
    "WindowSelfAttention, relative": lambda **f: modules.WindowSelfAttention(16, 2, 3, 1, position="relative", **f),
    "WindowSelfAttention, bilateral": lambda **f: modules.WindowSelfAttention(
        16, 2, 3, 1, position="table+bilateral", **f
    ),
    "WindowSelfAttention, centred": lambda **f: modules.WindowSelfAttention(
        16, 2, 3, position="bilateral", window="centred", **f
    ),
    "WindowSelfAttention, V2": lambda **f: modules.WindowSelfAttention(16, 2, 3, 1, "v2", **f),
}


def public_modules() -> dict[str, Any]:
    """Return the module classes that the package exports."""
    exported = {name: getattr(modules, name) for name in modules.__all__}
    return {name: kind for name, kind in exported.items() if isinstance(kind, type) and issubclass(kind, nn.Module)}
