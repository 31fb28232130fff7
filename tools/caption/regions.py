"""Shared parts of the region extractors: the selection of regions, and their format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

Regions = dict[str, np.ndarray]  # features (n, D), boxes (n, 4), scores (n,)


class Extractor(Protocol):
    """Interface from pictures to regions. ``prepare`` runs in the loading processes, without the network's device."""

    def prepare(self, picture: Image.Image) -> Any:
        """Return the network's input for one picture."""

    def __call__(self, batch: list[Any]) -> list[Regions]:
        """Return the regions of each prepared picture; boxes are relative to the picture, 0 to 1."""


@dataclass(frozen=True)
class Selection:
    """Selection of a detector's regions: Anderson et al., Bottom-Up and Top-Down Attention (2018), Sec. 3.1.

    Keeps the regions that survive non-maximum suppression within their class and reach the threshold, but at least the
    best ``minimum`` and at most the best ``maximum``. If there are fewer proposals than the minimum, all are kept.
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
            boxes (Tensor[P, K, 4] or Tensor[P, 1, 4]): Boxes of each proposal and class, x0, y0, x1, y1 in pixels.
            scores (Tensor[P, K]): Scores of the classes without the background.

        Returns:
            boxes (Tensor[n, 4]) within the picture and scores (Tensor[n]), by falling score; without any proposal of a
            pixel or more, the whole picture with the score 0.
        """
        from torchvision.ops import batched_nms

        empty = scores.new_zeros(0)
        scores, classes = scores.float().max(1) if len(scores) else (empty.float(), empty.long())
        own = classes if boxes.shape[1] > 1 else torch.zeros_like(classes)
        boxes = boxes.float()[torch.arange(len(boxes), device=boxes.device), own]
        limit = boxes.new_tensor([width, height, width, height])
        boxes = boxes.clamp(min=0).minimum(limit)
        large = ((boxes[:, 2:] - boxes[:, :2]) >= 1).all(1) & boxes.isfinite().all(1) & scores.isfinite()
        boxes, scores, classes = boxes[large], scores[large], classes[large]
        if len(boxes) == 0:
            return boxes.new_tensor([[0, 0, width, height]]), scores.new_zeros(1)
        kept = batched_nms(boxes, scores, classes, self.iou)  # by falling score
        number = int((scores[kept] >= self.threshold).sum())
        number = min(max(number, self.minimum), self.maximum)
        suppressed = torch.ones_like(scores, dtype=torch.bool)
        suppressed[kept] = False
        rest = suppressed.nonzero()[:, 0]
        rest = rest[scores[rest].argsort(descending=True, stable=True)]
        chosen = torch.cat([kept, rest])[:number]
        chosen = chosen[scores[chosen].argsort(descending=True, stable=True)]
        return boxes[chosen], scores[chosen]


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
