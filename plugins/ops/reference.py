"""Definitions of all operators in plain, differentiable PyTorch: slow, obvious, and one in each region's folder.

Every backend must equal these functions, and second derivatives are those of these functions. Their arguments are
already checked.
"""

from .criss_cross.reference import criss_cross_attention, criss_cross_logits, criss_cross_probabilities
from .everywhere.reference import (
    global_attention,
    global_attention_logits,
    global_attention_probabilities,
    sequence_attention,
    sequence_attention_logits,
    sequence_attention_probabilities,
)
from .sampled.reference import bilinear_samples, deform_conv2d
from .softmax import masked_softmax
from .window.reference import Windows, window_attention, window_attention_logits, window_attention_probabilities

__all__ = [
    "Windows",
    "bilinear_samples",
    "criss_cross_attention",
    "criss_cross_logits",
    "criss_cross_probabilities",
    "deform_conv2d",
    "global_attention",
    "global_attention_logits",
    "global_attention_probabilities",
    "masked_softmax",
    "sequence_attention",
    "sequence_attention_logits",
    "sequence_attention_probabilities",
    "window_attention",
    "window_attention_logits",
    "window_attention_probabilities",
]
