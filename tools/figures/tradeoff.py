"""Accuracy over operations of attention: Zhu et al. (2019), Fig. 3, from printed figures and from our small runs.

Figure 3 has no numbers. The plot shows the values of Tables 2 and 3: every setting with ε1 or ε2 that the authors name,
those with deformable convolution, ranges and dynamic convolution. Operations are those of the attention under study:
the difference of the networks with and without it.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tools.plots import figure
from tools.study.rules import Sample, student
from tools.study.table import grouped
from tools.train.config import Config
from tools.train.model import create_model

from . import convention, empirical, networks, translation

TASKS = {
    "detection": "mAP, detection",
    "segmentation": "mIoU, segmentation",
    "translation": "BLEU, translation (self-attention)",
}
KINDS = {".self_attn": "self-attention", ".encoder_attn": "encoder-decoder attention"}  # by parts of module names
TOKENS = 50  # for our small models, as in the paper
RUNS = Path("benchmarks/translation-gettext.json")
# The central claim, on digits; of a map that both have, the second, which has more settings.
IMAGES = (Path("benchmarks/deformed-digits.json"), Path("benchmarks/deformed-terms.json"))
GROUPS = {"terms": "#1f77b4", "range": "#7fb2dd", "deformable": "#d62728", "dynamic": "#2ca02c", "bilateral": "#9467bd"}
LABELS = ("w/o", "1111", "0110", "0010 + deformable", "w/o + deformable")  # settings of the paper with a label


@dataclass(frozen=True)
class Point:
    """A setting."""

    name: str
    operations: float  # of the attention under study: 10⁹ for the paper's networks, 10⁶ for ours
    accuracy: float
    interval: float = 0.0  # half of the 95 % interval; 0 if unknown

    @property
    def group(self) -> str:
        """Group that determines the colour."""
        for word, group in (("deformable",) * 2, ("dynamic",) * 2, ("bilateral",) * 2, ("n=", "range")):
            if word in self.name:
                return group
        return "terms"


def printed(task: str) -> list[Point]:
    """Return the paper's settings for one of :data:`TASKS`; operations are differences of printed GFLOPs."""
    column = list(TASKS).index(task)
    if task == "translation":
        giga = {setting: float(figure) for setting, figure, _ in translation.SETTINGS}
    else:
        giga = {setting: float(figures[column]) for setting, *figures, _ in empirical.SETTINGS}
        giga["w/o"] = float(empirical.TASKS[task][0])
        giga["w/o + deformable"] = giga.pop("deformable")
    points = []
    for setting, accuracy in translation.ACCURACY.items():
        # On images, deformable convolution costs no more than the convolution it replaces.
        own = giga[setting] if setting in giga else giga[setting.removesuffix(" + deformable")]
        points.append(Point(setting, round(own - giga["w/o"], 1), accuracy[column]))
    return points


def measured(runs: Path = RUNS) -> dict[str, list[Point]]:
    """Return our small translators of ``tools.study`` by panel: self-attention, and attention to the encoder.

    Raises:
        ValueError: the file is invalid.
    """
    try:
        data = json.loads(runs.read_text(encoding="utf-8"))
        common = options_of(data["common"])
        results = {key: value for key, value in data.items() if key.endswith(" updates")}
        panels: dict[str, list[Point]] = {}
        for updates, rows in results.items():
            for row in rows:
                cross = row["setting"].startswith("cross-")
                for kind, words in KINDS.items():
                    if cross != (kind == ".encoder_attn") and row["setting"] != "1111":
                        continue
                    million = operations({**common, **options_of(row["options"])}, kind) / 1e6
                    point = Point(row["setting"].removeprefix("cross-"), million, row["bleu"], row["bleu_interval"])
                    panels.setdefault(f"BLEU, ours, {words}, {updates}", []).append(point)
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"RUNS must be a file of tools.study, got {runs}: {error!r}") from error
    return {panel: points for panel, points in panels.items() if len(points) > 1}


def classified(runs: Path) -> dict[str, list[Point]]:
    """Return our small classifiers of the study ``deformed-digits`` by set, at the operations they add to ``plain``."""
    results = json.loads(runs.read_text(encoding="utf-8"))["results"] if runs.is_file() else []
    panels: dict[str, list[Point]] = {}
    for part, of_part in grouped(results, lambda row: row["set"]).items():
        settings = grouped(of_part, lambda row: row["setting"])
        totals = {setting: executed_by(rows[0]) for setting, rows in settings.items()}
        for setting, rows in settings.items():
            top1 = Sample(tuple(row["top1"][-1] for row in rows))
            half = student(len(rows) - 1) * top1.deviation / math.sqrt(len(rows)) if len(rows) > 1 else 0.0
            point = Point(setting, (totals[setting] - totals["plain"]) / 1e6, top1.mean, half)
            panels.setdefault(f"top-1 in %, ours, deformed digits, {part.replace('-', ' ')}", []).append(point)
    return panels


