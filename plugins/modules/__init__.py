"""Attention modules: toolkit-free ``nn.Module``s, one idea a file."""

from .deformable_conv import DeformableConv1d, DeformableConv2d
from .generalized_attention import GeneralizedAttention2d

__all__ = ["DeformableConv1d", "DeformableConv2d", "GeneralizedAttention2d"]
