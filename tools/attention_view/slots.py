"""Positions of each object query's boxes over many pictures, as in Carion et al. (2020), Fig. 7."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.files import write
from tools.show_sampling import save

from .objects import Objects

PICTURES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
SMALL = 0.03  # relative area: COCO's bound of large objects, 96² of 640×480 pixels
KINDS = (("small", "#1a9e3f"), ("large, horizontal", "#d62728"), ("large, vertical", "#1f5fd6"))
MOST = 20  # panels


@dataclass
class Slots:
    """Boxes of every query.

    Attributes:
        boxes: (P, Q, 4) as (x, y, w, h) relative to the picture, for P pictures and Q queries; w = 0 for none.
        scores: (P, Q), scores of the boxes.
    """

    boxes: np.ndarray
    scores: np.ndarray


def pictures(paths: Sequence[Path]) -> list[Path]:
    """Return the pictures, including those of folders, sorted by name.

    Raises:
        ValueError: a path is neither a picture nor a folder, or a folder has no pictures.
    """
    found: list[Path] = []
    for path in paths:
        inside = sorted(f for f in path.iterdir() if f.suffix.lower() in PICTURES) if path.is_dir() else [path]
        if not inside or not all(file.is_file() for file in inside):
            raise ValueError(f"--slots must name pictures or folders of pictures, got {path}")
        found += inside
    return found


def collect(look: Callable[[Path], tuple[Objects, tuple[int, int]]], files: Sequence[Path]) -> Slots:
    """Gather every query's box in every picture.

    Args:
        look: Maps a file to the results of all queries, and the size (h, w) in whose pixels their boxes are.
        files: Pictures.
    """
    boxes, scores = [], []
    for file in files:
        objects, (h, w) = look(file)
        order = objects.queries.argsort()
        left, top, right, bottom = (objects.boxes[order] / objects.boxes.new_tensor([w, h, w, h])).numpy().T
        boxes.append(np.stack(((left + right) / 2, (top + bottom) / 2, right - left, bottom - top), -1))
        scores.append(objects.scores[order].numpy())
    return Slots(np.stack(boxes), np.stack(scores))


def kind(boxes: np.ndarray) -> np.ndarray:
    """Return the index into ``KINDS`` of boxes (..., 4)."""
    w, h = boxes[..., 2], boxes[..., 3]
    return np.where(w * h < SMALL, 0, np.where(w >= h, 1, 2))


def draw_slots(slots: Slots, out: Path) -> list[int]:
    """Save a panel for each of the queries with the best mean scores: the centres of its boxes in a unit square.

    Returns:
        The numbers of these queries.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    mean = slots.scores.mean(0)
    chosen = np.sort(np.argsort(-mean, kind="stable")[:MOST])
    columns = min(len(chosen), 5)
    rows = -(-len(chosen) // columns)
    figure, axes = plt.subplots(
        rows, columns, squeeze=False, dpi=180, layout="constrained", figsize=(1.5 * columns, 1.62 * rows + 0.7)
    )
    for panel in axes.flat[len(chosen) :]:
        panel.axis("off")
    size = float(np.clip(400 / len(slots.boxes), 2, 12))
    for query, panel in zip(chosen, axes.flat):
        boxes = slots.boxes[:, query]
        boxes = boxes[boxes[:, 2] > 0]
        kinds = kind(boxes)
        for n, (_, colour) in enumerate(KINDS):
            panel.scatter(*boxes[kinds == n, :2].T, s=size, c=colour, linewidths=0)
        panel.set(xlim=(0, 1), ylim=(1, 0), aspect="equal", xticks=[], yticks=[])
        panel.set_title(f"query {query}: mean score {mean[query]:.2f}", fontsize=6.5, pad=2)
    which = "all" if len(chosen) == slots.boxes.shape[1] else f"the {len(chosen)} surest of {slots.boxes.shape[1]}"
    figure.suptitle(f"Centres of the boxes in {len(slots.boxes)} pictures, {which} queries", fontsize=9)
    marks = [plt.Line2D([], [], marker="o", linestyle="", color=colour) for _, colour in KINDS]
    labels = [f"{KINDS[0][0]} (under {SMALL:.0%} of the picture)", KINDS[1][0], KINDS[2][0]]
    figure.legend(marks, labels, loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    write(out, lambda partial: save(figure, partial))
    plt.close(figure)
    return chosen.tolist()
