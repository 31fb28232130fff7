"""Boundary F1 of masks in mmsegmentation: ``val_evaluator = dict(type="BoundaryMetric", tolerance=1)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS
from torch import Tensor
from torch.nn import functional as F

__all__ = ["BoundaryMetric"]


def dilated(mask: Tensor, radius: int) -> Tensor:
    """Return the pixels (H, W) of which one within ``radius`` rows and columns is True."""
    return F.max_pool2d(mask[None, None].float(), 2 * radius + 1, 1, radius)[0, 0] > 0


@METRICS.register_module(force=True)
class BoundaryMetric(BaseMetric):
    """F1 of the boundaries of everything that is not background (label 0), in percent, over all pixels of the set.

    A boundary is the pixels of a mask that touch its outside, corners included. A boundary pixel is right if one of
    the other mask's is within ``tolerance`` rows and columns. ``boundary/F`` is NaN if there is no boundary at all.
    Ignored pixels of the truth are neither inside nor outside.

    Args:
        tolerance: Pixels.
        ignore_index: Label of ignored pixels.
        options: See mmengine's ``BaseMetric``.
    """

    default_prefix = "boundary"

    def __init__(self, tolerance: int = 1, ignore_index: int = 255, **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(tolerance, int) or tolerance < 0:
            raise ValueError(f"tolerance must be an int of at least 0, got {tolerance!r}")
        self.tolerance, self.ignore_index = tolerance, ignore_index

    def process(self, data_batch: Any, data_samples: Sequence[dict[str, Any]]) -> None:
        """Count right and all boundary pixels of prediction and truth of every image."""
        for sample in data_samples:
            labels = [sample[key]["data"].squeeze(0).cpu() for key in ("pred_sem_seg", "gt_sem_seg")]
            known = labels[1] != self.ignore_index
            predicted, true = (known & (label > 0) & dilated(known & (label == 0), 1) for label in labels)
            right = [(a & dilated(b, self.tolerance)).sum() for a, b in ((predicted, true), (true, predicted))]
            self.results.append(torch.stack([*right, predicted.sum(), true.sum()]))

    def compute_metrics(self, results: list[Tensor]) -> dict[str, float]:
        """Compute the harmonic mean of precision and recall."""
        if not results:
            return {"F": float("nan")}
        right, recalled, predicted, true = torch.stack(results).sum(0).double().tolist()
        if not predicted + true:
            return {"F": float("nan")}
        precision, recall = right / max(predicted, 1), recalled / max(true, 1)
        return {"F": 200 * precision * recall / max(precision + recall, 1e-12)}
