"""Comparison of our own rows with those of another checkout, to see if a change makes an operator slower.

Fresh processes take turns, one of each checkout per round. The other checkout must be built (``make build`` there) and
may be older: its ``attn_plugins`` is measured on the cases of this checkout, through public functions and modules.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import load
from .measure import Settings
from .own_rows import MARK
from .report import milliseconds
from .results import command_line
from .summary import NOISY, spread, summarize

ROOT = Path(__file__).parents[2]
PROCESSES = 3  # per checkout
SHOWN = ("against", "device", "threads", "seconds", "rounds", "min_rounds", "wait", "k")
RUN = "from tools.benchmark.own_rows import main; main()"


class Failed(Exception):
    """A process ended with an error, or measured the wrong package."""


def problem(checkout: Path) -> str | None:
    """Return what is wrong with a checkout to compare with, or None."""
    if not (checkout / "plugins" / "__init__.py").is_file():
        return f"--against must be a checkout of this project, got {checkout}, which has no plugins/__init__.py"
    if not list((checkout / "plugins").glob("_C.*")):
        return f"--against {checkout}: its operators are not built there (make build)"
    return None


def compare(parser: argparse.ArgumentParser, options: argparse.Namespace, settings: Settings) -> int:
    """Measure both checkouts in turns and print a table, before → after."""
    if reason := problem(options.against):
        parser.error(reason)
    before = load.wait_until_quiet(options.wait)
    print(f"`{command_line('python -m tools.benchmark', options.names, options, SHOWN)}`", flush=True)
    print(f"Other processes use {load.words(before)} before.", flush=True)
    limits = dict(
        seconds=settings.seconds / PROCESSES,
        rounds=max(1, settings.rounds // PROCESSES),
        min_rounds=-(-settings.min_rounds // PROCESSES),
    )
    wanted = dict(names=options.names, k=options.k, device=options.device, threads=options.threads, **limits)
    found: dict[str, list[Mapping[str, Any]]] = {"before": [], "after": []}
    try:
        for number in range(PROCESSES):
            for when, checkout in (("before", options.against), ("after", ROOT)):
                found[when].append(own_rows(checkout, wanted))
                print(f"process {number + 1} of {PROCESSES}: {when} measured", flush=True)
    except Failed as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1
    print("\n" + "\n".join(table(found["before"], found["after"])))
    print(f"\nOther processes use {load.words(load.sample())} after.")
    return 0


def own_rows(checkout: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows of a process that imports ``attn_plugins`` from ``checkout``.

    Raises:
        Failed: the process ended with an error, or imported the wrong package.
    """
    package = (checkout / "plugins").resolve()
    with tempfile.TemporaryDirectory() as folder:
        # A package on the path takes precedence over the editable install's mapping.
        (Path(folder) / "attn_plugins").symlink_to(package, target_is_directory=True)
        path = os.pathsep.join([folder, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", RUN, json.dumps(settings)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise Failed(f"the process of {checkout} ended with status {done.returncode}:\n{done.stderr.rstrip()}")
    answer = json.loads(next(line for line in done.stdout.splitlines() if line.startswith(MARK))[len(MARK) :])
    if answer["package"] != str(package):
        raise Failed(f"the process of {checkout} imported attn_plugins from {answer['package']}")
    return answer["rows"]


def table(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the comparison, from the rows of each process."""
    lines = ["| case | minimum, ms | median, ms | minimum after / before | |", "| --- | --- | --- | --- | --- |"]
    for case in dict.fromkeys(name for rows in (*before, *after) for name in rows):
        old, new = pooled(case, before), pooled(case, after)
        if isinstance(old, str) or isinstance(new, str):
            reasons = [f"{when}: {each}" for when, each in (("before", old), ("after", new)) if isinstance(each, str)]
            lines.append(f"| {case} | | | | {'; '.join(reasons)} |")
            continue
        cells = [f"{milliseconds(old[key])} → {milliseconds(new[key])}" for key in ("min", "median")]
        mark = "noisy" if max(spread(old), spread(new)) > NOISY else ""
        lines.append(f"| {case} | {cells[0]} | {cells[1]} | {new['min'] / old['min']:.2f} | {mark} |")
    return lines


def pooled(case: str, processes: Sequence[Mapping[str, Any]]) -> dict[str, Any] | str:
    """Return the statistics of a row over all processes, or the reason why there are none."""
    rows = [rows[case] for rows in processes if case in rows]
    if not rows:
        return "no such row"
    errors = [row["error"] for row in rows if "error" in row]
    return errors[0] if errors else summarize([t for row in rows for t in row["times"]])
