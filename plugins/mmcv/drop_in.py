"""Drop-in replacement of mmcv's layers by this package's operators; configs and checkpoint keys stay unchanged.

::

    _base_ = "mmdet::empirical_attention/faster-rcnn_r50-attn0010-dcn_fpn_1x_coco.py"
    custom_imports = dict(imports=["attn_plugins.mmcv.drop_in"], allow_failed_imports=False)

Importing this module replaces, in all models of the process, the ``forward`` of mmcv's ``GeneralizedAttention``,
``CrissCrossAttention``, ``DCN``, ``DCNv2``, ``MultiScaleDeformableAttention`` and ``MultiheadAttention``, and that of
``ShiftWindowMSA``, the window attention of mmdet's and mmseg's Swin, once the toolkit imports it. Models built before
change as well. It also calls :func:`attn_plugins.ops.use_onednn`.

If one of them cannot be replaced, none is, and an error is raised.
"""

from __future__ import annotations

from torch import Tensor

from ..ops import use_onednn
from ..replacement import replace_everywhere
from .places import PLACES


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


def replace() -> None:
    """Replace the layers' ``forward``, all or none; a repeated call has no effect.

    Raises:
        RuntimeError: A layer has a ``forward`` that is not its toolkit's.
    """
    replace_everywhere(PLACES, __name__)
    use_onednn()


replace()
