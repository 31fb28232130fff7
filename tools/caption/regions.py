"""Region extractors: an R-CNN of torchvision, or the cells of a timm backbone's last map.

``prepare`` makes the network's input of a picture, in the loading processes and without the network's device. A list of
these inputs gives the regions of each picture, whose boxes are relative to it, 0 to 1.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from tools.caption.backbones import TimmBackbone, read_weights

Regions = dict[str, np.ndarray]  # features (n, D), boxes (n, 4), scores (n,)
HINT = "pass --checkpoint FILE, or --no-weights"
_CLASSES = "roi_heads.box_predictor.cls_score.weight"


def as_regions(features: Tensor, boxes: Tensor, scores: Tensor, height: float, width: float) -> Regions:
    """Convert the regions of one picture to arrays; ``boxes`` are in pixels of a picture of this height and width."""
    relative = boxes.double() / boxes.new_tensor([width, height, width, height]).double()
    tensors = dict(features=features, boxes=relative.clamp(0, 1), scores=scores)
    return {name: tensor.detach().float().cpu().numpy() for name, tensor in tensors.items()}


def stored(regions: Regions, dtype: np.dtype) -> Regions:
    """Return the regions with features of another type; raise a ValueError if one is then not finite."""
    with np.errstate(over="ignore"):
        features = regions["features"].astype(dtype)
    if not np.isfinite(features).all():
        raise ValueError(f"features are NaN, infinite or beyond {dtype}")
    return {**regions, "features": features}


@dataclass(frozen=True)
class Selection:
    """Selection of a detector's regions: Anderson et al., Bottom-Up and Top-Down Attention (2018), Sec. 3.1.

    Keeps the regions that survive non-maximum suppression within their class and reach the threshold, but at least the
    best ``minimum`` (fewer if fewer survive) and at most the best ``maximum``.
    """

    minimum: int = 10
    maximum: int = 100
    threshold: float = 0.2
    iou: float = 0.3

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise ValueError(f"--min-regions must be from 1 to --max-regions, got {self.minimum} and {self.maximum}")
        for name, value in (("--score-threshold", self.threshold), ("--nms", self.iou)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {value}")

    def __call__(self, boxes: Tensor, scores: Tensor, height: float, width: float) -> tuple[Tensor, Tensor]:
        """Select regions among a detector's proposals on a picture of ``height`` × ``width`` pixels.

        Args:
            boxes (Tensor[P, K, 4]): Boxes of each proposal and class, x0, y0, x1, y1 in pixels.
            scores (Tensor[P, K]): Scores of the classes without the background.

        Returns:
            boxes (Tensor[n, 4]) within the picture and scores (Tensor[n]), by falling score; without any proposal of a
            pixel or more, the whole picture with the score 0.
        """
        from torchvision.ops import batched_nms

        scores, classes = scores.float().max(1)
        limit = boxes.new_tensor([width, height, width, height]).float()
        boxes = boxes.float()[torch.arange(len(boxes), device=boxes.device), classes].clamp(min=0).minimum(limit)
        large = ((boxes[:, 2:] - boxes[:, :2]) >= 1).all(1) & boxes.isfinite().all(1) & scores.isfinite()
        boxes, scores, classes = boxes[large], scores[large], classes[large]
        if len(boxes) == 0:
            return limit[None] * limit.new_tensor([0, 0, 1, 1]), scores.new_zeros(1)
        kept = batched_nms(boxes, scores, classes, self.iou)  # by falling score
        number = min(max(int((scores[kept] >= self.threshold).sum()), self.minimum), self.maximum)
        return boxes[kept[:number]], scores[kept[:number]]


class TorchvisionRegions:
    """Extractor that detects boxes, refines them, and returns what the classifier reads of the refined boxes.

    Args:
        name: Model name in torchvision, such as ``fasterrcnn_resnet50_fpn``.
        selection: Selection of the regions to keep.
        weights: ``"default"`` for torchvision's COCO weights, ``"none"`` for random ones by ``seed``, or a file.
        size: Shorter and longer side of the scaled pictures in pixels; None: the model's own.
    """

    def __init__(
        self,
        name: str,
        selection: Selection,
        weights: str | Path = "default",
        device: str = "cpu",
        seed: int = 0,
        size: tuple[int, int] | None = None,
    ) -> None:
        from torchvision.models import detection, get_model, list_models

        usable = [x for x in list_models(detection) if "rcnn" in x]
        if name not in usable:
            raise ValueError(f"--torchvision must be one of {', '.join(usable)}, got {name!r}")
        options: dict[str, Any] = {} if size is None else dict(min_size=size[0], max_size=size[1])
        state = read_weights(weights)[0] if isinstance(weights, Path) else None
        if state is not None:
            if _CLASSES not in state:
                raise ValueError(f"{weights} does not fit {name}: it has no {_CLASSES}")
            options["num_classes"] = len(state[_CLASSES])
        torch.manual_seed(seed)
        try:
            default = "DEFAULT" if weights == "default" else None
            model = get_model(name, weights=default, weights_backbone=None, **options)
        except (OSError, RuntimeError) as error:
            raise ValueError(f"torchvision's weights of {name} are unavailable ({error}): {HINT}") from error
        if state is not None:
            try:
                model.load_state_dict(state)
            except RuntimeError as error:
                raise ValueError(f"{weights} does not fit {name}: {error}"[:500]) from error
        self.model: Any = model.to(device).eval()
        self.selection, self.device = selection, device

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
        features = heads.box_head(heads.box_roi_pool(maps, [own for own, _ in chosen], images.image_sizes))
        split = features.split([len(own) for own, _ in chosen])
        return [as_regions(f, *own, *size) for f, own, size in zip(split, chosen, images.image_sizes)]


class GridRegions:
    """Extractor with one region per cell, row by row, with the score 1; pictures are stretched to the network's size.

    Args:
        name: Model name in timm.
        cells: Number of cells per side. If the map has fewer, some regions are equal.
        weights: ``"default"`` for timm's weights, ``"none"`` for random ones by ``seed``, or a file.
        size: (H, W) in pixels; None: the size stored in the file ``weights``, else the model's own.
    """

    def __init__(
        self,
        name: str,
        cells: int = 7,
        weights: str | Path = "default",
        device: str = "cpu",
        seed: int = 0,
        size: tuple[int, int] | None = None,
    ) -> None:
        if cells < 1:
            raise ValueError(f"--grid-size must be at least 1, got {cells}")
        torch.manual_seed(seed)
        if size is None and isinstance(weights, Path):
            metadata = read_weights(weights)[1]
            size = json.loads(metadata.get("size", metadata.get("input_size", "null")))
        self.backbone = TimmBackbone(name, None if size is None else (size[0], size[1]))
        if weights != "none":
            self.backbone.load(weights if isinstance(weights, Path) else None, HINT)
        self.backbone.to(device).eval()
        self.prepare, self.cells, self.device = self.backbone.prepare, cells, device

    @torch.inference_mode()
    def __call__(self, batch: list[Tensor]) -> list[Regions]:
        n = self.cells
        maps = functional.adaptive_avg_pool2d(self.backbone(torch.stack(batch).to(self.device)), n)
        corner = torch.arange(n * n)
        low = torch.stack([corner % n, corner // n], 1).float()
        boxes, scores = torch.cat([low, low + 1], 1), torch.ones(n * n)
        return [as_regions(features.T, boxes, scores, n, n) for features in maps.flatten(2)]
