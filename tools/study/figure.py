"""Curves of a study: the mean over the seeds of every setting, and a band of one standard deviation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.plots import figure
from tools.study.settings import Study
from tools.study.table import VALUES, Row, grouped

COLOURS = ("#b3462c", "#2b6ca3", "#3c8c5a", "#8a5fa8", "#a3792b", "#5b6770")


def plot(panel: Any, results: Sequence[Row], name: str, unit: Any = None) -> None:
    """Draw the settings of a panel over epochs, or over ``unit``, the cost of an epoch."""
    for colour, (setting, rows) in zip(COLOURS * len(results), grouped(results, lambda row: row["setting"]).items()):
        columns = list(zip(*(row[name] for row in rows)))
        mean = [statistics.fmean(column) for column in columns]
        half = [statistics.stdev(column) if len(column) > 1 else 0.0 for column in columns]
        scale = statistics.fmean(unit(row) for row in rows) if unit else 1
        places = [scale * epoch for epoch in rows[0].get("epochs", range(1, len(mean) + 1))[: len(mean)]]
        panel.plot(places, mean, color=colour, linewidth=1.5, label=setting)
        low, high = [m - h for m, h in zip(mean, half)], [m + h for m, h in zip(mean, half)]
        panel.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0)
    panel.grid(alpha=0.25, linewidth=0.5)


def draw(study: Study, results: Sequence[Row], out: Path) -> None:
    """Save the curve that the study names: a row of panels for each part.

    The panels of a row are by the key ``panels`` of the results, or over epochs and over CPU minutes.
    """
    curve, parts = study.data["curve"], grouped(results, study.part_of)
    families = list(grouped(results, lambda row: row[curve["panels"]])) if "panels" in curve else [None, None]
    style = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
    size = (3.6 * len(families), 2.75 * len(parts))
    with figure(out, len(parts), len(families), style, {}, sharey="row", dpi=120, figsize=size) as (_, axes):
        for panels, (part, rows) in zip(axes, parts.items()):
            panels[0].set(ylabel=curve["label"])
            for number, (panel, family) in enumerate(zip(panels, families)):
                chosen = [row for row in rows if family is None or row[curve["panels"]] == family]
                minutes = family is None and number == 1
                plot(
                    panel, chosen, curve["value"], (lambda row: VALUES["epoch_seconds"](row) / 60) if minutes else None
                )
                title = "" if family is None else f"{family} on {part}"
                panel.set(title=title, xlabel="CPU minutes" if minutes else "epochs", xlim=(0, None))
                if chosen and not minutes:
                    panel.legend(frameon=False)
