"""The second command: fill the compilers' caches in many processes, then measure row by row in one."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tools.benchmark import report
from tools.benchmark.results import dump
from tools.files import write_text

from . import machine, ratios, testing
from .processes import Budget, run

WORK = "from tools.gpu_check.worker import main; main()"
CEILINGS = "from tools.gpu_check.roofline import main; main()"
WARM_SHARE = 0.3  # of the time, for running everything once
LOST_SECONDS = 75.0  # that a row is taken to have cost where it ended its process
STARTS = 16  # of the process that measures, each after a row that ended it


def measure(pattern: str, budget: Budget, jobs: int, out: Path, device: str) -> int:
    """Measure, write what was found after every row that ended a process and at the end, print tables."""
    out.mkdir(parents=True, exist_ok=True)
    log = out / "measure.log"
    log.write_text("")
    cache = machine.FOLDER / "cache"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    data: dict[str, Any] = {"machine": facts(device), "command": f"python -m tools.gpu_check measure -k {pattern!r}"}
    if device == "cuda":
        passed, line = machine.build(budget.part(machine.BUILD_SECONDS), log, torch.cuda.get_device_capability())
        print(f"binaries: {line}", flush=True)
        data["binaries"] = {"load": passed, "line": line}
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as folder:
        scratch = Path(folder)
        data["ceilings"] = measure_ceilings(device, budget.part(40), scratch)
        if device == "cuda":
            data["warmed"] = warm(pattern, budget.part(WARM_SHARE * budget.seconds), jobs, scratch, device)
            print(f"caches: {data['warmed']} rows ran once, {budget.left():.0f} s are left", flush=True)
        data["rows"] = []

        def keep(rows: Iterable[dict[str, Any]]) -> None:
            data["rows"] = list(rows)
            data["seconds"] = round(budget.spent(), 1)
            write_text(out / "measure.json", dump(data))
            write_text(out / "measure.md", ratios.page(data))

        keep(rows_of(pattern, budget, scratch, log, device, keep))
    print("\n".join(ratios.closing(data)), flush=True)
    ran = [row for row in data["rows"] if "entries" in row["row"]]
    return 0 if ran and len(ran) == len(data["rows"]) else 1


def facts(device: str) -> dict[str, str]:
    """Return where and with what is measured; a package that is missing is left out."""
    return report.machine(device, more=("triton", "natten"))


def measure_ceilings(device: str, budget: Budget, scratch: Path) -> dict[str, float] | None:
    """Return the speeds that the device reaches, or None where they could not be measured."""
    side = roofline_side(device)
    done = run([sys.executable, "-W", "ignore", "-c", CEILINGS, device, side], budget.left(), scratch / "ceilings.log")
    try:
        return json.loads(done.last_line())
    except ValueError:
        print(f"ceilings: {done.last_line()}", flush=True)
        return None


def roofline_side(device: str) -> str:
    """Return the side of the matrices whose product is timed; a CPU is there to try the tool."""
    return "8192" if device == "cuda" else "256"


def start_worker(settings: dict[str, Any], limit: float, log: Path) -> Any:
    """Run a worker to its end."""
    return run([sys.executable, "-W", "ignore", "-c", WORK, json.dumps(settings)], limit, log)


def warm(pattern: str, budget: Budget, jobs: int, scratch: Path, device: str) -> int:
    """Run every row once, in ``jobs`` processes, so that what is compiled lies in caches; return how many ran."""

    def one(number: int) -> int:
        record, done = scratch / f"warm-{number}.jsonl", list[str]()
        for _ in range(STARTS):
            if budget.over():
                break
            settings = dict(
                device=device, record=str(record), seconds=budget.left() - 5, pattern=pattern, skip=done,
                share=[number, jobs],
            )  # fmt: skip
            ended = start_worker(settings, budget.left(), scratch / f"warm-{number}.log")
            rows, at = read(record)
            done = list(dict.fromkeys([*done, *(row["end"] for row in rows), *([at] if at else [])]))
            if ended.status == 0:
                break
        return len(done)

    with ThreadPoolExecutor(jobs) as pool:
        return sum(pool.map(one, range(jobs)))


def rows_of(
    pattern: str, budget: Budget, scratch: Path, log: Path, device: str, keep: Any = lambda rows: None
) -> list[dict[str, Any]]:
    """Return all rows that a worker measured, and those that ended one, with and then without peers, and how."""
    record = scratch / "rows.jsonl"
    losses: dict[str, str] = {}  # of rows that ended a process, how
    gone: list[dict[str, Any]] = []  # those that did it twice
    for _ in range(STARTS):
        if budget.over():
            break
        done = [*read(record)[0], *gone]
        spent: dict[str, float] = {}
        for row in done:
            spent[row["part"]] = spent.get(row["part"], 0.0) + row["seconds"]
        settings = dict(
            device=device, record=str(record), seconds=max(0.0, budget.left() - 8), pattern=pattern, spent=spent,
            skip=[row["end"] for row in done], alone=list(losses),
        )  # fmt: skip
        ended = start_worker(settings, budget.left(), log)
        at = read(record)[1]
        if at is not None and at not in {row["end"] for row in gone}:
            why = f"its process ended with status {ended.status}: {ended.last_line()}"
            if ended.status is None:
                why = "the time was over"
            elif (trace := testing.trace_of(record)).exists() and trace.read_text():
                why = "took too long"
            if at in losses or ended.status is None:
                gone.append({"end": at, "part": at.split(":")[0], "seconds": LOST_SECONDS, "row": {"error": why}})
            losses[at] = why
        rows = rows_with_losses(record, losses)
        keep([*rows, *gone])
        if ended.status == 0:
            break
        if at is None and not rows:
            print(f"measure: {ended.last_line()}", flush=True)
            break
    return [*rows_with_losses(record, losses), *gone]


def rows_with_losses(record: Path, losses: dict[str, str]) -> list[dict[str, Any]]:
    """Return the rows that ended; of those measured without peers, why."""
    rows = read(record)[0]
    for row in rows:
        if row["end"] in losses and "errors" in row["row"]:
            row["row"]["errors"]["peers"] = f"left out: with them, {losses[row['end']]}"
    return rows


def read(record: Path) -> tuple[list[dict[str, Any]], str | None]:
    """Return the rows that ended, and the name of the last one that only started, or None."""
    rows, at = [], None
    for line in record.read_text().splitlines() if record.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if "start" in entry:
            at = entry["start"]
        else:
            rows.append(entry)
            at = None
    return rows, at
