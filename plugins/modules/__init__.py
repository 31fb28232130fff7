"""Attention modules: toolkit-free ``nn.Module``s, one idea per file.

All take ``device`` and ``dtype`` by keyword. ``reset_parameters()`` initializes a module's own parameters and its
projections. For a model created on the ``meta`` device, call it on children before parents, as ``model.apply`` does::

    model.to_empty(device="cuda")
    model.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
"""

from .captioning.entangled_attention import EntangledAttention, GatedBilateralController, Modality
from .captioning.eta_transformer import DualWayEncoder, MultimodalDecoderBlock
from .captioning.gated_conv import GatedConvBlock
from .captioning.show_attend_tell import ShowAttendTell
from .common.capture import attention_layers, capture_attention
from .common.sequence_cache import SequenceCache
from .maps.augmented_conv import AAConv2d
from .maps.bilateral import BilateralCrissCross2d, BilateralNonLocal2d
from .maps.criss_cross import CrissCrossAttention2d
from .maps.deformable_conv import CausalDeformableConv1d, DeformableConv1d, DeformableConv2d
from .maps.dynamic_conv import DynamicConv1d, DynamicConv2d
from .maps.generalized_attention import GeneralizedAttention2d
from .maps.local_bilateral import LocalBilateralConv2d
from .maps.neighborhood import NeighborhoodAttention1d, NeighborhoodAttention2d
from .maps.non_local import NonLocal2d
from .maps.non_local_1d_3d import NonLocal1d, NonLocal3d
from .maps.vit_adapter import ViTAdapter
from .maps.vit_pyramid import ViTPyramid
from .sequences.alignment_attention import AlignmentAttention
from .sequences.attended_lstm import AttendedLSTM
from .sequences.bilateral_1d import BilateralSelfAttention
from .sequences.multihead_attention import MultiheadAttention
from .sequences.relative_attention_1d import RelativeSelfAttention
from .sequences.spatial_attention_1d import MultiheadSpatialAttention
from .tokens.deformable_attention import MultiScaleDeformableAttention
from .tokens.space_time_attention import SpaceTimeSelfAttention
from .tokens.spatial_self_attention import SpatialSelfAttention
from .tokens.window_self_attention import WindowSelfAttention

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
    "NeighborhoodAttention1d",
    "NeighborhoodAttention2d",
    "NonLocal1d",
    "NonLocal2d",
    "NonLocal3d",
    "RelativeSelfAttention",
    "SequenceCache",
    "ShowAttendTell",
    "SpaceTimeSelfAttention",
    "SpatialSelfAttention",
    "ViTAdapter",
    "ViTPyramid",
    "WindowSelfAttention",
    "attention_layers",
    "capture_attention",
]
