"""Command ``measure``: fill the compilers' caches with several processes, then measure row by row in one process."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tools.benchmark import report
from tools.benchmark.results import dump
from tools.files import write_text

from . import machine, peers, ratios, testing
from .processes import Budget, Done, run

WORK = "from tools.gpu_check.worker import main; main()"
CEILINGS = "from tools.gpu_check.roofline import main; main()"
WARM_SHARE = 0.3  # share of the time for running everything once
MOST_LOSSES = 3
LOST_SECONDS = 45.0  # assumed duration of a row that ended its process
RECORD = "rows.jsonl"  # of the measuring process
STARTS = 16  # maximum number of starts of the measuring process, one after each row that ended it


class Choice(NamedTuple):
    """What is measured.

    Attributes:
        pattern: Regular expression for the names of rows.
        without: Names of backends to leave out.
        every: All rows that match; without it and without a pattern, those of :mod:`.selection`.
    """

    pattern: str = ""
    without: tuple[str, ...] = ()
    every: bool = False

    def settings(self) -> dict[str, Any]:
        """Return the worker's settings."""
        return {**self._asdict(), "without": list(self.without)}

    def command(self) -> str:
        """Return the command line, without limits."""
        words = [f"-k {self.pattern!r}"] if self.pattern else []
        words += ["--all"] if self.every else []
        words += [f"--without {' '.join(self.without)}"] if self.without else []
        return " ".join(["python -m tools.gpu_check measure", *words])


def measure(choice: Choice, budget: Budget, jobs: int, out: Path, device: str) -> int:
    """Measure; write results after each row that ended a process and at the end; print tables; return the status.

    Without a device the rows are listed, and nothing is written.
    """
    if device == "cuda" and not torch.cuda.is_available():
        print("\n".join(listed(choice)), flush=True)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    log = out / "measure.log"
    log.write_text("")
    cache = machine.FOLDER / "cache"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    data: dict[str, Any] = {"machine": facts(device), "command": choice.command(), "parts": {}}
    if line := peers.make_importable():
        print(f"peers: {line}", flush=True)
        data["peers"] = line

    def ended(step: str) -> None:
        data["parts"][step] = round(budget.spent() - sum(data["parts"].values()), 1)

    if device == "cuda":
        passed, line = machine.build(budget.part(machine.BUILD_SECONDS), log, torch.cuda.get_device_capability())
        print(f"binaries: {line}", flush=True)
        data["binaries"] = {"load": passed, "line": line}
        ended("binaries")
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as folder:
        scratch = Path(folder)
        losses: dict[str, int] = {}
        data["ceilings"] = measure_ceilings(device, budget.part(40), scratch)
        ended("ceilings")
        if device == "cuda":
            ran, losses = warm(choice, budget.part(WARM_SHARE * budget.seconds), jobs, scratch, device)
            print(f"caches: {ran} rows ran once, {len(losses)} ended a process; {budget.left():.0f} s left", flush=True)
            ended("caches")
        data["rows"] = []

        def keep(rows: Iterable[dict[str, Any]]) -> None:
            data["rows"] = list(rows)
            done = {row["end"] for row in data["rows"]}
            data["not_started"] = [name for name in planned(scratch / RECORD) if name not in done]
            data["seconds"] = round(budget.spent(), 1)
            write_text(out / "measure.json", dump(data))
            write_text(out / "measure.md", ratios.page(data))

        keep(rows_of(choice, budget, scratch, log, device, keep, losses))
    ended("rows")
    write_text(out / "measure.json", dump(data))
    print("seconds: " + ", ".join(f"{step} {seconds:.0f}" for step, seconds in data["parts"].items()), flush=True)
    print("\n".join(ratios.closing(data)), flush=True)
    ran = [row for row in data["rows"] if "entries" in row["row"]]
    return 0 if ran and len(ran) == len(data["rows"]) and not data["not_started"] else 1


def listed(choice: Choice) -> list[str]:
    """Return how many rows each part has, and that there is no device."""
    from .worker import plan

    rows, broken = plan("cuda", choice.pattern, choice.every)
    lines = [f"=== {part}\n{len(rows[part])} rows; {machine.NO_DEVICE}" for part in rows if rows[part]]
    lines += [f"=== {part}\n{reason}" for part, reason in broken.items()]
    return [*lines, f"{sum(map(len, rows.values()))} rows in all; {machine.NO_DEVICE}"]


def facts(device: str) -> dict[str, str]:
    """Return the device and the versions of packages, without missing ones."""
    return report.machine(device, more=("triton", "natten"))


def measure_ceilings(device: str, budget: Budget, scratch: Path) -> dict[str, float] | None:
    """Measure the speeds that the device reaches; return None on failure."""
    side = roofline_side(device)
    done = run([sys.executable, "-W", "ignore", "-c", CEILINGS, device, side], budget.left(), scratch / "ceilings.log")
    try:
        return json.loads(done.last_line())
    except ValueError:
        print(f"ceilings: {done.last_line()}", flush=True)
        return None


