"""Report of tools.vit_study: a table for each data set, and accuracy by epoch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.detection_study_curves import COLOURS, spread
from tools.files import write

Result = Mapping[str, Any]


def grouped(results: Sequence[Result], key: str) -> dict[str, list[Result]]:
    """Group ``results`` by one of their values, in order of first appearance."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result[key], []).append(result)
    return groups


def epoch_minutes(result: Result) -> float:
    """Return the CPU minutes of an epoch, including its evaluation and a share of the start."""
    return result["train_cpu_seconds"] / 60 / len(result["top1"])


def table(results: Sequence[Result]) -> list[str]:
    """Return the table of one data set: a row for each setting, with mean ± standard deviation over its seeds."""
    lines = [
        "| setting | parameters | epochs | seeds | top-1 at the end, % | of each seed | validation loss "
        "| CPU minutes an epoch |",
        "|---|---:|---:|---|---:|---|---:|---:|",
    ]
    for name, group in grouped(results, "setting").items():
        cells = [
            f"`{name}`",
            f"{group[0]['parameters']:,}",
            f"{len(group[0]['top1'])}",
            " ".join(str(result["seed"]) for result in group),
            spread([result["top1"][-1] for result in group], 2),
            " ".join(f"{result['top1'][-1]:.2f}" for result in group),
            spread([result["val_loss"][-1] for result in group], 3),
            spread([epoch_minutes(result) for result in group], 3),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def markdown(results: Sequence[Result], facts: Mapping[str, str]) -> str:
    """Return the tables of all data sets."""
    lines = ["# Small vision transformers, with our attention and with timm's", ""]
    lines.append(", ".join(f"{key} {value}" for key, value in facts.items()))
    for name, group in grouped(results, "set").items():
        images = group[0]["images"]
        count = (
            f"{images['train']:,} images for training, {images['val']:,} for validation; {images['classes']} classes"
        )
        lines += ["", f"## {name}", "", count, "", *table(group)]
    return "\n".join(lines) + "\n"


def band(group: Sequence[Result]) -> tuple[list[int], list[float], list[float]]:
    """Return the epochs that all seeds of ``group`` have, the mean of their accuracies and the standard deviation."""
    columns = list(zip(*(result["top1"] for result in group)))
    deviation = [statistics.stdev(column) if len(column) > 1 else 0.0 for column in columns]
    return list(range(1, len(columns) + 1)), [statistics.fmean(column) for column in columns], deviation


def draw(results: Sequence[Result], out: Path) -> None:
    """Save accuracy by epoch: a row of panels per data set, a panel per family, bands of one standard deviation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    sets, families = grouped(results, "set"), grouped(results, "family")
    style = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(style):
        size = (3.6 * len(families), 2.6 * len(sets))
        figure, axes = plt.subplots(
            len(sets), len(families), squeeze=False, sharey="row", dpi=120, figsize=size, layout="constrained"
        )
        for row, (data_set, of_set) in zip(axes, sets.items()):
            for panel, family in zip(row, families):
                chosen = grouped([result for result in of_set if result["family"] == family], "setting")
                for colour, (name, group) in zip(COLOURS * len(results), chosen.items()):
                    epochs, mean, deviation = band(group)
                    low, high = zip(*((m - d, m + d) for m, d in zip(mean, deviation)))
                    panel.plot(epochs, mean, color=colour, linewidth=1.5, label=name)
                    panel.fill_between(epochs, low, high, color=colour, alpha=0.2, linewidth=0)
                panel.set(title=f"{family} on {data_set}", xlabel="epochs", xlim=(0, None))
                panel.xaxis.set_major_locator(MaxNLocator(integer=True))
                panel.grid(alpha=0.25, linewidth=0.5)
                if chosen:
                    panel.legend(loc="lower right", frameon=False)
            row[0].set(ylabel="top-1 on validation images, %")
        write(out, lambda partial: figure.savefig(partial, format="png"))
        plt.close(figure)
