"""Every public module at a realistic size, on CUDA beside itself on the operators' definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attn_plugins import modules
from attn_plugins.modules import Modality
from attn_plugins.modules.captioning.entangled_attention import Entangled

from ..case import DEFINITIONS, Case, problem

B, T, S, C = 4, 32, 36, 512  # captions: batch, words, regions, channels
STEPWISE = ("AttendedLSTM", "ShowAttendTell")  # a loop over words, which takes minutes to compile
LEVELS = ((100, 134), (50, 67), (25, 34), (13, 17))  # of an image of 800 x 1072


def map2d(channels: int = 256, height: int = 50, width: int = 68, batch: int = 2) -> tuple[Tensor]:
    return (torch.randn(batch, channels, height, width),)


def tokens(length: int = 512) -> tuple[Tensor]:
    return (torch.randn(B, length, C),)


def words(count: int = 1) -> list[Tensor]:
    return [torch.randn(B, T, C) for _ in range(count)]


def both() -> tuple[Modality, Modality]:
    return Modality(torch.randn(B, S, C)), Modality(torch.randn(B, 12, C))


def on_grid(layer: nn.Module) -> nn.Module:
    layer.forward = lambda x, forward=layer.forward: forward(x, grid=(14, 14))
    return layer


def on_levels(layer: nn.Module) -> nn.Module:
    layer.forward = lambda query, value, reference, forward=layer.forward: forward(
        query, value=value, reference_points=reference, spatial_shapes=LEVELS
    )
    return layer


def deformable() -> tuple[Tensor, ...]:
    keys = sum(h * w for h, w in LEVELS)
    return torch.randn(keys, 1, 256), torch.randn(keys, 1, 256), torch.rand(1, keys, 4, 2)


def on_a_vit(build: Callable[..., nn.Module]) -> nn.Module:
    """Build a backbone of timm's ViT-S."""
    import timm

    return build(timm.create_model("vit_small_patch16_224", dynamic_img_size=True, num_classes=0))


