"""Measurement in processes of their own: one that crashes or hangs costs the contestant that ran, and no other row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from . import worker
from .worker import Job

ROOT = Path(__file__).parents[2]
WORK = "from tools.bench.worker import main; main()"
STARTS = 40  # processes of a job, each after one that ended early


def start(job: Job, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run one worker; return its exit status and the last line of its errors."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", WORK, json.dumps(asdict(job))],
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            stderr=errors,
        )
        errors.seek(0)
        text = errors.read()
    if "Timeout (" in text:
        return done.returncode, f"took more than {job.row_seconds:g} s"
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "no message")
    return done.returncode, f"its process ended with status {done.returncode}: {last[:200]}"


def measured(job: Job, environment: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Measure until all rows are there or the time is over, and return the lines of the record.

    A contestant that ends a process is left out when its row is measured again.

    Raises:
        RuntimeError: a process ended before its first row.
    """
    record = Path(job.record)
    for _ in range(STARTS):
        status, reason = start(job, environment)
        if status == 0:
            break
        lines = worker.read(record)
        last = next((line for line in reversed(lines) if line.keys() & {"start", "at", "done"}), {})
        if not last or "done" in last:
            raise RuntimeError(reason)
        row = next(line["start"] for line in reversed(lines) if "start" in line)
        at = last.get("at", "at the start")
        if at == "all in turns" or at in worker.crashes(lines).get(row, {}):  # not the fault of one contestant
            done = {"done": row, "rows": [_error(row, f"{at}: {reason}")]}
        else:
            done = {"crash": row, "contestant": at, "reason": reason}
        with record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(done) + "\n")
        print(f"{row}: {at} {reason}", flush=True)
    return worker.read(record)


def _error(row: str, reason: str) -> dict[str, Any]:
    room, _, case = row.partition(": ")
    return {"room": room, "case": case, "error": reason}


def warm(job: Job, count: int, seconds: float) -> None:
    """Run every contestant once in ``count`` processes, to fill the caches of compiled code."""
    jobs = [replace(job, share=(n, count), until=time.time() + seconds) for n in range(count)]
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(start, jobs))
