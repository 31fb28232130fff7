"""Processes that measure rows one after another, and append each to a file of JSON lines as it ends.

One that crashes or hangs costs the contestant that ran, and no other row: ``{"start": row}``, ``{"at": contestant}``
and ``{"done": row, "rows": [...]}`` name what ended a process early, and let a later one measure the rest.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from . import report, roofline
from .case import Case
from .cases import cases
from .measure import UNUSABLE, fatal, first_line, measure
from .timing import Settings

ROOT = Path(__file__).parents[2]
WORK = "from tools.bench.worker import main; main()"
STARTS = 40  # processes of a job, each after one that ended early


@dataclass
class Job:
    """What a worker measures."""

    names: list[str]  # benchmarks
    device: str
    record: str  # file of JSON lines; with a share it is only read
    pattern: str = ""  # regular expression for the names of rows
    every: bool = False  # all rows on CUDA, not the main ones
    threads: int = 1
    details: bool = False  # as for measure
    until: float = float("inf")  # time of the system's clock after which no further row starts
    part_seconds: float = float("inf")  # after which a part's other rows are left to the next call
    row_seconds: float = 900.0  # after which a row is abandoned and the process ends
    settings: dict[str, Any] = field(default_factory=dict)  # of timing.Settings
    share: tuple[int, int] | None = None  # (number, count) of the rows to run once, to fill the compilers' caches


def read(record: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file."""
    lines = []
    for line in record.read_text(encoding="utf-8").splitlines() if record.exists() else ():
        try:
            lines.append(json.loads(line))
        except ValueError:  # the process died while it wrote
            continue
    return lines


def append(record: Path, line: Mapping[str, Any]) -> None:
    """Append a line to a file."""
    with record.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def begin(record: Path, device: str) -> None:
    """Name the device in a record; set a record of another device aside, so that their rows are not mixed."""
    before = next((line["device"] for line in read(record) if "device" in line), device)
    if before != device:
        kept = re.sub(r"\W+", "-", before)
        aside = record.with_name(f"{record.stem}-{kept}.jsonl")
        print(f"{record} has rows of {before}, not of {device}: renamed to {aside}")
        record.replace(aside)
    append(record, {"device": device})


def crashes(lines: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the contestants that ended a process, with the reasons, by row."""
    reasons: dict[str, dict[str, str]] = {}
    for line in lines:
        if "crash" in line:
            reasons.setdefault(line["crash"], {})[line["contestant"]] = line["reason"]
    return reasons


def chosen(job: Job) -> Iterator[tuple[str, Case]]:
    """Yield the rows with the names of their benchmarks, or a row without contestants for one that has none."""
    wanted = re.compile(job.pattern)
    for name in job.names:
        try:
            rows = cases(name, job.device)
        except Exception as error:
            yield name, Case("every row", lambda error=error: _raise(error))
            continue
        for case in rows:
            if wanted.search(f"{name}: {case.name}") and (case.main or job.every or job.pattern or job.device == "cpu"):
                yield name, case


def _raise(error: Exception) -> Any:
    raise error


def work(job: Job) -> None:
    """Measure all rows that the record lacks."""
    record = Path(job.record)
    torch.set_num_threads(job.threads)

    def write(**line: Any) -> None:
        if job.share is None:
            append(record, line)

    lines = read(record)
    done, crashed = {line["done"] for line in lines if "done" in line}, crashes(lines)
    rates = next((line["ceilings"] for line in lines if "ceilings" in line), None)
    settings = Settings(**job.settings)
    spent: Counter[str] = Counter()
    over = False
    for number, (name, case) in enumerate(chosen(job)):
        key = f"{name}: {case.name}"
        if key in done or (job.share and number % job.share[1] != job.share[0]):
            continue
        if time.time() > job.until:
            write(over=True)
            return
        part = case.part or name
        if spent[part] > job.part_seconds:
            over = True
            continue
        if rates is None and job.share is None:
            rates = roofline.ceilings(job.device)
            write(ceilings=rates)
        begun = time.perf_counter()
        write(start=key)
        faulthandler.dump_traceback_later(job.row_seconds, exit=True)
        try:
            try:
                rows = _rows(case, job, settings, rates, crashed.get(key, {}), lambda at: write(at=at))
                if job.device == "cuda":
                    torch.cuda.synchronize()
            except Exception as error:
                fatal(job.device, error)
                rows = [{"case": case.name, "error": first_line(error)}]
        except SystemExit as error:  # the device is unusable, and this process with it
            print(first_line(error.__cause__ or error), file=sys.stderr, flush=True)
            os._exit(UNUSABLE)
        faulthandler.cancel_dump_traceback_later()
        write(done=key, rows=[{"room": name, **row} for row in rows])
        spent[part] += time.perf_counter() - begun
        if job.share is None:
            for row in rows:
                print(f"{name}: {report.line(row)}", flush=True)
    if over:
        write(over=True)


def _rows(case: Case, job: Job, settings: Settings, rates: Any, crashed: Any, begin: Any) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    if job.share is not None:
        for prepare in (case.ours, *case.peers.values()):
            prepare()()
        return []
    return [measure(case, job.device, settings, details=job.details, ceilings=rates, crashed=crashed, begin=begin)]


def main() -> None:
    """Run the job that the first argument describes in JSON."""
    from attn_plugins.autoload import stand_in_for_extensions

    stand_in_for_extensions()  # mmcv's Python code may be here without its binary
    job = Job(**json.loads(sys.argv[1]))
    work(job)


# --- the process that starts them -------------------------------------------------------------------------------------


def start(job: Job) -> tuple[int, str]:
    """Run one worker; return its exit status and the last line of its errors."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", WORK, json.dumps(asdict(job))],
            env={**os.environ, "PYTHONPATH": path},
            stderr=errors,
        )
        errors.seek(0)
        text = errors.read()
    if "Timeout (" in text:
        return done.returncode, f"took more than {job.row_seconds:g} s"
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "no message")
    return done.returncode, f"its process ended with status {done.returncode}: {last[:200]}"


def measured(job: Job) -> list[dict[str, Any]]:
    """Measure until all rows are there or the time is over, and return the lines of the record.

    A contestant that ends a process is left out when its row is measured again.

    Raises:
        RuntimeError: A process ended before its first row.
    """
    record = Path(job.record)
    for _ in range(STARTS):
        status, reason = start(job)
        if status == 0:
            break
        lines = read(record)
        last = next((line for line in reversed(lines) if line.keys() & {"start", "at", "done"}), {})
        if not last or "done" in last:
            raise RuntimeError(reason)
        row = next(line["start"] for line in reversed(lines) if "start" in line)
        at = last.get("at", "at the start")
        if at == "all in turns" or at in crashes(lines).get(row, {}):  # not the fault of one contestant
            done = {"done": row, "rows": [_error(row, f"{at}: {reason}")]}
        else:
            done = {"crash": row, "contestant": at, "reason": reason}
        append(record, done)
        print(f"{row}: {at} {reason}", flush=True)
    return read(record)


def _error(row: str, reason: str) -> dict[str, Any]:
    room, _, case = row.partition(": ")
    return {"room": room, "case": case, "error": reason}


def warm(job: Job, count: int, seconds: float) -> None:
    """Run every contestant once in ``count`` processes, to fill the caches of compiled code."""
    jobs = [replace(job, share=(n, count), until=time.time() + seconds) for n in range(count)]
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(start, jobs))
