"""Results of a transformer's object queries: boxes or masks, classes and scores, in one picture or in many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import box_convert, clip_boxes_to_image

from tools.clips import pictures_in

HEADS = ("bbox_head", "panoptic_head", "decode_head")  # attributes of mmdet and mmseg models
SMALL = 0.03  # relative area: COCO's bound of large objects, 96² of 640×480 pixels
KINDS = (("small", "#1a9e3f"), ("large, horizontal", "#d62728"), ("large, vertical", "#1f5fd6"))


@dataclass
class Objects:
    """Results of object queries, by falling score."""

    queries: Tensor  # (N,), numbers of the queries
    labels: Tensor  # (N,), numbers of classes
    names: list[str]  # of the classes
    scores: Tensor  # (N,), of the classes, 0 to 1
    boxes: Tensor  # (N, 4) as (left, top, right, bottom), in pixels of the model's input
    masks: Tensor | None = None  # (N, H', W'), logits over the padded picture, for models that predict masks

    def __len__(self) -> int:
        return len(self.queries)

    def __getitem__(self, chosen: Tensor) -> Objects:
        """Return the objects at these indices."""
        names = [self.names[n] for n in chosen.tolist()]
        masks = None if self.masks is None else self.masks[chosen]
        return Objects(self.queries[chosen], self.labels[chosen], names, self.scores[chosen], self.boxes[chosen], masks)

    def surest(self, count: int, least: float) -> Objects:
        """Return at most ``count`` objects with a score of at least ``least``; if none reaches it, the best one."""
        size = self.boxes[:, 2:] - self.boxes[:, :2]
        there = ((self.scores >= least) & (size > 0).all(1)).nonzero().flatten()
        return self[there[:count] if len(there) else torch.arange(min(len(self), 1))]

    def title(self, n: int) -> str:
        """Return an object's class, score and query in a line."""
        return f"{self.names[n]} {self.scores[n]:.2f} (query {self.queries[n]})"


@contextmanager
def watch_head(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Record the output of the model's head under ``"output"``: classes, and boxes or masks."""
    head = next((part for name in HEADS if isinstance(part := getattr(model, name, None), nn.Module)), None)
    if head is None:
        raise ValueError(f"a model with object queries must have one of {', '.join(HEADS)}, got {type(model).__name__}")
    seen: dict[str, Any] = dict(sigmoid=bool(getattr(getattr(head, "loss_cls", None), "use_sigmoid", False)))
    handle = head.register_forward_hook(lambda _, inputs, output: seen.update(output=output))
    try:
        yield seen
    finally:
        handle.remove()


def objects_of(seen: dict[str, Any], picture: Sequence[int], inside: Sequence[int], classes: Sequence[str]) -> Objects:
    """Return what the queries found in the first picture of a batch, from the last layer of the decoder.

    Args:
        seen: Record of :func:`watch_head`.
        picture: (H, W) of the model's input, with its padding.
        inside: (h, w) without its padding.
        classes: Class names; further classes are named by their numbers.
    """
    output = seen.get("output")
    if not isinstance(output, (tuple, list)) or len(output) < 2:
        raise ValueError("the model's head must give classes, and boxes or masks, of object queries")
    logits, places = output[0][-1][0].float(), output[1][-1][0].float()
    if not (logits.isfinite().all() and places.isfinite().all()):
        raise ValueError("the model's classes and places must be finite numbers: has its training diverged?")
    # With a softmax the last class is 'no object'.
    scores, labels = (logits.sigmoid() if seen["sigmoid"] else logits.softmax(-1)[:, :-1]).max(-1)
    order = scores.argsort(descending=True)
    masks = None
    if places.dim() == 3:
        masks = places[order]
        boxes = torch.stack([_box_of_mask(mask, picture, inside) for mask in masks])
    else:
        size = places.new_tensor([inside[1], inside[0]]).repeat(2)
        corners = box_convert(places[order], "cxcywh", "xyxy") * size
        boxes = clip_boxes_to_image(corners, (inside[0], inside[1]))
    names = [classes[n] if n < len(classes) else f"class {n}" for n in labels[order].tolist()]
    return Objects(order, labels[order], names, scores[order], boxes, masks)


def fine_mask(logits: Tensor, picture: Sequence[int], inside: Sequence[int]) -> Tensor:
    """Resample logits (H', W') over the padded picture to (h, w), the picture's pixels without the padding."""
    fine = F.interpolate(logits[None, None], tuple(picture), mode="bilinear", align_corners=False)
    return fine[0, 0, : inside[0], : inside[1]]


def _box_of_mask(logits: Tensor, picture: Sequence[int], inside: Sequence[int]) -> Tensor:
    """Return the box around the pixels whose logit is above 0; its size is 0 if there are none."""
    there = fine_mask(logits, picture, inside) > 0
    rows, columns = (there.any(axis).nonzero().flatten() for axis in (1, 0))
    if not len(rows):
        return torch.zeros(4)
    return torch.tensor([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1], dtype=torch.float32)


@dataclass
class Slots:
    """Boxes of every query in many pictures (Carion et al. 2020, Fig. 7)."""

    boxes: np.ndarray  # (P, Q, 4) as (x, y, w, h) relative to the picture, for P pictures and Q queries; w = 0 for none
    scores: np.ndarray  # (P, Q), of the boxes


def pictures(paths: Sequence[Path]) -> list[Path]:
    """Return the pictures, including those of folders, sorted by name."""
    files: list[Path] = []
    for path in paths:
        inside = pictures_in(path) if path.is_dir() else [path]
        if not inside or not all(file.is_file() for file in inside):
            raise ValueError(f"--slots must name pictures or folders of pictures, got {path}")
        files += inside
    return files


def collect(look: Callable[[Path], tuple[Objects, tuple[int, int]]], files: Sequence[Path]) -> Slots:
    """Gather every query's box in every picture; ``look`` is as :func:`.view_objects` of a model."""
    boxes, scores = [], []
    for file in files:
        objects, (h, w) = look(file)
        order = objects.queries.argsort()
        corners = objects.boxes[order] / objects.boxes.new_tensor([w, h, w, h])
        boxes.append(box_convert(corners, "xyxy", "cxcywh").numpy())
        scores.append(objects.scores[order].numpy())
    return Slots(np.stack(boxes), np.stack(scores))


def kind_of_box(boxes: np.ndarray) -> np.ndarray:
    """Return the index into ``KINDS`` of boxes (..., 4)."""
    w, h = boxes[..., 2], boxes[..., 3]
    return np.where(w * h < SMALL, 0, np.where(w >= h, 1, 2))
