"""Inputs for every module of :mod:`tests.helpers.public_modules`: maps with H ≠ W, and padding masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attn_plugins.modules import Modality
from attn_plugins.modules.captioning.entangled_attention import Entangled

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments
B, T, S = 2, 9, 6  # batch, words, regions
LEVELS = ((5, 7), (3, 4), (2, 3), (1, 2))
# What predicted position logits are outside of their window, and their smoothing.
OUTSIDE = [
    (outside, smoothing)
    for outside in ("learned", "zero", "min", "mean", "-inf")
    for smoothing in ("zscore", "sqrt_d")
    if (outside, smoothing) != ("-inf", "zscore")
]


def drawn(module: nn.Module, std: float = 0.7, seed: int = 0) -> nn.Module:
    """Draw every parameter at random, always the same; return the module. What is drawn next is the same as well."""
    torch.manual_seed(seed)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module


def mask(length: int) -> Tensor:
    """Return a padding mask for two sequences; the last two positions of the second are padding."""
    padding = torch.zeros(B, length, dtype=torch.bool)
    padding[1, -2:] = True
    return padding


def sources() -> tuple[Modality, Modality]:
    return Modality(torch.randn(B, S, 16), mask(S)), Modality(torch.randn(B, 4, 16))


def over(*shape: int) -> Callable[[], Call]:
    return lambda: ((torch.randn(B, *shape),), {})


def padded(channels: int) -> Callable[[], Call]:
    return lambda: ((torch.randn(B, T, channels),), {"key_padding_mask": mask(T)})


def deformable() -> Call:
    value = torch.randn(sum(h * w for h, w in LEVELS), B, 16)
    return (torch.randn(T, B, 16),), dict(value=value, reference_points=torch.rand(B, T, 4, 2), spatial_shapes=LEVELS)


# Inputs by name of the variant, else of the class. Maps are 5 × 7.
ON_MAPS = ("BilateralCrissCross2d", "BilateralNonLocal2d", "CrissCrossAttention2d", "DynamicConv2d",
           "GeneralizedAttention2d", "LocalBilateralConv2d", "NeighborhoodAttention2d", "NonLocal2d")  # fmt: skip
ON_WORDS = ("BilateralSelfAttention", "MultiheadAttention", "MultiheadSpatialAttention", "RelativeSelfAttention")
INPUTS: dict[str, Callable[[], Call]] = {
    **dict.fromkeys(ON_MAPS, over(16, 5, 7)),
    **dict.fromkeys(ON_WORDS, padded(16)),
    "AAConv2d": over(6, 5, 7),
    "AAConv2d, sine": over(8, 5, 7),
    "AlignmentAttention": lambda: ((torch.randn(B, T, 8), torch.randn(B, S, 6), mask(S)), {}),
    "AlignmentAttention, cosine": lambda: ((torch.randn(B, T, 8), torch.randn(B, S, 8), mask(S)), {}),
    "AlignmentAttention, dot": lambda: ((torch.randn(B, T, 8), torch.randn(B, S, 8), mask(S)), {}),
    "AttendedLSTM": lambda: ((torch.randn(B, 4, 8), torch.randn(B, S, 8), mask(S)), {}),
    "CausalDeformableConv1d": over(4, T),
    "DeformableConv1d": over(4, T),
    "DeformableConv2d": over(4, 5, 7),
    "DualWayEncoder": lambda: ((torch.randn(B, S, 12), torch.randn(B, 4, 16), mask(S)), {}),
    "DynamicConv1d": lambda: ((torch.randn(B, 16, T),), {"key_padding_mask": mask(T)}),
    "EntangledAttention": lambda: ((torch.randn(B, T, 16), *sources()), {}),
    "GatedBilateralController": lambda: (
        (Entangled(*(torch.randn(B, T, 16) for _ in range(4))), torch.randn(B, T, 16)),
        {},
    ),
    "GatedConvBlock": lambda: ((torch.randn(B, T, 8), torch.randn(B, T, 8), torch.randn(B, S, 8), mask(S)), {}),
    "MultiScaleDeformableAttention": deformable,
    "MultimodalDecoderBlock": lambda: ((torch.randn(B, T, 16), *sources(), mask(T)), {}),
    "NeighborhoodAttention1d": over(16, T),
    "NonLocal1d": over(16, T),
    "NonLocal3d": over(16, 3, 4, 5),
    "ShowAttendTell": lambda: ((torch.randn(B, 4, 8), torch.randn(B, S, 6), mask(S)), {}),
    "SpaceTimeSelfAttention": lambda: ((torch.randn(B, 1 + 4 * 2 * 6, 16), (4, 2, 6), 1), {}),
    "SpatialSelfAttention": lambda: ((torch.randn(B, 2 + 35, 16),), {"grid": (5, 7), "prefix_tokens": 2}),
    "ViTAdapter": over(3, 20, 40),
    "ViTPyramid": over(3, 20, 40),
    "WindowSelfAttention": over(7, 8, 16),
}


def inputs(name: str, seed: int = 0) -> Call:
    """Return the arguments of one of ``VARIANTS``, in float32 on the CPU."""
    torch.manual_seed(seed)
    return (INPUTS.get(name) or INPUTS[name.split(",")[0]])()
