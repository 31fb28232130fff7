"""Adapter for mmdet, mmsegmentation and related toolkits: registers layers and data sets in mmengine's root registries.

One line in any config is enough::

    custom_imports = dict(imports=["attn_plugins.mmcv"], allow_failed_imports=False)

================================ =======================================================================
``GeneralizedAttention2d``       plug-in layer: ``plugins=[dict(cfg=dict(type=...), position=...)]``
``DeformableConv2d``             convolution: ``dcn=dict(type=...)`` and ``conv_cfg=dict(type=...)``
``DeformableConv1d``             convolution: ``conv_cfg=dict(type=...)``
``AAConv2d``                     convolution: ``conv_cfg=dict(type=..., kappa=..., nu=...)``
``LocalBilateralConv2d``         convolution: ``conv_cfg=dict(type=..., num_heads=8)``
``DynamicConv2d``                plug-in layer, like ``GeneralizedAttention2d``
``BilateralNonLocal2d``          plug-in layer; ``decode_head=dict(type='NonLocalAttentionHead', attention=...)``
``BilateralCrissCross2d``        plug-in layer; ``decode_head=dict(type='AttentionHead', attention=...)``
``CrissCrossAttention2d``        plug-in layer, content alone or with relative positions
``NeighborhoodAttention2d, …1d`` plug-in layers with windows that stay inside the map, as NATTEN's
``NonLocalAttention2d``          :class:`attn_plugins.modules.NonLocal2d`, a plug-in layer
``NonLocalAttention1d, …3d``     :class:`attn_plugins.modules.NonLocal1d` and ``NonLocal3d``, for sequences and clips
``AttentionHead`` and others     segmentation heads, see :mod:`.heads`; need mmsegmentation
``AAResNet``                     backbone: ``backbone=dict(type=..., depth=50)``; needs timm
``ViTAdapter``                   backbone: any vision transformer of timm, ``backbone=dict(type=..., vit=name)``
``ViTPyramid``                   the same with the simple feature pyramid of ViTDet, see :mod:`.vit`
``Attended``                     any upstream model with its attention layers replaced, see :mod:`.attended`
``HELENDataset, LFWPLDataset``   faces: ``dataset=dict(type=..., data_root=..., ...)``; need mmsegmentation
``FaceParsingMetric``            their scores: ``val_evaluator=dict(type=...)``; needs mmsegmentation
================================ =======================================================================

To use this package's operators in configs that name mmcv's own layers, import :mod:`attn_plugins.mmcv.drop_in`
instead.
"""

from __future__ import annotations

from mmengine.registry import DATASETS, METRICS, MODELS
from mmengine.runner import CheckpointLoader

from . import stand_in  # noqa: F401
from .backbones import AAResNet, load_from_safetensors
from .layers import (
    AAConv2d,
    BilateralCrissCross2d,
    BilateralNonLocal2d,
    CrissCrossAttention2d,
    DeformableConv1d,
    DeformableConv2d,
    DynamicConv2d,
    GeneralizedAttention2d,
    LocalBilateralConv2d,
    NeighborhoodAttention1d,
    NeighborhoodAttention2d,
    NonLocalAttention1d,
    NonLocalAttention2d,
    NonLocalAttention3d,
)
from .registration import register, register_lazily
from .replace_attention import Attended
from .vit import ViTAdapter, ViTPyramid

__all__ = [
    "AAConv2d",
    "AAResNet",
    "BilateralCrissCross2d",
    "BilateralNonLocal2d",
    "CrissCrossAttention2d",
    "DeformableConv1d",
    "DeformableConv2d",
    "DynamicConv2d",
    "GeneralizedAttention2d",
    "LocalBilateralConv2d",
    "NeighborhoodAttention1d",
    "NeighborhoodAttention2d",
    "NonLocalAttention1d",
    "NonLocalAttention2d",
    "NonLocalAttention3d",
    "ViTAdapter",
    "ViTPyramid",
]

register(MODELS, Attended)
for _name in __all__:
    register(MODELS, globals()[_name])
register_lazily(
    MODELS, "heads", "AttentionHead", "NonLocalAttentionHead", "SingleConvASPPHead", "StemResNet", "UNetHead"
)
register_lazily(DATASETS, "face_parsing", "HELENDataset", "LFWPLDataset")
register_lazily(METRICS, "face_parsing", "FaceParsingMetric")
CheckpointLoader.register_scheme(r".*\.safetensors$", load_from_safetensors, force=True)
