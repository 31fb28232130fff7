"""Attention modules: toolkit-free ``nn.Module``s, one idea per file.

All take ``device`` and ``dtype`` by keyword. ``reset_parameters()`` initialises a module's own parameters and its
projections. For a model created on the ``meta`` device, call it on children before parents, as ``model.apply`` does::

    model.to_empty(device="cuda")
    model.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
"""

from .alignment_attention import AlignmentAttention
from .attended_lstm import AttendedLSTM
from .augmented_conv import AAConv2d
from .bilateral import BilateralCrissCross2d, BilateralNonLocal2d
from .bilateral_1d import BilateralSelfAttention
from .capture import attention_layers, capture_attention
from .criss_cross import CrissCrossAttention2d
from .deformable_attention import MultiScaleDeformableAttention
from .deformable_conv import CausalDeformableConv1d, DeformableConv1d, DeformableConv2d
from .dynamic_conv import DynamicConv1d, DynamicConv2d
from .entangled_attention import EntangledAttention, GatedBilateralController, Modality
from .eta_transformer import DualWayEncoder, MultimodalDecoderBlock
from .gated_conv import GatedConvBlock
from .generalized_attention import GeneralizedAttention2d
from .local_bilateral import LocalBilateralConv2d
from .multihead_attention import MultiheadAttention
from .non_local import NonLocal2d
from .non_local_1d_3d import NonLocal1d, NonLocal3d
from .relative_attention_1d import RelativeSelfAttention
from .sequence_cache import SequenceCache
from .show_attend_tell import ShowAttendTell
from .space_time_attention import SpaceTimeSelfAttention
from .spatial_attention_1d import MultiheadSpatialAttention
from .spatial_self_attention import SpatialSelfAttention
from .window_self_attention import WindowSelfAttention

__all__ = [
    "AAConv2d",
    "AlignmentAttention",
    "AttendedLSTM",
    "BilateralCrissCross2d",
    "BilateralNonLocal2d",
    "BilateralSelfAttention",
    "CausalDeformableConv1d",
    "CrissCrossAttention2d",
    "DeformableConv1d",
    "DeformableConv2d",
    "DualWayEncoder",
    "DynamicConv1d",
    "DynamicConv2d",
    "EntangledAttention",
    "GatedBilateralController",
    "GatedConvBlock",
    "GeneralizedAttention2d",
    "LocalBilateralConv2d",
    "Modality",
    "MultiScaleDeformableAttention",
    "MultiheadAttention",
    "MultiheadSpatialAttention",
    "MultimodalDecoderBlock",
    "NonLocal1d",
    "NonLocal2d",
    "NonLocal3d",
    "RelativeSelfAttention",
    "SequenceCache",
    "ShowAttendTell",
    "SpaceTimeSelfAttention",
    "SpatialSelfAttention",
    "WindowSelfAttention",
    "attention_layers",
    "capture_attention",
]
