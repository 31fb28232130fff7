"""Tables of the studies, by the columns of their YAML files.

A column is a list: its heading, the kind of its cells, and for most kinds a value of the results, its format, a unit
and a factor. Kinds are the functions of :data:`CELLS`. A value is a key of the results (``scores.BLEU-4`` for a nested
one, the last item of a curve) or a name in :data:`VALUES`.
"""

from __future__ import annotations

import itertools
import shlex
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from tools.study.settings import Study

Row = dict[str, Any]
VALUES: dict[str, Callable[[Row], float]] = {
    "cpu_minutes": lambda row: row["train_cpu_seconds"] / 60,
    "epochs_trained": lambda row: len(row["top1"]),
    "epoch_minutes": lambda row: row["train_cpu_seconds"] / 60 / len(row["top1"]),
    "epoch_seconds": lambda row: row["train_cpu_seconds"] / row["epochs"][-1],
    "millions": lambda row: row["parameters"] / (1e6 if isinstance(row["parameters"], int) else 1),
    "long_minus_short": lambda row: row["bleu_by_length"]["long"] - row["bleu_by_length"]["short"],
    "operations": lambda row: row["multiply_adds"] / 1e6,
}


def grouped(results: Sequence[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Group results by a key, in order of first appearance."""
    groups: dict[Any, list[Row]] = {}
    for row in results:
        groups.setdefault(key(row), []).append(row)
    return groups


def value(row: Row, name: str) -> Any:
    """Return a value of a result, or None if it has none."""
    if name in VALUES:
        return VALUES[name](row)
    content: Any = row
    for key in name.split("."):
        content = content.get(key) if isinstance(content, dict) else None
    return content[-1] if isinstance(content, list) and content else content


def seeds(row: Row) -> list[int]:
    """Return the seeds of a result; an ensemble has several."""
    return row.get("seeds", [row["seed"]] if "seed" in row else [])


def spread(values: Sequence[float], form: str) -> str:
    """Format mean ± standard deviation, or the only value."""
    deviation = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{deviation}"


def reached(rows: Sequence[Row], name: str, level: float) -> str:
    """Format the first evaluated epochs with at least ``level``, and how many seeds reach it."""
    epochs = [next((n for n, x in zip(row["epochs"], row[name]) if x >= level), None) for row in rows]
    known = [epoch for epoch in epochs if epoch is not None]
    if not known:
        return f"> {max(row['epochs'][-1] for row in rows)}"
    return spread(known, ".0f") + ("" if len(known) == len(rows) else f" ({len(known)} of {len(rows)})")


def bleu(rows: Sequence[Row]) -> str:
    """Format BLEU of several seeds, or of one with its 95 % interval."""
    if len(rows) == 1:
        return f"{rows[0]['bleu']:.1f} ± {rows[0]['bleu_interval']:.1f}"
    return f"{spread([row['bleu'] for row in rows], '.1f')} ({len(rows)} seeds)"


def options(row: Row) -> str:
    """Return the options of a result, without its seed."""
    if isinstance(row["options"], list):
        return " ".join(row["options"])
    words = shlex.split(row["command"])
    changes = [change for name, change in itertools.pairwise(words) if name == "--set"]
    return " ".join(change for change in changes if not change.startswith("seed="))


def _numbers(rows: Sequence[Row], name: str, factor: float = 1) -> list[float]:
    return [factor * number for row in rows if (number := value(row, name)) is not None]


def what(study: Study, rows: Sequence[Row]) -> str:
    """Return the description of a setting or baseline."""
    name = rows[0]["setting"]
    return study.settings[name]["what"] if name in study.settings else study.data["baselines"].get(name, name)


def mean(values: Sequence[float], form: str) -> str:
    """Format the mean."""
    return f"{statistics.fmean(values):{form}}"


TEXTS: dict[str, Callable[..., str]] = {  # left-aligned
    "setting": lambda study, rows: f"`{rows[0]['setting']}`",
    "name": lambda study, rows: rows[0]["setting"],
    "what": what,
    "options": lambda study, rows: f"`{options(rows[0])}`",
    "seeds": lambda study, rows: " ".join(map(str, sorted({seed for row in rows for seed in seeds(row)}))),
    "text": lambda study, rows, name: rows[0].get(name) or "",
    "every": lambda study, rows, name, form: " ".join(f"{number:{form}}" for number in _numbers(rows, name)),
}
NUMBERS: dict[str, Callable[..., str]] = {
    "first": lambda values, form: f"{values[0]:{form}}",
    "mean": mean,
    "spread": spread,
}


def cell(study: Study, rows: Sequence[Row], kind: str, *column: Any) -> str:
    """Return a cell for the results of all seeds of a setting."""
    if kind in TEXTS:
        return TEXTS[kind](study, rows, *column)
    if kind == "bleu":
        return bleu(rows)
    if kind == "reached":
        return reached(rows, *column)
    name, form, unit, factor = [*column, *("", "", 1)[len(column) - 1 :]]
    numbers = _numbers(rows, name, factor)
    if kind == "end":
        return f"{spread(numbers, form)} at {rows[0]['epochs'][-1]}"
    if not numbers:
        return ""
    if kind == "first":
        numbers = [numbers[0] if factor != 1 else value(rows[0], name)]
    return f"{NUMBERS[kind](numbers, form)}{unit and f' {unit}'}"


def table(study: Study, results: Sequence[Row]) -> list[str]:
    """Return a table: a row for each setting, in order of first appearance, without columns that have no value."""
    groups = grouped(results, lambda row: (study.part_of(row), row["setting"]))
    columns = study.data["columns"]
    cells = [[cell(study, rows, *column[1:]) for column in columns] for rows in groups.values()]
    shown = [n for n, column in enumerate(columns) if column[1] in TEXTS or any(line[n] for line in cells)]
    lines = [[columns[n][0] for n in shown], *([line[n] for n in shown] for line in cells)]
    rule = "|".join("---" if columns[n][1] in TEXTS else "---:" for n in shown)
    head, *body = [f"| {' | '.join(line)} |" for line in lines]
    return [head, f"|{rule}|", *body]


def notes(results: Sequence[Row], made: Row) -> list[list[str]]:
    """Return blocks of lines: how the data were made, scores left out and sacrebleu's signatures."""
    signatures = results[0].get("signatures", {})
    left_out = {name: reason for row in results for name, reason in row.get("left_out", {}).items()}
    return [
        [f"{name}: `{part['options']}`, {part['cpu_seconds']:.0f} CPU s" for name, part in made.items()],
        [f"{metric}: `{signature}`" for metric, signature in signatures.items()],
        [f"{name} left out: {reason}" for name, reason in left_out.items()],
    ]


def markdown(study: Study, results: Sequence[Row], facts: dict[str, str], made: Row | None = None) -> str:
    """Return the page of a study: machine, notes, and a table for each part with a heading, or one for all."""
    blocks = [[f"# {study.data['title']}"], [", ".join(f"{k} {v}" for k, v in facts.items())]]
    blocks += notes(results, made or {})
    headed = [part for part, content in study.parts.items() if "heading" in content]
    sections = grouped(results, lambda row: part if (part := study.part_of(row)) in headed else "")
    for part, rows in sections.items():
        content = {**study.data, **study.parts.get(part, {})}
        blocks.append([f"## {content['heading']}"] if "heading" in content else [])
        images = rows[0].get("images") or rows[0]
        blocks.append([content["counts"].format_map(images)] if "counts" in content else [])
        blocks.append(table(study, rows))
    return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"
