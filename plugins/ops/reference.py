"""The slow, obvious definition of every operator, in plain differentiable PyTorch; each is in its region's folder.

The compiled operators must equal these functions; where no binary serves a tensor, these run instead; and
second derivatives come from here. Arguments arrive validated.
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
