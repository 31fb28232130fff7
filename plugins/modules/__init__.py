"""Attention modules: toolkit-free ``nn.Module``s, one idea a file."""

from .deformable_conv import DeformableConv1d, DeformableConv2d

__all__ = ["DeformableConv1d", "DeformableConv2d"]