# Modules and their inputs, by name.
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "AAConv2d": (lambda: modules.AAConv2d(256, 256, 3, 160, 24, 8, input_size=14), lambda: map2d(256, 14, 14, 32)),
    "AlignmentAttention": (
        lambda: modules.AlignmentAttention("additive", C), lambda: (*words(), torch.randn(B, S, C)),
    ),
    "AttendedLSTM": (lambda: modules.AttendedLSTM(C), lambda: (*words(), torch.randn(B, S, C))),
    "BilateralCrissCross2d": (lambda: modules.BilateralCrissCross2d(512), lambda: map2d(512, 97, 97, 1)),
    "BilateralNonLocal2d": (lambda: modules.BilateralNonLocal2d(512), lambda: map2d(512, 64, 64, 1)),
    "BilateralSelfAttention": (lambda: modules.BilateralSelfAttention(C, 8), tokens),
    "CausalDeformableConv1d": (lambda: modules.CausalDeformableConv1d(C, C, 3), lambda: (torch.randn(8, C, 512),)),
    "CrissCrossAttention2d": (lambda: modules.CrissCrossAttention2d(512), lambda: map2d(512, 97, 97, 1)),
    "DeformableConv1d": (lambda: modules.DeformableConv1d(C, C, 3, padding=1), lambda: (torch.randn(8, C, 512),)),
    "DeformableConv2d": (lambda: modules.DeformableConv2d(256, 256, 3, padding=1, modulated=True), map2d),
    "DualWayEncoder": (
        lambda: modules.DualWayEncoder(2048, C, 3), lambda: (torch.randn(B, S, 2048), torch.randn(B, 12, C)),
    ),
    "DynamicConv1d": (lambda: modules.DynamicConv1d(C, 31), lambda: (torch.randn(8, C, 512),)),
    "DynamicConv2d": (lambda: modules.DynamicConv2d(256, 7), map2d),
    "EntangledAttention": (lambda: modules.EntangledAttention(C, 8), lambda: (*words(), *both())),
    "GatedBilateralController": (
        lambda: modules.GatedBilateralController(C), lambda: (Entangled(*words(4)), *words()),
    ),
    "GatedConvBlock": (lambda: modules.GatedConvBlock(C), lambda: (*words(2), torch.randn(B, S, C))),
    "GeneralizedAttention2d": (lambda: modules.GeneralizedAttention2d(256, 8, kv_stride=2), map2d),
    "GeneralizedAttention2d, 0010": (lambda: modules.GeneralizedAttention2d(256, 8, "0010"), map2d),
    "LocalBilateralConv2d": (lambda: modules.LocalBilateralConv2d(256, 256, 7), lambda: map2d(256, 56, 56, 8)),
    "MultiScaleDeformableAttention": (
        lambda: on_levels(modules.MultiScaleDeformableAttention(256, 8, dropout=0.0)), deformable,
    ),
    "MultiheadAttention": (lambda: modules.MultiheadAttention(C, 8), tokens),
    "MultiheadSpatialAttention": (lambda: modules.MultiheadSpatialAttention(C, 8), tokens),
    "MultimodalDecoderBlock": (lambda: modules.MultimodalDecoderBlock(C, 8), lambda: (*words(), *both())),
    "NeighborhoodAttention1d": (lambda: modules.NeighborhoodAttention1d(C, 8), lambda: (torch.randn(B, C, 512),)),
    "NeighborhoodAttention2d": (lambda: modules.NeighborhoodAttention2d(256, 8), lambda: map2d(256, 56, 56, 8)),
    "NonLocal1d": (lambda: modules.NonLocal1d(C), lambda: (torch.randn(B, C, 512),)),
    "NonLocal2d": (lambda: modules.NonLocal2d(512), lambda: map2d(512, 64, 64, 1)),
    "NonLocal3d": (lambda: modules.NonLocal3d(256), lambda: (torch.randn(1, 256, 8, 28, 28),)),
    "RelativeSelfAttention": (lambda: modules.RelativeSelfAttention(C, 8), tokens),
    "ShowAttendTell": (lambda: modules.ShowAttendTell(C, C, C), lambda: (*words(), torch.randn(B, S, C))),
    "SpaceTimeSelfAttention": (
        lambda: modules.SpaceTimeSelfAttention(384, 6), lambda: (torch.randn(2, 1 + 8 * 196, 384), (8, 14, 14), 1),
    ),
    "SpatialSelfAttention": (
        lambda: on_grid(modules.SpatialSelfAttention(384, 6)), lambda: (torch.randn(32, 196, 384),),
    ),
    "ViTAdapter": (lambda: on_a_vit(modules.ViTAdapter), lambda: map2d(3, 512, 512)),
    "ViTPyramid": (lambda: on_a_vit(modules.ViTPyramid), lambda: map2d(3, 512, 512)),
    "WindowSelfAttention": (
        lambda: modules.WindowSelfAttention(96, 3, 7, 3), lambda: (torch.randn(16, 56, 56, 96),),
    ),
}  # fmt: skip


def opened(module: nn.Module) -> nn.Module:
    """Draw zero-initialized parameters (gates, gamma, offsets), so that no work is skipped and samples spread."""
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.05)
    return module


def cases(device: str) -> list[Case]:
    rows = []
    for name, (make, draw) in MODULES.items():

        def inputs(dtype: torch.dtype, draw: Callable[[], Any] = draw) -> Any:
            return pytree.tree_map_only(Tensor, lambda t: t.to(dtype), draw())

        for main, passes in ((True, "forward+backward"), (False, "forward")):
            rows += problem(
                name,
                device,
                inputs,
                lambda make=make: opened(make()),
                kinds=("float32",) if device == "cpu" else ("bfloat16", "float32"),
                passes=(passes,),
                definitions=DEFINITIONS[:1] if name in STEPWISE else DEFINITIONS[: 2 if main else 3],
                main=main,
            )
    return rows
