"""Tables of measurements: ratios to the better peer, the fastest of our backends, shares of the roofline."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tools.benchmark.report import megabytes, milliseconds
from tools.benchmark.summary import NOISY, spread

from .roofline import Work, floor

OWN = "ours"
BETTER = 1.05  # another backend is named if it is faster by this factor
MISMATCH = {"float32": 1e-3, "TF32": 1e-2, "float16": 2e-2, "bfloat16": 8e-2}  # tolerance between two of our backends
LINES = 70  # length of the last table, whose end must fit a short log

Entry = Mapping[str, Any]


class Compared(NamedTuple):
    """Figures of a row.

    Attributes:
        name: Part and name of the row.
        ours: Seconds of our default backends, minimum over all rounds.
        served: Backends that ran by default.
        best: Our fastest backend, if it is faster than the default.
        gain: Time of the default over that of ``best``.
        peer: The better peer; None without one.
        ratio: Time of the better peer over that of our default.
        memory: Our peak memory over that of the peer.
        share: Share of the roofline: minimum time on the device over our time.
        goal: The ratio to reach.
        marks: Reservations about the row.
    """

    name: str
    ours: float
    served: str
    best: str | None
    gain: float
    peer: str | None
    ratio: float | None
    memory: float | None
    share: float | None
    goal: float | None
    marks: str


def compare(entry: Entry, rates: Mapping[str, float] | None) -> Compared:
    """Compute the figures of a measured row."""
    row = entry["row"]
    times = {name: found["min"] for name, found in row["entries"].items()}
    ours = times[OWN]
    own = {name: time for name, time in times.items() if name.startswith(f"{OWN}, by ")}
    peers = {name: time for name, time in times.items() if not name.startswith(OWN)}
    best = min(own, key=lambda name: own[name], default=None)
    peer = min(peers, key=lambda name: peers[name], default=None)
    shown = best is not None and ours / own[best] > BETTER
    memory = share = None
    if peer is not None:
        memory = row["entries"][OWN]["memory"] / max(1, row["entries"][peer]["memory"])
    if rates is not None:
        share = floor(Work(**row["work"]), row["kind"], dict(rates)) / ours
    served = dict.fromkeys(name for names in row["served_by"].values() for name in names)
    return Compared(
        name=entry["end"],
        ours=ours,
        served="+".join(served) or "no operator",
        best=best.removeprefix(f"{OWN}, by ") if shown and best else None,
        gain=ours / own[best] if shown and best else 1.0,
        peer=peer,
        ratio=None if peer is None else peers[peer] / ours,
        memory=memory,
        share=share,
        goal=row["goal"],
        marks=_marks(row, peer),
    )


def _marks(row: Mapping[str, Any], peer: str | None) -> str:
    compared = [row["entries"][OWN], *([row["entries"][peer]] if peer else [])]
    marks = ["noisy"] if any(spread(each) > NOISY for each in compared) else []
    marks += ["host's time"] if any("host" in each["how"] for each in compared) else []
    limit = MISMATCH[row["kind"]]
    marks += [f"{name} differs by {d:.1g}" for name, d in row["differences"].items() if not d < limit]
    return ", ".join(marks)


def ratio_line(each: Compared) -> str:
    """Return a line of the last table: ratio, share of the roofline, time, default backends, faster backend."""
    ratio = "    –" if each.ratio is None else f"{each.ratio:5.2f}"
    share = "   –" if each.share is None else f"{100 * each.share:3.0f}%"
    line = f"{ratio} {share} {milliseconds(each.ours):>6} ms {each.name} [{each.served}"
    line += f"; {each.best} {each.gain:.1f}x]" if each.best else "]"
    return line + (f" over {each.peer}" if each.peer else "") + (f" ({each.marks})" if each.marks else "")


def split(data: Mapping[str, Any]) -> tuple[list[Compared], list[Entry]]:
    """Return the figures of the measured rows, and the rows that were not measured."""
    rows = data["rows"]
    compared = [compare(row, data.get("ceilings")) for row in rows if "entries" in row["row"]]
    return compared, [row for row in rows if "entries" not in row["row"]]


def mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean, or None without values."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def part_lines(compared: Sequence[Compared]) -> list[str]:
    """Return a line for each part: geometric means of ratios and shares, and the number of rows that a peer wins."""
    lines = []
    for part in dict.fromkeys(each.name.split(":")[0] for each in compared):
        rows = [each for each in compared if each.name.startswith(f"{part}:")]
        ratio = mean([each.ratio for each in rows if each.ratio])
        share = mean([each.share for each in rows if each.share])
        lost = sum(each.ratio is not None and each.ratio < 1 for each in rows)
        words = [f"{len(rows)} rows", f"ratio {ratio:.2f}" if ratio else "no peer"]
        words += [f"{100 * share:.0f}% of the roofline"] if share else []
        lines.append(f"{part}: {', '.join(words)}; a peer is faster in {lost}")
    return lines


def backend_lines(data: Mapping[str, Any]) -> list[str]:
    """Return, for each operator and dtype, the time of each backend relative to the default, to choose defaults by."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for entry in data["rows"]:
        row = entry["row"]
        if "entries" not in row or len(row["served_by"]) != 1:  # with several operators, the cause is unclear
            continue
        (operator, served), *_ = row["served_by"].items()
        ours = row["entries"][OWN]["min"]
        for name, times in row["entries"].items():
            if name.startswith(f"{OWN}, by "):
                key = operator, row["kind"], f"{name.removeprefix(f'{OWN}, by ')} against {'+'.join(served)}"
                found.setdefault(key, []).append(ours / times["min"])
    lines = []
    for (operator, kind, names), gains in sorted(found.items()):
        low, middle, high = min(gains), mean(gains), max(gains)
        lines.append(f"{operator}, {kind}, {names}: {middle:.2f}x ({low:.2f} to {high:.2f}, {len(gains)} rows)")
    return lines


