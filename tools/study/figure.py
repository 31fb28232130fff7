"""Curves of a study: the mean over the seeds of every setting, and a band of one standard deviation; claims."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.plots import figure
from tools.study.rules import CANNOT, MARGIN, NOT, SEEN, Outcome, counts_operations
from tools.study.settings import Study
from tools.study.table import VALUES, Row, grouped

VERDICTS = {SEEN: "#3c8c5a", NOT: "#b3462c", CANNOT: "#8a8f94"}
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


def draw_claims(claims: Sequence[dict[str, Any]], outcomes: Sequence[Outcome], out: Path) -> None:
    """Save our difference and its 95 % interval for every claim that trainings test, a panel for each document.

    Claims are worded so that the document's difference is positive; "as good" holds right of its margin, the tick. The
    lower half of a repeated study's intervals is of the repetition.
    """
    judgements = zip(claims, outcomes)
    shown = [(claim, judged) for claim, judged in judgements if judged.differences and not counts_operations(claim)]
    parts = grouped(shown, lambda row: row[0]["document"])
    sizes = [len(rows) for rows in parts.values()]
    style = {"font.size": 7, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "claims"}
    form = dict(sharex=True, height_ratios=sizes, figsize=(9, 0.17 * sum(sizes) + 1.2))
    with figure(out, len(parts), 1, style, {}, **form) as (whole, axes):
        for panel, (document, rows) in zip(axes.flat, parts.items()):
            for place, (claim, judged) in enumerate(rows):
                spread = 0.3 * len(judged.differences)
                for number, (shift, half) in enumerate(judged.differences, 1):
                    panel.errorbar(
                        shift, place + spread * (number / (len(judged.differences) + 1) - 0.5), xerr=half,
                        color=VERDICTS[judged.verdict], fmt="o", markersize=3, linewidth=1,
                        markerfacecolor="white" if half is None else None,
                    )  # fmt: skip
                if "as_good" in claim:
                    panel.plot(-claim.get("margin", MARGIN), place, "|", color="black", markersize=5)
            names = [claim["claim"].replace("`", "") + " (other data)" * ("repeats" in claim) for claim, _ in rows]
            panel.set(yticks=range(len(rows)), yticklabels=names, ylim=(len(rows) - 0.5, -0.5))
            panel.set_title(document, loc="left", fontweight="bold")
            panel.set_xscale("symlog", linthresh=1)
            panel.axvline(0, color="black", linewidth=0.5)
            panel.grid(axis="x", alpha=0.25, linewidth=0.5)
        ticks = [sign * size for sign in (-1, 1) for size in (1, 3, 10, 30, 100)]
        axes[-1, 0].set(xlabel="points of the study's metric; the documents' differences are right of 0")
        axes[-1, 0].set_xticks([0, *ticks], [f"{tick:+d}" if tick else "0" for tick in [0, *ticks]])
        for verdict, colour in VERDICTS.items():
            axes[0, 0].plot([], [], "o", color=colour, markersize=3, label=verdict)
        axes[0, 0].plot([], [], "o", color=VERDICTS[CANNOT], markerfacecolor="white", markersize=3, label="one seed")
        axes[0, 0].plot([], [], "|", color="black", label='margin of "as good"')
        whole.legend(loc="outside lower center", ncols=5, frameon=False)
