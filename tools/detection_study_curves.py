"""Convergence of tools.detection_study: curves from mmengine's logs, epochs to a level, the table and the figure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.files import write

LEVELS = (0.02, 0.05, 0.1, 0.2)  # mAP levels for which the table counts epochs
COLOURS = ("#b3462c", "#2b6ca3", "#3c8c5a", "#8a5fa8", "#a3792b", "#5b6770")
Result = Mapping[str, Any]


def read_curves(folder: Path) -> dict[str, Any]:
    """Read what mmengine logged in ``folder``, a work directory.

    Returns:
        ``epochs``, those with an evaluation; for each of them ``mAP`` and ``mAP_50`` of boxes and, where masks are
        evaluated, ``segm_mAP``; ``loss``, the last one logged in every epoch.

    Raises:
        ValueError: ``folder`` has no log, or its log has no evaluation.
    """
    losses: dict[int, float] = {}
    found: dict[int, dict[str, float]] = {}
    files = sorted(folder.glob("*/vis_data/scalars.json"))
    if not files:
        raise ValueError(f"{folder} has no */vis_data/scalars.json, mmengine's log")
    for line in "".join(file.read_text(encoding="utf-8") for file in files).splitlines():
        row = json.loads(line)
        if "coco/bbox_mAP" in row:
            found[row["step"]] = row
        elif "loss" in row:
            losses[row["epoch"]] = row["loss"]
    if not found:
        raise ValueError(f"{files[-1]} has no coco/bbox_mAP: no evaluation ended")
    epochs = sorted(found)
    curves: dict[str, Any] = {"epochs": epochs}
    for name in ("bbox_mAP", "bbox_mAP_50", "segm_mAP"):
        if f"coco/{name}" in found[epochs[-1]]:
            curves[name.removeprefix("bbox_")] = [found[epoch][f"coco/{name}"] for epoch in epochs]
    curves["loss"] = [losses[epoch] for epoch in sorted(losses)]
    return curves


def reached(result: Result, level: float) -> int | None:
    """Return the first evaluated epoch whose mAP is at least ``level``, or None."""
    return next((epoch for epoch, value in zip(result["epochs"], result["mAP"]) if value >= level), None)


def epoch_seconds(result: Result) -> float:
    """Return the CPU seconds of an epoch, evaluations and start included; mmengine evaluates after the last one."""
    return result["train_cpu_seconds"] / result["epochs"][-1]


def by_setting(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Group the results of all seeds by setting, in order of first appearance."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result["setting"], []).append(result)
    return groups


def spread(values: Sequence[float], digits: int) -> str:
    """Format mean ± standard deviation of a sample, or the only value."""
    text = f"{statistics.fmean(values):.{digits}f}"
    return f"{text} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else text


def epochs_to(group: Sequence[Result], level: float) -> str:
    """Format the epochs in which the seeds of a setting reach ``level``, and how many of them do."""
    epochs = [epoch for result in group if (epoch := reached(result, level)) is not None]
    if not epochs:
        return f"> {max(result['epochs'][-1] for result in group)}"
    text = spread(epochs, 0)
    return text if len(epochs) == len(group) else f"{text} ({len(epochs)} of {len(group)})"


def markdown(results: Sequence[Result], facts: Mapping[str, str]) -> str:
    """Return the table: a row for each setting, with mean ± standard deviation over its seeds."""
    levels = " | ".join(f"epochs to {level}" for level in LEVELS)
    lines = [
        "# DETR beside Deformable DETR, small",
        "",
        ", ".join(f"{k} {v}" for k, v in facts.items()),
        "",
        f"| setting | parameters | seeds | CPU s an epoch | {levels} | mAP at the end | at IoU 0.5 | of masks |",
        f"|---|---:|---|---:|{'---:|' * len(LEVELS)}---:|---:|---:|",
    ]
    for name, group in by_setting(results).items():
        seconds = [epoch_seconds(result) for result in group]
        masks = [result["segm_mAP"][-1] for result in group if "segm_mAP" in result]
        cells = [
            f"`{name}`",
            f"{group[0]['parameters']:,}",
            " ".join(str(result["seed"]) for result in group),
            spread(seconds, 1),
            *(epochs_to(group, level) for level in LEVELS),
            f"{spread([result['mAP'][-1] for result in group], 3)} at {group[0]['epochs'][-1]}",
            spread([result["mAP_50"][-1] for result in group], 3),
            spread(masks, 3) if masks else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(results: Sequence[Result], out: Path) -> None:
    """Save mAP over epochs and over CPU time: a setting's mean over its seeds, and the band of one deviation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(style):
        figure, axes = plt.subplots(1, 2, sharey=True, dpi=120, figsize=(7.2, 2.9), layout="constrained")
        for colour, (name, group) in zip(COLOURS * len(results), by_setting(results).items()):
            count = min(len(result["epochs"]) for result in group)
            columns = list(zip(*(result["mAP"][:count] for result in group)))
            mean = [statistics.fmean(column) for column in columns]
            half = [statistics.stdev(column) if len(column) > 1 else 0.0 for column in columns]
            low, high = [m - h for m, h in zip(mean, half)], [m + h for m, h in zip(mean, half)]
            epochs = group[0]["epochs"][:count]
            minutes = statistics.fmean(epoch_seconds(result) for result in group) / 60
            for panel, unit in zip(axes, (1.0, minutes)):
                places = [epoch * unit for epoch in epochs]
                panel.plot(places, mean, color=colour, linewidth=1.5, label=name)
                panel.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0)
        axes[0].set(xlabel="epochs", ylabel="mAP on validation images", xlim=(0, None), ylim=(0, None))
        axes[1].set(xlabel="CPU minutes", xlim=(0, None))
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
        for panel in axes:
            panel.grid(alpha=0.25, linewidth=0.5)
        write(out, lambda partial: figure.savefig(partial, format="png"))
        plt.close(figure)
