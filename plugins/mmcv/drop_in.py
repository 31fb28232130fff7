"""Puts our operators under configs that name mmcv's own layers; their checkpoints' keys stay what they are.

::

    _base_ = "mmdet::empirical_attention/faster-rcnn_r50-attn0010-dcn_fpn_1x_coco.py"
    custom_imports = dict(imports=["attn_plugins.mmcv.drop_in"], allow_failed_imports=False)

Importing this module replaces ``GeneralizedAttention``, ``CrissCrossAttention``, ``DCN`` and ``DCNv2`` in mmengine's
root ``MODELS``, and ``CrissCrossAttention`` also in mmcv and where mmseg's ``CCHead`` takes it from, by its name;
and the ``forward`` of mmcv's ``MultiScaleDeformableAttention`` and ``MultiheadAttention``, which transformers of mmdet
and mmseg (DETR and its relatives, MaskFormer, Mask2Former) take from mmcv itself; and that of ``ShiftWindowMSA``, the
window attention of mmdet's and mmseg's Swin, once the toolkit imports it: all of them or, where one cannot be
replaced, none, with an error. Models built before the import keep mmcv's layers, but for the ``forward``s.
Outputs are contiguous where inputs are, and gradients are mmcv's, as its own tests have them. What mmcv's layers keep
for themselves (``q_downsample``, ``kv_downsample``, ``local_constraint_map``) ours do not have.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import mmcv.cnn  # noqa: F401  registers GeneralizedAttention, as mmcv.ops does DCN and DCNv2
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmcv.ops import DeformConv2dPack, ModulatedDeformConv2dPack, MultiScaleDeformableAttention
from mmengine.registry import MODELS
from torch import Tensor

from .. import ops
from ..modules import CrissCrossAttention2d
from ..modules.generalized_attention import GeneralizedAttention2d, MMCVGeneralizedAttention2d
from . import transformer, window_attention
from .edge_rule import without_edge_gradients
from .layers import DrawnAgain


class GeneralizedAttention(DrawnAgain, MMCVGeneralizedAttention2d):
    """mmcv's ``GeneralizedAttention``: its arguments, defaults and numerics, computed by our operator."""

    def __init__(self, *args: Any, **options: Any):
        given = inspect.signature(GeneralizedAttention2d.mmcv_compatible).bind(*args, **options)
        given.apply_defaults()
        super().__init__(**given.arguments)


class CrissCrossAttention(CrissCrossAttention2d):
    """mmcv's ``CrissCrossAttention``, computed by our operator."""

    def __init__(self, in_channels: int) -> None:
        super().__init__(in_channels)


class DCN(DeformConv2dPack):
    """mmcv's ``DCN`` (deformable convolution v1 with its predictor), computed by our operator.

    Any batch will do: ``im2col_step``, by which mmcv's batches must be divisible, is taken and not needed.
    """

    def init_weights(self) -> None:
        """Zero the predictor again: ``init_cfg`` rules for Conv2d reach it (mmcv's ``DCN`` leaves it so)."""
        self.init_offset()

    def forward(self, x: Tensor) -> Tensor:
        geometry = (self.stride, self.padding, self.dilation)
        offset = without_edge_gradients(self.conv_offset(x), self.kernel_size, *geometry)
        return ops.deform_conv2d(x, offset, self.weight, None, *geometry)


class DCNv2(ModulatedDeformConv2dPack):
    """mmcv's ``DCNv2`` (modulated, with its predictor), computed by our operator."""

    def forward(self, x: Tensor) -> Tensor:
        taps = self.deform_groups * self.kernel_size[0] * self.kernel_size[1]
        offset, mask = self.conv_offset(x).split((2 * taps, taps), dim=1)
        geometry = (self.stride, self.padding, self.dilation)
        offset = without_edge_gradients(offset, self.kernel_size, *geometry)
        return ops.deform_conv2d(x, offset, self.weight, self.bias, *geometry, mask.sigmoid())


def upgrade_keys(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint from before version 2 of mmcv's packs, with today's keys; others come back as they are.

    Those kept the predictor beside the layer: ``conv2_offset.weight`` is ``conv2.conv_offset.weight`` now.
    mmcv's own layers still try to rename them, but today's loaders show a layer none of its parent's keys, so
    that these are skipped with a warning. Use:
    ``torch.save(dict(state_dict=upgrade_keys(old["state_dict"])), file)``.
    """
    renamed = {}
    for key, value in state_dict.items():
        layer, found, kind = key.rpartition("_offset.")
        if found and not layer.endswith(".conv") and f"{layer}.weight" in state_dict:
            key = f"{layer}.conv_offset.{kind}"
        renamed[key] = value
    return renamed


REPLACEMENTS = {layer.__name__: layer for layer in (GeneralizedAttention, CrissCrossAttention, DCN, DCNv2)}
FORWARDS: dict[Any, Callable[..., Tensor]] = {
    MultiScaleDeformableAttention: transformer.deformable_forward,
    MultiheadAttention: transformer.multihead_forward,
}
# Modules that hold a layer under its name, whose users do not ask a registry.
HOLDERS = {"CrissCrossAttention": ("mmcv.ops.cc_attention", "mmcv.ops", "mmseg.models.decode_heads.cc_head")}


def replace() -> None:
    """Put ``REPLACEMENTS``, ``FORWARDS`` and Swin's in the place of upstream's, all or none, unless they are there.

    Raises:
        RuntimeError: one of the names belongs to neither upstream nor us.
    """
    for name in REPLACEMENTS:
        _check(name, "MODELS", MODELS.module_dict.get(name))
    for name, holder in _holders():
        _check(name, holder, getattr(sys.modules[holder], name))
    for layer in FORWARDS:
        _check(f"{layer.__name__}.forward", layer.__module__, layer.__dict__.get("forward"))
    window_attention.check()
    for name, layer in REPLACEMENTS.items():
        MODELS.register_module(name=name, module=layer, force=True)
    for name, holder in _holders():
        setattr(sys.modules[holder], name, REPLACEMENTS[name])
    for layer, forward in FORWARDS.items():
        layer.forward = forward
    window_attention.replace()


def _holders() -> Iterator[tuple[str, str]]:
    """Names and their ``HOLDERS`` so far imported; those imported later take the name from mmcv."""
    for name, holders in HOLDERS.items():
        yield from ((name, holder) for holder in holders if hasattr(sys.modules.get(holder), name))


def _check(name: str, place: str, layer: Any) -> None:
    owner = getattr(layer, "__module__", None)
    if owner not in (__name__, transformer.__name__) and not (owner or "").startswith("mmcv."):
        raise RuntimeError(
            f"attn_plugins.mmcv.drop_in replaces mmcv's {name}, but {place} holds {layer} there; nothing "
            "was replaced. Register that layer under another name, or import attn_plugins.mmcv and name "
            "our layers in the config."
        )


replace()
