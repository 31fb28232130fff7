"""Table of tools.captioning_study, with the seeds of a setting and stage in one row."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "METEOR", "ROUGE-L", "CIDEr-D", "SPICE")


def aggregated(results: Sequence[Mapping[str, Any]], descriptions: Mapping[str, str]) -> list[dict[str, Any]]:
    """Average the seeds of each setting and stage, in order of first appearance.

    Args:
        results: Results of single runs.
        descriptions: Description of each setting.

    Returns:
        Rows with ``what``, ``stage``, ``seeds``, ``parameters``, ``seconds`` of training (None: not trained),
        ``scores`` (in hundredths), ``spread`` (standard deviation of CIDEr-D over seeds, or None) and ``left_out``.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["setting"], result["stage"]), []).append(result)
    rows = []
    for (name, stage), group in groups.items():
        names = [score for score in COLUMNS if all(score in result["scores"] for result in group)]
        scores = {score: 100 * statistics.fmean(result["scores"][score] for result in group) for score in names}
        seconds = [result["train_cpu_seconds"] for result in group if "train_cpu_seconds" in result]
        ciders = [100 * result["scores"]["CIDEr-D"] for result in group]
        rows.append(
            {
                "setting": name,
                "what": descriptions[name],
                "stage": stage,
                "seeds": sorted({seed for result in group for seed in result["seeds"]}),
                "parameters": group[0].get("parameters"),
                "seconds": statistics.fmean(seconds) if seconds else None,
                "scores": scores,
                "spread": statistics.stdev(ciders) if len(ciders) > 1 else None,
                "left_out": {name: reason for result in group for name, reason in result["left_out"].items()},
                "images": group[0]["images"],
            }
        )
    return rows


def markdown(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, str], made: Mapping[str, Any]) -> str:
    """Return the table, below the machine, the commands of the data and the scores left out."""
    names = [name for name in COLUMNS if any(name in row["scores"] for row in rows)]
    lines = ["# Image captioning, small", "", ", ".join(f"{k} {v}" for k, v in facts.items()), ""]
    for name, made_by in made.items():
        lines.append(f"{name}: `{made_by['options']}`, {made_by['cpu_seconds']:.0f} CPU s")
    if made:
        lines.append("")
    left_out = {name: reason for row in rows for name, reason in row["left_out"].items()}
    lines += [f"{name} left out: {reason}" for name, reason in left_out.items()]
    if left_out:
        lines.append("")
    lines.append(f"| setting | what | stage | seeds | parameters | {' | '.join(names)} | CPU s |")
    lines.append(f"|---|---|---|---|---:|{'---:|' * len(names)}---:|")
    for row in rows:
        cells = [f"`{row['setting']}`", row["what"], row["stage"], " ".join(map(str, row["seeds"]))]
        cells.append("" if row["parameters"] is None else f"{row['parameters']:,}")
        for name in names:
            cell = f"{row['scores'][name]:.1f}" if name in row["scores"] else ""
            if name == "CIDEr-D" and row["spread"] is not None:
                cell += f" ± {row['spread']:.1f}"
            cells.append(cell)
        cells.append("" if row["seconds"] is None else f"{row['seconds']:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
