"""Drop-in replacement of mmcv's layers by this package's operators; configs and checkpoint keys stay unchanged.

::

    _base_ = "mmdet::empirical_attention/faster-rcnn_r50-attn0010-dcn_fpn_1x_coco.py"
    custom_imports = dict(imports=["attn_plugins.mmcv.drop_in"], allow_failed_imports=False)

Importing this module replaces

* ``GeneralizedAttention``, ``CrissCrossAttention``, ``DCN`` and ``DCNv2`` in mmengine's root ``MODELS``, and
  ``CrissCrossAttention`` also in mmcv and in the module of mmseg's ``CCHead``, which imports it by name;
* the ``forward`` of mmcv's ``MultiScaleDeformableAttention`` and ``MultiheadAttention``, which the transformers of
  mmdet and mmseg (DETR and its relatives, MaskFormer, Mask2Former) import directly;
* the ``forward`` of ``ShiftWindowMSA``, the window attention of mmdet's and mmseg's Swin, once the toolkit imports it;
* MKL by oneDNN in float32 products on AMD processors (:func:`attn_plugins.ops.use_onednn`, which also turns it off).

If one of them cannot be replaced, none is, and an error is raised. Models built before the import keep mmcv's layers,
but use the new ``forward`` methods. Outputs are contiguous for contiguous inputs, and gradients equal mmcv's as in its
own tests. The attributes ``q_downsample``, ``kv_downsample`` and ``local_constraint_map`` of mmcv's layers do not
exist.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from mmcv import ops as stock
from mmcv.cnn import Scale  # mmcv.cnn registers GeneralizedAttention, as mmcv.ops does DCN and DCNv2
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmcv.ops import MultiScaleDeformableAttention
from mmengine.registry import MODELS
from torch import Tensor

from .. import ops
from ..modules import CrissCrossAttention2d
from ..modules.common.tracing import Unscriptable
from ..modules.common.untouched import has_global_hooks, untouched
from ..modules.maps.generalized_attention import GeneralizedAttention2d, MMCVGeneralizedAttention2d
from ..modules.maps.memory_format import add_scaled, in_format_of
from ..ops.deform_conv.edge_rule import without_edge_gradients
from ..replacement import forget_compiled
from . import transformer, window_attention
from .layers import Reinitialised


class GeneralizedAttention(Reinitialised, MMCVGeneralizedAttention2d):
    """mmcv's ``GeneralizedAttention``, with its arguments, defaults and numerics, on this package's operator."""

    def __init__(self, *args: Any, **options: Any):
        given = inspect.signature(GeneralizedAttention2d.mmcv_compatible).bind(*args, **options)
        given.apply_defaults()
        super().__init__(**given.arguments)


class CrissCrossAttention(CrissCrossAttention2d):
    """mmcv's ``CrissCrossAttention`` on this package's operator."""

    def __init__(self, in_channels: int) -> None:
        super().__init__(in_channels)
        self.gamma = Scale(0)

    def add(self, x: Tensor, attended: Tensor) -> Tensor:
        """See the base; mmcv's ``gamma`` is called where somebody hooks or replaces it."""
        if untouched(self.gamma, Scale) and not has_global_hooks():
            return add_scaled(x, self.gamma.scale, attended)
        return x + self.gamma(in_format_of(x, attended))


class DeformConv2dPack(Unscriptable, stock.DeformConv2dPack):
    """mmcv's ``DCN`` (deformable convolution v1 with its predictor) on this package's operator.

    It accepts any batch size: ``im2col_step``, which must divide mmcv's batches, is ignored.
    """

    def init_weights(self) -> None:
        """Zero the predictor again after ``init_cfg`` rules for Conv2d, which mmcv's ``DCN`` does not do."""
        self.init_offset()

    def forward(self, x: Tensor) -> Tensor:
        geometry = (self.stride, self.padding, self.dilation)
        offset = without_edge_gradients(self.conv_offset(x), self.kernel_size, *geometry)
        return ops.deform_conv2d(x, offset, self.weight, None, *geometry)


class ModulatedDeformConv2dPack(Unscriptable, stock.ModulatedDeformConv2dPack):
    """mmcv's ``DCNv2`` (modulated, with its predictor) on this package's operator."""

    def forward(self, x: Tensor) -> Tensor:
        taps = self.deform_groups * self.kernel_size[0] * self.kernel_size[1]
        offset, mask = self.conv_offset(x).split((2 * taps, taps), dim=1)
        geometry = (self.stride, self.padding, self.dilation)
        offset = without_edge_gradients(offset, self.kernel_size, *geometry)
        return ops.deform_conv2d(x, offset, self.weight, self.bias, *geometry, mask.sigmoid())


def upgrade_keys(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the keys of a checkpoint from before version 2 of mmcv's packs; other checkpoints are unchanged.

    Such checkpoints store the predictor next to the layer: ``conv2_offset.weight`` is now
    ``conv2.conv_offset.weight``. mmcv's layers try to rename these keys, but current loaders hide the parent's keys
    from a layer, so they are skipped with a warning. Use:
    ``torch.save(dict(state_dict=upgrade_keys(old["state_dict"])), file)``.
    """
    renamed = {}
    for key, value in state_dict.items():
        layer, separator, kind = key.rpartition("_offset.")
        if separator and not layer.endswith(".conv") and f"{layer}.weight" in state_dict:
            key = f"{layer}.conv_offset.{kind}"
        renamed[key] = value
    return renamed


DCN, DCNv2 = DeformConv2dPack, ModulatedDeformConv2dPack
REPLACEMENTS: dict[str, Any] = dict(
    GeneralizedAttention=GeneralizedAttention, CrissCrossAttention=CrissCrossAttention, DCN=DCN, DCNv2=DCNv2
)
FORWARDS: dict[Any, Callable[..., Tensor]] = {
    MultiScaleDeformableAttention: transformer.deformable_forward,
    MultiheadAttention: transformer.multihead_forward,
}
# Modules that hold a layer under its name, so that its users bypass the registry.
HOLDERS = {"CrissCrossAttention": ("mmcv.ops.cc_attention", "mmcv.ops", "mmseg.models.decode_heads.cc_head")}


def replace() -> None:
    """Install ``REPLACEMENTS``, ``FORWARDS`` and Swin's ``forward``, all or none; a repeated call has no effect.

    Raises:
        RuntimeError: A name belongs to neither upstream nor this package.
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
    forget_compiled()
    ops.use_onednn()


def _holders() -> Iterator[tuple[str, str]]:
    """Yield names with the imported ones of their ``HOLDERS``; modules imported later get the name from mmcv."""
    for name, holders in HOLDERS.items():
        yield from ((name, holder) for holder in holders if hasattr(sys.modules.get(holder), name))


def _check(name: str, place: str, layer: Any) -> None:
    owner = getattr(layer, "__module__", None)
    if owner not in (__name__, transformer.__name__) and not (owner or "").startswith("mmcv."):
        raise RuntimeError(
            f"attn_plugins.mmcv.drop_in replaces mmcv's {name}, but {place} holds {layer} there; nothing "
            "was replaced. Register that layer under another name, or import attn_plugins.mmcv and name "
            "its layers in the config."
        )


replace()
