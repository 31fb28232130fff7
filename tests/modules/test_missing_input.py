"""Passing None as the input of a module raises a TypeError that names the argument."""

import pytest

from attn_plugins import modules

LAYERS = {
    "AAConv2d": lambda: modules.AAConv2d.from_ratios(32, 32, 3, kappa=0.25, nu=0.25, input_size=(8, 8)),
    "AlignmentAttention": lambda: modules.AlignmentAttention("dot", 8, 8),
    "BilateralCrissCross2d": lambda: modules.BilateralCrissCross2d(16, kernel_size=5),
    "BilateralNonLocal2d": lambda: modules.BilateralNonLocal2d(16, kernel_size=5),
    "BilateralSelfAttention": lambda: modules.BilateralSelfAttention(16, 2, kernel_size=3),
    "CausalDeformableConv1d": lambda: modules.CausalDeformableConv1d(4, 4, 3),
    "CrissCrossAttention2d": lambda: modules.CrissCrossAttention2d(16),
    "DeformableConv1d": lambda: modules.DeformableConv1d(4, 4, 3),
    "DeformableConv2d": lambda: modules.DeformableConv2d(4, 4, 3),
    "DynamicConv1d": lambda: modules.DynamicConv1d(16, kernel_size=3),
    "DynamicConv2d": lambda: modules.DynamicConv2d(16, kernel_size=3),
    "GeneralizedAttention2d": lambda: modules.GeneralizedAttention2d(16, num_heads=2),
    "LocalBilateralConv2d": lambda: modules.LocalBilateralConv2d(16, 16, 3),
    "MultiheadSpatialAttention": lambda: modules.MultiheadSpatialAttention(16, 2),
    "NonLocal1d": lambda: modules.NonLocal1d(16),
    "NonLocal2d": lambda: modules.NonLocal2d(16),
    "NonLocal3d": lambda: modules.NonLocal3d(16),
    "RelativeSelfAttention": lambda: modules.RelativeSelfAttention(16, 2),
    "WindowSelfAttention": lambda: modules.WindowSelfAttention(16, 2),
}


def test_none_is_a_type_error():
    for name, make in LAYERS.items():
        layer = make()
        arguments = (None, None) if name == "AlignmentAttention" else (None,)
        with pytest.raises(TypeError, match=r"^(x|input|query) must be a Tensor, got NoneType"):
            layer(*arguments)
