"""Regions from one of torchvision's two-stage detectors, without any other toolkit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from PIL import Image
from torch import Tensor
from torchvision.models import get_model, list_models

from tools.caption.backbones import read_weights
from tools.caption.regions import Regions, Selection, as_regions

_CLASSES = "roi_heads.box_predictor.cls_score.weight"


class TorchvisionRegions:
    """Extractor that detects boxes, refines them, and pools the features of the refined boxes.

    Args:
        name: Model name in torchvision, such as ``fasterrcnn_resnet50_fpn``.
        selection: Selection of the regions to keep.
        weights: ``"default"`` for torchvision's COCO weights, ``"none"`` for random ones by ``seed``, or a file.
        feature: ``"classifier"``: the input of the classifier; ``"map"``: the mean of the RoI-aligned map.
        size: Shorter and longer side of the scaled pictures in pixels; None: the model's own.
    """

    def __init__(
        self,
        name: str,
        selection: Selection,
        weights: str | Path = "default",
        feature: str = "classifier",
        device: str = "cpu",
        seed: int = 0,
        size: tuple[int, int] | None = None,
    ) -> None:
        usable = [x for x in list_models(torchvision.models.detection) if "rcnn" in x]
        if name not in usable:
            raise ValueError(f"--torchvision must be one of {', '.join(usable)}, got {name!r}")
        options: dict[str, Any] = {} if size is None else dict(min_size=size[0], max_size=size[1])
        state = None
        if isinstance(weights, Path):
            state, _ = read_weights(weights)
            if _CLASSES not in state:
                raise ValueError(f"{weights} does not fit {name}: it has no {_CLASSES}")
            options["num_classes"] = len(state[_CLASSES])
        torch.manual_seed(seed)
        try:
            default = "DEFAULT" if weights == "default" else None
            model = get_model(name, weights=default, weights_backbone=None, **options)
        except (OSError, RuntimeError) as error:
            hint = "pass --checkpoint FILE, or --no-weights"
            raise ValueError(f"torchvision's weights of {name} are unavailable ({error}): {hint}") from error
        if state is not None:
            try:
                model.load_state_dict(state)
            except RuntimeError as error:
                raise ValueError(f"{weights} does not fit {name}: {error}"[:500]) from error
        self.model: Any = model.to(device).eval()
        self.selection, self.feature, self.device = selection, feature, device

    @staticmethod
    def prepare(picture: Image.Image) -> Tensor:
        """Return the picture as (3, H, W), 0 to 1."""
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255

    @torch.inference_mode()
    def __call__(self, batch: list[Tensor]) -> list[Regions]:
        model, heads = self.model, self.model.roi_heads
        images, _ = model.transform([image.to(self.device) for image in batch])
        maps = model.backbone(images.tensors)
        maps = {"0": maps} if isinstance(maps, Tensor) else maps
        proposals, _ = model.rpn(images, maps)
        logits, deltas = heads.box_predictor(heads.box_head(heads.box_roi_pool(maps, proposals, images.image_sizes)))
        counts = [len(own) for own in proposals]
        boxes = heads.box_coder.decode(deltas, proposals)[:, 1:].split(counts)
        scores = logits.softmax(-1)[:, 1:].split(counts)  # class 0 is the background
        chosen = [self.selection(*own, *size) for *own, size in zip(boxes, scores, images.image_sizes)]
        pooled = heads.box_roi_pool(maps, [own for own, _ in chosen], images.image_sizes)
        features = heads.box_head(pooled) if self.feature == "classifier" else pooled.mean((2, 3))
        split = features.split([len(own) for own, _ in chosen])
        return [as_regions(f, *own, *size) for f, own, size in zip(split, chosen, images.image_sizes)]
