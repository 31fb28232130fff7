"""Operators, one folder per key region; :func:`explain` reports the backend of a call, :func:`backend` selects it."""

from .backends import backend, explain
from .criss_cross.criss_cross_attention import criss_cross_attention
from .everywhere.global_attention import global_attention
from .everywhere.sequence_attention import sequence_attention
from .sampled.deform_conv import deform_conv1d, deform_conv2d
from .sampled.deformable_attention import deformable_attention
from .window.window_attention import window_attention

__all__ = [
    "backend",
    "criss_cross_attention",
    "deform_conv1d",
    "deform_conv2d",
    "deformable_attention",
    "explain",
    "global_attention",
    "sequence_attention",
    "window_attention",
]
