"""Whole networks of mmdetection and mmsegmentation, counted as at inference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import convention

CONFIGS = Path(__file__).parents[2] / "configs"
PROPOSALS = 1000  # of which the second stage of Faster R-CNN makes detections, in the paper and in mmdet


class _FasterRCNN(nn.Module):
    """All layers of the detector, without what happens between them: boxes and their suppression."""

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, image: Tensor) -> Tensor:
        maps = self.detector.neck(self.detector.backbone(image))
        scores, _ = self.detector.rpn_head(maps)
        self.detector.roi_head.bbox_head(image.new_empty(PROPOSALS, maps[0].shape[1], 7, 7))
        return scores[0]


def faster_rcnn(config: str, height: int = 800, width: int = 1344) -> list[convention.Call]:
    """The calls of a Faster R-CNN for one image.

    Args:
        config: A file of ours, under ``configs/mmdet``.
        height: Of the image; 800×1333 pixels are padded to 800×1344.
        width: Likewise.
    """
    from mmdet.registry import MODELS
    from mmengine.config import Config

    model = Config.fromfile(CONFIGS / "mmdet" / config).model
    model.backbone.init_cfg = None
    with torch.device("meta"):
        network = _FasterRCNN(MODELS.build(model))
    return convention.calls(network, 1, 3, height, width)


def segmentor(config: str, height: int = 768, width: int = 768) -> list[convention.Call]:
    """The calls of a segmentor for one image.

    Args:
        config: A file of ours, under ``configs/mmseg``.
        height: Of the image.
        width: Likewise.
    """
    from mmengine.config import Config
    from mmseg.registry import MODELS

    model = Config.fromfile(CONFIGS / "mmseg" / config).model
    model.update(pretrained=None, auxiliary_head=None, data_preprocessor=None)  # none of which runs at inference
    model.backbone.norm_cfg = model.decode_head.norm_cfg = dict(type="BN")  # SyncBN runs on GPUs alone
    with torch.device("meta"):
        network = MODELS.build(model)
    return convention.calls(network, 1, 3, height, width)
