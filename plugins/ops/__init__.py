"""Operators, one per key region: functionals, schemas' fake functions, gradients and FLOP formulas."""

from .deform_conv import deform_conv1d, deform_conv2d
from .global_attention import global_attention
from .window_attention import window_attention

__all__ = ["deform_conv1d", "deform_conv2d", "global_attention", "window_attention"]