def closing(data: Mapping[str, Any]) -> list[str]:
    """Return the last lines of the command: failures, backends, means, and the table of ratios, worst last."""
    compared, failed = split(data)
    lines = ["", f"=== not measured: {len(failed)} rows"]
    lines += [f"{row['end']}: {row['row'].get('error', '?')[:150]}" for row in failed[:25]]
    missing = data.get("not_started", [])
    if missing:
        lines += ["", f"=== the time was over before {len(missing)} of {len(missing) + len(data['rows'])} rows"]
        lines += [f"{part}: {count}" for part, count in Counter(name.split(":")[0] for name in missing).items()]
    lines += ["", "=== our backends: speed relative to the default (geometric mean)", *backend_lines(data)]
    lines += ["", "=== parts (geometric means)", *part_lines(compared)]
    ordered = sorted(compared, key=lambda each: -(each.ratio if each.ratio is not None else math.inf))
    left_out = max(0, len(ordered) - LINES)
    lines += ["", "=== better peer's time over ours, share of the roofline, our time [default; a faster one of ours]"]
    lines += [f"… {left_out} rows with better ratios are in measure.md"] if left_out else []
    return lines + [ratio_line(each) for each in ordered[left_out:]]


def page(data: Mapping[str, Any]) -> str:
    """Return the page: machine, ceilings, means, a table of each part, errors and refusals."""
    compared, failed = split(data)
    lines = ["# Measured on a GPU", "", f"`{data['command']}`", ""]
    lines += [", ".join(f"{name} {value}" for name, value in data["machine"].items()), ""]
    lines += [f"commit {data['commit']}", ""] if data.get("commit") else []
    lines += [data["note"], ""] if data.get("note") else []
    lines += [f"{data['peers']}.", ""] if data.get("peers") else []
    if data.get("ceilings"):
        speeds = ", ".join(f"{kind} {rate / 1e12:.4g} T/s" for kind, rate in data["ceilings"].items())
        lines += [f"Ceilings, measured here: {speeds} (bytes of a copy are those read and written).", ""]
    lines += [
        "Minimum times over all rounds, in milliseconds; runs under 50 ms are replayed from a CUDA graph, with caches",
        "flushed before each. Ratio: the better peer's time over ours. Share: the device's minimum time for the",
        "operations or bytes, over our time. Memory: our peak over that peer's.",
        "",
        *(f"* {line}" for line in [*part_lines(compared), *backend_lines(data)]),
    ]
    by_name = {entry["end"]: entry["row"] for entry in data["rows"]}
    for part in dict.fromkeys(each.name.split(":")[0] for each in compared):
        lines += ["", f"## {part}", "", "| case | ours | backend | other backends | peers | ratio | share | memory | |"]
        lines.append("| --- " * 9 + "|")
        for each in compared:
            if each.name.startswith(f"{part}:"):
                lines.append(_page_row(each, by_name[each.name]))
    lines += ["", "## Not measured", "", *(f"* {row['end']}: {row['row'].get('error', '?')}" for row in failed)]
    lines += [f"* {name}: the time was over" for name in data.get("not_started", [])]
    return "\n".join(lines) + "\n"


def _page_row(each: Compared, row: Mapping[str, Any]) -> str:
    def times(chosen: Sequence[str]) -> str:
        entries = row["entries"]
        return "; ".join(f"{name.removeprefix('ours, by ')} {milliseconds(entries[name]['min'])}" for name in chosen)

    own = [name for name in row["entries"] if name.startswith(f"{OWN}, ")]
    peers = [name for name in row["entries"] if not name.startswith(OWN)]
    problems = [*(f"{name}: {why}" for name, why in row["errors"].items()), *row["refusals"].values()]
    cells = [
        each.name.split(": ", 1)[1],
        f"{milliseconds(each.ours)} ({megabytes(row['entries'][OWN]['memory'])} MiB)",
        each.served,
        times(own),
        times(peers),
        "" if each.ratio is None else f"{each.ratio:.2f}×" + (f" (≥ {each.goal:g})" if each.goal else ""),
        "" if each.share is None else f"{100 * each.share:.0f} %",
        "" if each.memory is None else f"{each.memory:.2f}",
        "; ".join([*([each.marks] if each.marks else []), *problems]).replace("|", "/").replace("\n", " "),
    ]
    return "| " + " | ".join(cells) + " |"
