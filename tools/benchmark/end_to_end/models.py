"""Measured models, one entry each."""

from __future__ import annotations

from dataclasses import dataclass

DROP_IN = ("attn_plugins.mmcv.drop_in",)


@dataclass(frozen=True)
class Model:
    """An upstream model, and the same model with our layers.

    Args:
        title: Title in the table.
        package: Package of the config, ``mmdet`` or ``mmseg``, which determines the synthetic data: boxes or masks.
        config: The upstream config, below the package's ``configs``.
        size: Height and width of the picture.
        custom_imports: Imports of our config, in addition to upstream's.
    """

    title: str
    package: str
    config: str
    size: tuple[int, int]
    custom_imports: tuple[str, ...] = DROP_IN


MODELS = {
    "attn0010-dcn": Model(
        "Faster R-CNN R-50, attention 0010 and DCN",
        "mmdet",
        "empirical_attention/faster-rcnn_r50-attn0010-dcn_fpn_1x_coco.py",
        (800, 1344),
    ),
    "attn1111": Model(
        "Faster R-CNN R-50, attention 1111",
        "mmdet",
        "empirical_attention/faster-rcnn_r50-attn1111_fpn_1x_coco.py",
        (800, 1344),
    ),
    "ccnet": Model("CCNet R-50", "mmseg", "ccnet/ccnet_r50-d8_4xb2-80k_cityscapes-769x769.py", (769, 769)),
    "deformable-detr": Model(
        "Deformable DETR R-50", "mmdet", "deformable_detr/deformable-detr_r50_16xb2-50e_coco.py", (800, 1344)
    ),
    "dino": Model("DINO R-50, 4 scales", "mmdet", "dino/dino-4scale_r50_8xb2-12e_coco.py", (800, 1344)),
    "mask-rcnn-swin": Model("Mask R-CNN Swin-T", "mmdet", "swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py", (800, 1344)),
    "mask2former": Model(
        "Mask2Former R-50, instances", "mmdet", "mask2former/mask2former_r50_8xb2-lsj-50e_coco.py", (800, 1344)
    ),
    "mask2former-swin": Model(
        "Mask2Former Swin-T, instances",
        "mmdet",
        "mask2former/mask2former_swin-t-p4-w7-224_8xb2-lsj-50e_coco.py",
        (800, 1344),
    ),
    "mask2former-seg": Model(
        "Mask2Former R-50, semantic (mmseg)",
        "mmseg",
        "mask2former/mask2former_r50_8xb2-90k_cityscapes-512x1024.py",
        (512, 1024),
    ),
}
