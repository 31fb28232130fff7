"""Definitions of all operators in plain, differentiable PyTorch: slow, obvious, and one in each operator's folder.

Every backend must equal these functions, and second derivatives are those of these functions. Their arguments are
already checked.
"""

from ..core.sampling import bilinear_samples
from ..core.softmax import masked_softmax
from .criss_cross_attention.reference import criss_cross_attention, criss_cross_logits, criss_cross_probabilities
from .deform_conv.reference import deform_conv2d
from .deformable_attention.reference import deformable_attention
from .global_attention.reference import global_attention, global_attention_logits, global_attention_probabilities
from .sequence_attention.reference import (
    sequence_attention,
    sequence_attention_logits,
    sequence_attention_probabilities,
)
from .window_attention.reference import (
    Windows,
    window_attention,
    window_attention_logits,
    window_attention_probabilities,
)

__all__ = [
    "Windows",
    "bilinear_samples",
    "criss_cross_attention",
    "criss_cross_logits",
    "criss_cross_probabilities",
    "deform_conv2d",
    "deformable_attention",
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
