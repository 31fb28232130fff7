"""Operators, a folder each; :func:`explain` reports the backend of a call, :func:`backend` selects it."""

from ..core import counters
from ..core.backends import backend, explain
from ..core.onednn import use_onednn
from .criss_cross_attention.criss_cross_attention import criss_cross_attention
from .deform_conv.deform_conv import deform_conv1d, deform_conv2d
from .deformable_attention.deformable_attention import deformable_attention
from .global_attention.global_attention import global_attention
from .sequence_attention.sequence_attention import sequence_attention
from .window_attention.window_attention import window_attention

__all__ = [
    "backend",
    "criss_cross_attention",
    "deform_conv1d",
    "deform_conv2d",
    "deformable_attention",
    "explain",
    "global_attention",
    "sequence_attention",
    "use_onednn",
    "window_attention",
]

counters.register()
