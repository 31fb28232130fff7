"""Comparison of our own rows with those of another checkout, to see if a change makes an operator slower.

Fresh processes take turns, one of each checkout per round. The other checkout must be built (``make build`` there) and
may be older: its ``attn_plugins`` is measured on the cases of this checkout, through public functions and modules.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import load, worker
from .report import markdown, milliseconds
from .results import NOISY, command_line, spread, summarize
from .worker import Job

PROCESSES = 3  # per checkout


def compare(parser: argparse.ArgumentParser, options: argparse.Namespace, job: Job) -> int:
    """Measure both checkouts in turns and print a table, before → after."""
    if not (options.against / "plugins" / "__init__.py").is_file():
        parser.error(
            f"--against must be a checkout of this project, got {options.against}, which has no plugins/__init__.py"
        )
    if not list((options.against / "plugins").glob("_C.*")):
        parser.error(f"--against {options.against}: its operators are not built there (make build)")
    before = load.wait_until_quiet(options.wait)
    print(f"`{command_line(parser, options)}`", flush=True)
    print(f"Other processes use {load.words(before)} before.", flush=True)
    settings = {
        **job.settings,
        "seconds": options.seconds / PROCESSES,
        "rounds": max(1, options.rounds // PROCESSES),
        "min_rounds": -(-options.min_rounds // PROCESSES),
        "attempts": 1,
    }
    job = replace(job, settings=settings, alone=True, details=False)
    rows: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
    try:
        for _ in range(PROCESSES):
            for when, checkout in (("before", options.against), ("after", worker.ROOT)):
                print(f"--- {when}", flush=True)
                rows[when].append(own_rows(checkout, job))
    except RuntimeError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print("\n" + "\n".join(table(rows["before"], rows["after"])))
    print(f"\nOther processes use {load.words(load.sample())} after.")
    return 0


def own_rows(checkout: Path, job: Job) -> dict[str, Any]:
    """Return the rows of a process that imports ``attn_plugins`` from ``checkout``, by name.

    Raises:
        RuntimeError: a process ended with an error, or imported the wrong package.
    """
    package = (checkout / "plugins").resolve()
    with tempfile.TemporaryDirectory() as folder:
        # A package on the path takes precedence over the editable install's mapping.
        (Path(folder) / "attn_plugins").symlink_to(package, target_is_directory=True)
        path = os.pathsep.join([folder, str(worker.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        lines = worker.measured(replace(job, record=f"{folder}/rows.jsonl"), {"PYTHONPATH": path})
    measured = {line["package"] for line in lines if "package" in line}
    if measured != {str(package)}:
        raise RuntimeError(f"the process of {checkout} imported attn_plugins from {', '.join(measured)}")
    return {f"{row['room']}: {row['case']}": row for line in lines for row in line.get("rows", ())}


def table(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the comparison, from the rows of each process."""
    rows = []
    for case in dict.fromkeys(name for rows in (*before, *after) for name in rows):
        old, new = pooled(case, before), pooled(case, after)
        if isinstance(old, str) or isinstance(new, str):
            reasons = [
                f"{when}: {reason}" for when, reason in (("before", old), ("after", new)) if isinstance(reason, str)
            ]
            rows.append([case, "", "", "", "; ".join(reasons)])
            continue
        cells = [f"{milliseconds(old[key])} → {milliseconds(new[key])}" for key in ("min", "median")]
        mark = "noisy" if max(spread(old), spread(new)) > NOISY else ""
        rows.append([case, *cells, f"{new['min'] / old['min']:.2f}", mark])
    return markdown(["case", "minimum, ms", "median, ms", "minimum after / before", ""], rows)


def pooled(case: str, processes: Sequence[Mapping[str, Any]]) -> dict[str, Any] | str:
    """Return the statistics of a row over all processes, or the reason why there are none."""
    rows = [rows[case] for rows in processes if case in rows]
    if not rows:
        return "no such row"
    errors = [row["error"] for row in rows if "error" in row]
    return errors[0] if errors else summarize([t for row in rows for t in row["ours"]["times"]])