def roofline_side(device: str) -> str:
    """Return the side of the matrices whose product is timed; on a CPU, where the tool is only tried, a small one."""
    return "8192" if device == "cuda" else "256"


def start_worker(settings: dict[str, Any], limit: float, log: Path) -> Any:
    """Start a worker and wait until it ends."""
    return run([sys.executable, "-W", "ignore", "-c", WORK, json.dumps(settings)], limit, log)


def warm(choice: Choice, budget: Budget, jobs: int, scratch: Path, device: str) -> tuple[int, dict[str, int]]:
    """Run every row once, in ``jobs`` processes, to fill the caches of compiled code.

    Returns:
        The number of rows that ran, and how many processes each row ended.
    """

    def one(number: int) -> tuple[list[str], list[str]]:
        record, lost = scratch / f"warm-{number}.jsonl", list[str]()
        for _ in range(STARTS):
            if budget.over():
                break
            settings = dict(
                device=device, record=str(record), seconds=budget.left() - 5, row_seconds=110.0,
                skip=[*(row["end"] for row in read(record)[0]), *lost], share=[number, jobs], **choice.settings(),
            )  # fmt: skip
            ended = start_worker(settings, budget.left(), scratch / f"warm-{number}.log")
            at = read(record)[1]
            if ended.status in (0, None):  # if the time was over, the row is not to blame
                break
            lost += [at] if at is not None and at not in lost else []
        return [row["end"] for row in read(record)[0]], lost

    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(one, range(jobs)))
    return sum(len(done) for done, _ in found), {name: 1 for _, lost in found for name in lost}


def rows_of(
    choice: Choice,
    budget: Budget,
    scratch: Path,
    log: Path,
    device: str,
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
    lost_before: Mapping[str, int] | None = None,
) -> list[dict[str, Any]]:
    """Measure all rows; return them, including those that failed.

    A row that ends a process is tried again without its peers, then with the default backend only.

    Args:
        choice: Which rows.
        budget: Time for all rows.
        scratch: Folder for the record.
        log: File for the output of workers.
        device: ``cuda`` or ``cpu``.
        keep: Function called with the rows so far whenever a worker has ended.
        lost_before: Number of processes that each row has already ended.
    """
    record = scratch / RECORD
    losses, reasons = dict(lost_before or {}), dict.fromkeys(lost_before or {}, "a process ended")
    gone: dict[str, dict[str, Any]] = {}  # rows that will not be tried again
    for _ in range(STARTS):
        if budget.over():
            break
        done = [*read(record)[0], *gone.values()]
        spent: dict[str, float] = {}
        for row in done:
            spent[row["part"]] = spent.get(row["part"], 0.0) + row["seconds"]
        settings = dict(
            device=device, record=str(record), seconds=max(0.0, budget.left() - 8), spent=spent,
            skip=[row["end"] for row in done], losses=losses, **choice.settings(),
        )  # fmt: skip
        ended = start_worker(settings, budget.left(), log)
        at = read(record)[1]
        if at is not None and at not in gone:
            reasons[at] = _reason(record, ended)
            losses[at] = losses.get(at, 0) + 1
            if losses[at] == MOST_LOSSES or ended.status is None:
                entry = {"end": at, "part": at.split(":")[0], "seconds": LOST_SECONDS}
                gone[at] = {**entry, "row": {"error": reasons[at]}}
        keep([*rows_with_losses(record, reasons), *gone.values()])
        if ended.status == 0:
            break
        if at is None and not read(record)[0]:
            print(f"measure: {ended.last_line()}", flush=True)
            break
    return [*rows_with_losses(record, reasons), *gone.values()]


def planned(record: Path) -> list[str]:
    """Return the names of all rows that the workers of a record were to measure."""
    for line in record.read_text().splitlines() if record.exists() else ():
        try:
            return json.loads(line)["planned"]
        except (KeyError, ValueError):
            continue
    return []


def _reason(record: Path, ended: Done) -> str:
    """Describe how the last row of a record ended its process."""
    if ended.status is None:
        return "the time was over"
    trace = testing.trace_of(record)
    late = trace.exists() and trace.read_text()
    how = "took too long" if late else f"its process ended with status {ended.status}: {ended.last_line()}"
    return f"{last_contestant(record)}: {how}"


def last_contestant(record: Path) -> str:
    """Return the contestant that ran last."""
    names = re.findall(r'^{"at": "(.*)"}$', record.read_text(), re.M) if record.exists() else []
    return names[-1] if names else "at the start"


def rows_with_losses(record: Path, reasons: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the rows that ended, with the reason for those measured without their peers."""
    rows = read(record)[0]
    for row in rows:
        if row["end"] in reasons and "errors" in row["row"]:
            row["row"]["errors"]["left out"] = f"peers; {reasons[row['end']]}"
    return rows


def read(record: Path) -> tuple[list[dict[str, Any]], str | None]:
    """Return the rows that ended, and the name of the last one if it only started, or None."""
    rows, at = [], None
    for line in record.read_text().splitlines() if record.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if "start" in entry:
            at = entry["start"]
        elif "end" in entry:
            rows.append(entry)
            at = None
    return rows, at
