"""Region extractors: an R-CNN of torchvision, or the cells of a timm backbone's last map.

``prepare`` makes the network's input of a picture, in the loading processes and without the network's device. A list of
these inputs gives the regions of each picture, whose boxes are relative to it, 0 to 1.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from tools.caption.backbones import TimmBackbone, read_weights

Regions = dict[str, np.ndarray]  # features (n, D), boxes (n, 4)
HINT = "pass --checkpoint FILE, or --no-weights"
_CLASSES = "roi_heads.box_predictor.cls_score.weight"


def as_regions(features: Tensor, boxes: Tensor, height: float, width: float) -> Regions:
    """Convert the regions of one picture to arrays; ``boxes`` are in pixels of a picture of this height and width."""
    relative = boxes.double() / boxes.new_tensor([width, height, width, height]).double()
    tensors = dict(features=features, boxes=relative.clamp(0, 1))
    return {name: tensor.detach().float().cpu().numpy() for name, tensor in tensors.items()}


def as_stored(features: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return features of another type; raise a ValueError if one is then not finite."""
    with np.errstate(over="ignore"):
        features = features.astype(dtype)
    if not np.isfinite(features).all():
        raise ValueError(f"features are NaN, infinite or beyond {dtype}")
    return features


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

    def __call__(self, boxes: Tensor, scores: Tensor, height: float, width: float) -> Tensor:
        """Select regions among a detector's proposals on a picture of ``height`` × ``width`` pixels.

        Args:
            boxes (Tensor[P, K, 4]): Boxes of each proposal and class, x0, y0, x1, y1 in pixels.
            scores (Tensor[P, K]): Scores of the classes without the background.

        Returns:
            boxes (Tensor[n, 4]) within the picture, by falling score; without any proposal of a pixel or more, the
            whole picture.
        """
        from torchvision.ops import batched_nms

        scores, classes = scores.float().max(1)
        limit = boxes.new_tensor([width, height, width, height]).float()
        boxes = boxes.float()[torch.arange(len(boxes), device=boxes.device), classes].clamp(min=0).minimum(limit)
        large = ((boxes[:, 2:] - boxes[:, :2]) >= 1).all(1) & boxes.isfinite().all(1) & scores.isfinite()
        boxes, scores, classes = boxes[large], scores[large], classes[large]
        if len(boxes) == 0:
            return limit[None] * limit.new_tensor([0, 0, 1, 1])
        kept = batched_nms(boxes, scores, classes, self.iou)  # by falling score
        number = min(max(int((scores[kept] >= self.threshold).sum()), self.minimum), self.maximum)
        return boxes[kept[:number]]


class TorchvisionRegions:
    """Extractor by an R-CNN of torchvision: detects boxes, refines them, and returns what its classifier reads of them.

    ``options`` are those of :mod:`tools.caption.extract`.
    """

    def __init__(self, options: argparse.Namespace, device: Any) -> None:
        from torchvision.models import detection, get_model, list_models

        name, file, size = options.torchvision, options.checkpoint, options.size
        self.device = device
        self.selection = Selection(options.min_regions, options.max_regions, options.score_threshold, options.nms)
        usable = [x for x in list_models(detection) if "rcnn" in x]
        if name not in usable:
            raise ValueError(f"--torchvision must be one of {', '.join(usable)}, got {name!r}")
        more: dict[str, Any] = dict(min_size=size[0], max_size=(*size, 1333)[1]) if size else {}
        state = read_weights(file)[0] if file else None
        if state is not None:
            if _CLASSES not in state:
                raise ValueError(f"{file} does not fit {name}: it has no {_CLASSES}")
            more["num_classes"] = len(state[_CLASSES])
        torch.manual_seed(options.seed)
        try:
            weights = None if file or options.no_weights else "DEFAULT"
            model = get_model(name, weights=weights, weights_backbone=None, **more)
        except (OSError, RuntimeError) as error:
            raise ValueError(f"torchvision's weights of {name} are unavailable ({error}): {HINT}") from error
        if state is not None:
            try:
                model.load_state_dict(state)
            except RuntimeError as error:
                raise ValueError(f"{file} does not fit {name}: {error}"[:500]) from error
        self.model: Any = model.to(device).eval()

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
        features = heads.box_head(heads.box_roi_pool(maps, chosen, images.image_sizes))
        split = features.split([len(own) for own in chosen])
        return [as_regions(f, own, *size) for f, own, size in zip(split, chosen, images.image_sizes)]


class GridRegions:
    """Extractor with one region per cell of a timm backbone's map, row by row.

    ``options`` are those of :mod:`tools.caption.extract`. Pictures are stretched to ``size``, else to the size stored
    with the weights, else to the model's own. If the map has fewer cells than asked for, some regions are equal.
    """

    def __init__(self, options: argparse.Namespace, device: Any) -> None:
        file, size = options.checkpoint, options.size and (options.size[0], options.size[-1])
        if options.grid_size < 1:
            raise ValueError(f"--grid-size must be at least 1, got {options.grid_size}")
        torch.manual_seed(options.seed)
        if size is None and file:
            metadata = read_weights(file)[1]
            size = json.loads(metadata.get("input_size", "null"))
        self.backbone = TimmBackbone(options.grid, None if size is None else (size[0], size[1]))
        if not options.no_weights:
            self.backbone.load(file, HINT)
        self.backbone.to(device).eval()
        self.prepare, self.cells, self.device = self.backbone.prepare, options.grid_size, device

    @torch.inference_mode()
    def __call__(self, batch: list[Tensor]) -> list[Regions]:
        n = self.cells
        maps = functional.adaptive_avg_pool2d(self.backbone(torch.stack(batch).to(self.device)), n)
        corner = torch.arange(n * n)
        low = torch.stack([corner % n, corner // n], 1).float()
        boxes = torch.cat([low, low + 1], 1)
        return [as_regions(features.T, boxes, n, n) for features in maps.flatten(2)]