def executed_by(row: dict[str, Any]) -> int:
    """Count the multiply-adds of a classifier of ``tools.study``."""
    config = Config(**row["options"])
    with torch.device("meta"):
        model = create_model(config, row["images"]["classes"])
    return convention.executed(convention.calls(model, 1, 3, *(config.input_size or (32, 32))))


def options_of(text: str) -> dict[str, Any]:
    """Parse the options of fairseq-train that determine the operations of attention."""
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS, allow_abbrev=False)
    for name in ("arch", "encoder-attention", "decoder-attention", "cross-attention"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--attention-range", type=int)
    parser.add_argument("--deformable", action="store_true")
    return vars(parser.parse_known_args(shlex.split(text))[0])


def operations(options: dict[str, Any], kind: str) -> int:
    """Count the multiply-adds of attention (of :data:`KINDS`) for :data:`TOKENS` source and target tokens."""
    calls = networks.translator(TOKENS, **options)
    return convention.executed([call for call in calls if kind in call.module])


def envelope(points: Sequence[Point]) -> list[Point]:
    """Return the points that no cheaper or equally cheap one reaches, by operations."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.operations, -p.accuracy)):
        if not best or point.accuracy > best[-1].accuracy:
            best.append(point)
    return best


def plot(path: Path, runs: Path = RUNS, images: Sequence[Path] = IMAGES) -> dict[str, list[Point]]:
    """Draw all panels; return their points."""
    panels = {title: printed(task) for task, title in TASKS.items()}
    for file in images:
        panels |= classified(file)
    panels |= measured(runs)
    rows = -(-len(panels) // 3)
    style = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "tradeoff"}
    with figure(path, rows, 3, style, dict(dpi=110), figsize=(11, 3.5 * rows)) as (whole, axes):
        for axis, (title, points) in zip(axes.flat, panels.items()):
            _panel(axis, title, points)
        for axis in axes.flat[len(panels) :]:
            axis.axis("off")
        for group, colour in GROUPS.items():
            axes[0, 0].plot([], [], color=colour, marker="o", linestyle="", label=group)
        whole.legend(loc="outside lower center", ncols=len(GROUPS), frameon=False)
    return panels


def _panel(axis: Any, title: str, points: Sequence[Point]) -> None:
    ours = "ours" in title
    for group, colour in GROUPS.items():
        own = [point for point in points if point.group == group]
        line = envelope(own)
        if len(line) > 1:
            axis.plot([p.operations for p in line], [p.accuracy for p in line], color=colour, linewidth=1, alpha=0.5)
        for point in own:
            interval = point.interval or None
            axis.errorbar(
                point.operations, point.accuracy, interval, color=colour, marker="o", markersize=4, elinewidth=0.7
            )
    axis.set_title(title, fontsize=8)
    label = "MFLOPs added; bars are 95 % intervals" if ours else "GFLOPs of attention"
    axis.set(xlabel=label, ylabel=title.partition(",")[0])
    axis.margins(x=0.15, y=0.1)
    axis.grid(alpha=0.25, linewidth=0.5)
    _label(axis, [point for point in points if ours or point.name in LABELS])


def _label(axis: Any, points: Sequence[Point]) -> None:
    """Name points beside them, each at the first of some places where no earlier label is."""
    axis.autoscale_view()
    scale = 72 / axis.figure.dpi  # points of a pixel
    boxes: list[tuple[float, float, float]] = []  # left, bottom and width
    for point in points:
        x, y = (scale * n for n in axis.transData.transform((point.operations, point.accuracy)))
        width = 3.6 * len(point.name)
        places = [(4, 4), (4, -9), (4, 12), (4, -17), (-4 - width, 4), (-4 - width, -9)]
        free = (
            (dx, dy)
            for dx, dy in places
            if not any(abs(y + dy - b) < 7 and x + dx < a + w and a < x + dx + width for a, b, w in boxes)
        )
        dx, dy = next(free, places[0])
        boxes.append((x + dx, y + dy, width))
        bold = "bold" if point.name.replace(" ", "") == "0010+deformable" else "normal"
        axis.annotate(
            point.name, (point.operations, point.accuracy), (dx, dy), textcoords="offset points", fontsize=6.5,
            fontweight=bold,
        )  # fmt: skip
