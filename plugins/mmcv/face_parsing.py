"""Face parsing in mmsegmentation: the data sets HELEN and LFW-PL, and their metric.

``python -m tools.datasets.face_parsing`` creates the folders that the two data sets read::

    data/helen/{images,labels}/{train,val,test}/NAME.{jpg,png}

    dataset=dict(type="HELENDataset", data_root="data/helen",
                 data_prefix=dict(img_path="images/train", seg_map_path="labels/train"), pipeline=...)
    val_evaluator = dict(type="FaceParsingMetric")

With ``--landmarks`` it aligns HELEN's faces by the data set's landmarks, as the thesis did before scoring.

Mirroring a face swaps its left and right eyes: give HELEN's ``RandomFlip`` the argument
``swap_seg_labels=[(2, 3), (4, 5)]``. The labels are those of the stored pixels: load images with
``color_type="color_ignore_orientation"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mmengine.evaluator import BaseMetric
from mmengine.logging import print_log
from mmengine.registry import DATASETS, METRICS
from mmseg.datasets import BaseSegDataset
from torch import Tensor

__all__ = ["FaceParsingMetric", "HELENDataset", "LFWPLDataset"]


@DATASETS.register_module(force=True)
class HELENDataset(BaseSegDataset):
    """HELEN with the eleven labels of Smith et al. 2013; takes the arguments of mmseg's ``BaseSegDataset``."""

    METAINFO = dict(
        classes=(
            "background", "skin", "left brow", "right brow", "left eye", "right eye", "nose", "upper lip",
            "inner mouth", "lower lip", "hair",
        ),
        palette=[
            [0, 0, 0], [230, 190, 140], [120, 60, 20], [190, 110, 40], [40, 90, 220], [90, 200, 250], [250, 210, 40],
            [220, 40, 60], [110, 10, 60], [250, 120, 150], [60, 150, 70],
        ],
    )  # fmt: skip


@DATASETS.register_module(force=True)
class LFWPLDataset(BaseSegDataset):
    """LFW Part Labels with the three labels of Kae et al. 2013; takes the arguments of mmseg's ``BaseSegDataset``."""

    METAINFO = dict(classes=("background", "skin", "hair"), palette=[[0, 0, 255], [0, 255, 0], [255, 0, 0]])


# Groups that Table 4.3 scores in addition to single classes; their classes are merged before the comparison.
GROUPS: dict[str, tuple[str, ...]] = {
    "brows": ("left brow", "right brow"),
    "eyes": ("left eye", "right eye"),
    "mouth": ("upper lip", "inner mouth", "lower lip"),
}
GROUPS["overall"] = (*GROUPS["brows"], *GROUPS["eyes"], "nose", *GROUPS["mouth"])


@METRICS.register_module(force=True)
class FaceParsingMetric(BaseMetric):
    """F1 of every class and of groups of merged classes, and pixel accuracy, in percent, over all pixels of the set.

    The scores are the columns of the thesis' Tables 4.3 and 4.4: ``face/<class>`` (with ``_`` for a space),
    ``face/brows``, ``face/eyes``, ``face/mouth``, ``face/overall`` and ``face/accuracy``. A group is one label: a left
    eye predicted as a right one counts as correct. ``overall`` is the group of all inner components (brows, eyes, nose
    and mouth), without skin and hair. A score is NaN if neither prediction nor ground truth has its class.

    Args:
        ignore_index: Label of pixels that are not scored.
        options: See mmengine's ``BaseMetric``.

    Raises:
        ValueError: Prediction and ground truth differ in size, or a label is out of range.
    """

    default_prefix = "face"

    def __init__(self, ignore_index: int = 255, **options: Any) -> None:
        super().__init__(**options)
        self.ignore_index = ignore_index

    def process(self, data_batch: Any, data_samples: Sequence[dict[str, Any]]) -> None:
        """Count the (ground truth, prediction) pairs of every image."""
        count = len(self._classes())
        for sample in data_samples:
            where = sample.get("img_path", "an image")
            predicted, truth = sample["pred_sem_seg"]["data"], sample["gt_sem_seg"]["data"]
            if predicted.shape != truth.shape:
                raise ValueError(
                    f"prediction {tuple(predicted.shape)} and truth {tuple(truth.shape)} of {where} differ"
                )
            truth = truth.to(predicted.device)
            scored = truth != self.ignore_index
            pair = {"predicted": predicted[scored].long(), "true": truth[scored].long()}
            for kind, labels in pair.items():
                if ((labels < 0) | (labels >= count)).any():
                    interval = f"from {int(labels.min())} to {int(labels.max())}"
                    raise ValueError(f"{kind} labels of {where} must be from 0 to {count - 1}, got {interval}")
            self.results.append(self._confusion(pair["true"], pair["predicted"], count))

    @staticmethod
    def _confusion(truth: Tensor, predicted: Tensor, count: int) -> Tensor:
        """Count pixels by true and predicted label: (count, count)."""
        return torch.bincount(truth * count + predicted, minlength=count * count).view(count, count).cpu()

    def compute_metrics(self, results: list[Tensor]) -> dict[str, float]:
        """Compute the scores over all images, in percent."""
        classes = self._classes()
        total = sum(results, torch.zeros(len(classes), len(classes), dtype=torch.long))
        parts = {name.replace(" ", "_"): [i] for i, name in enumerate(classes)}
        for name, members in GROUPS.items():
            if set(members) <= set(classes):
                parts[name] = [classes.index(member) for member in members]
        scores = {
            name: _percent(2 * total[i][:, i].sum(), total[i].sum() + total[:, i].sum()) for name, i in parts.items()
        }
        scores["accuracy"] = _percent(total.trace(), total.sum())
        width = max(map(len, scores))
        lines = [f"{name:{width}}  {score:6.2f}" for name, score in scores.items()]
        print_log("\n".join(["F1 of classes and groups, and pixel accuracy (%):", *lines]), logger="current")
        return scores

    def _classes(self) -> list[str]:
        if not self.dataset_meta or not self.dataset_meta.get("classes"):
            raise ValueError("FaceParsingMetric needs the class names: dataset_meta must have 'classes'")
        return list(self.dataset_meta["classes"])


def _percent(part: Tensor, whole: Tensor) -> float:
    return 100 * int(part) / int(whole) if whole else float("nan")
