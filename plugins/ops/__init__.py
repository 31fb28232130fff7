"""Operators, one per key region: functionals, schemas' fake functions, gradients and FLOP formulas."""

from .criss_cross.criss_cross_attention import criss_cross_attention
from .everywhere.global_attention import global_attention
from .everywhere.sequence_attention import sequence_attention
from .sampled.deform_conv import deform_conv1d, deform_conv2d
from .window.window_attention import window_attention

__all__ = [
    "criss_cross_attention",
    "deform_conv1d",
    "deform_conv2d",
    "global_attention",
    "sequence_attention",
    "window_attention",
]
