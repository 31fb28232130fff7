"""Measured rows, from repeated timings to files: statistics and noise, format, command, reading and writing.

A file holds ``format``, ``benchmark``, ``device``, ``command`` (as run, with all its options), ``machine`` (CPU,
versions, date), ``load`` (of other processes before and after) and ``rows`` from :mod:`.measure`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.files import dump_rows, write_text

FORMAT = 2
FOLDER = Path(__file__).parents[2] / "benchmarks"
NOISY = 1.3  # upper over lower quartile
UNSHOWN = ("help", "names", "resume", "minutes", "row_seconds", "part_seconds", "warm")  # of a page's command


def summarize(times: Sequence[float]) -> dict[str, Any]:
    """Return ``min``, ``q1``, ``median``, ``q3`` and the ``times`` themselves, to five digits.

    Raises:
        ValueError: There is no time.
    """
    if not times:
        raise ValueError("times must hold at least one timing, got none")
    times = [float(f"{t:.5g}") for t in times]
    quartiles = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    q1, median, q3 = (float(f"{t:.5g}") for t in quartiles)
    return {"min": min(times), "q1": q1, "median": median, "q3": q3, "times": times}


def spread(result: Mapping[str, Any]) -> float:
    """Return the ratio of the upper to the lower quartile."""
    return result["q3"] / result["q1"]


def compared(case: str, ours: dict[str, Any], peers: dict[str, Any], by: str = "min", **more: Any) -> dict[str, Any]:
    """Return a row: the better peer (None if none ran), and its ratios to ours, by ``by`` of the times and by memory.

    It is noisy if ours or that peer varies more than :data:`NOISY`-fold between its quartiles.
    """
    ran = [name for name, peer in peers.items() if "min" in peer]
    best = min(ran, key=lambda name: peers[name][by], default=None)
    return {
        "case": case,
        "ours": ours,
        "peers": peers,
        "better_peer": best,
        "ratio": None if best is None else peers[best][by] / ours[by],
        "memory_ratio": None if best is None else ours["memory"] / max(1, peers[best]["memory"]),
        "noisy": max(map(spread, (ours, *([peers[best]] if best else ())))) > NOISY,
        **({} if by == "min" else {"by": by}),
        **more,
    }


def command_line(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """Return the command that was run, with all options that change what is measured, including defaults.

    Options without a value (None, empty, False) are left out, and so is the default folder of results.
    """
    words = [*parser.prog.split(), *options.names]
    for action in parser._actions:
        value = getattr(options, action.dest, None)
        if action.dest in UNSHOWN or value is None or value is False or value in ("", FOLDER):
            continue
        words.append(action.option_strings[0])
        if value is not True:
            values = value if isinstance(value, list) else [value]
            words += [f"{v:g}" if isinstance(v, float) else str(v) for v in values]
    return shlex.join(words)


def write(folder: Path, name: str, data: dict[str, Any], text: str) -> Path:
    """Write ``name.json`` and the page ``name.md`` made from it; return the page's path."""
    write_text(folder / f"{name}.json", dump(data))
    write_text(folder / f"{name}.md", text)
    return folder / f"{name}.md"


def dump(data: dict[str, Any]) -> str:
    """Return JSON with a row on each line."""
    return dump_rows({"format": FORMAT, **data})


def read(path: Path) -> dict[str, Any] | None:
    """Return a file's content; None if it is missing or of another format."""
    if not path.exists():
        return None
    data = json.loads(path.read_text(encoding="utf-8"))
    return data if data.get("format") == FORMAT else None
