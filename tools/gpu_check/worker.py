"""A process that measures rows one after the other, and writes each to a file as it starts and ends.

Run by :mod:`.measure` as ``python -c "from tools.gpu_check.worker import main; main()" SETTINGS``, a JSON of
:class:`Settings`. A row that ends the process or takes too long is known by having started only.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from attn_plugins import ops
from tools.benchmark import operators
from tools.benchmark.case import Case, Run
from tools.benchmark.memory import peak_memory

from . import module_rows, roofline, rows
from .backends import backends_of, calling_thread, served_by
from .testing import trace_of
from .timing import Contestant, Flush, race

SPOILED = 71  # exit status where the device takes no more work
# Parts, and how much of the time each gets against the others.
PARTS = {
    "operators": 3.0, "modules": 2.0, "deform_conv": 1.0, "deformable_attention": 1.0, "global_attention": 1.0,
    "augmented_conv": 0.7, "window_attention": 1.0, "criss_cross": 1.0, "sequence_attention": 1.0,
    "vision_transformers": 1.0, "halves": 0.5,
}  # fmt: skip
DTYPE_ORDER = ("bfloat16", "float32", "TF32", "float16")


@dataclass
class Settings:
    """What a worker does.

    Attributes:
        device: ``cuda`` or ``cpu``.
        record: The file that it appends to.
        seconds: When it stops to start rows.
        pattern: Of rows, a regular expression.
        skip: Names of rows that are done.
        losses: How many processes a row has ended: after one it has no peers, after two it is by default alone.
        spent: Seconds that each part has had.
        share: (number, of how many): of the rows, for those that only run once and fill caches; None: measure.
        race_seconds: For the rounds of a row.
        row_seconds: After which a row is given up, and the process ends.
    """

    device: str
    record: str
    seconds: float
    pattern: str = ""
    skip: list[str] = field(default_factory=list)
    losses: dict[str, int] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)
    share: tuple[int, int] | None = None
    race_seconds: float = 0.35
    row_seconds: float = 45.0


def part_cases(part: str, device: str) -> list[Case]:
    """Return the rows of a part, the most telling dtypes first."""
    if part == "operators":
        found = rows.cases(device)
    elif part == "modules":
        found = module_rows.cases(device)
    else:
        found = operators.cases(part, device)

    def order(case: Case) -> int:
        kind = roofline.kind_of(case.name)
        return DTYPE_ORDER.index(kind)

    return sorted(found, key=order)


def plan(device: str, pattern: str) -> dict[str, list[tuple[str, Case]]]:
    """Return the rows by part, with their names; a part whose file needs what is missing has none."""
    wanted, found = re.compile(pattern), dict[str, list[tuple[str, Case]]]()
    for part in PARTS:
        try:
            cases = part_cases(part, device)
        except ImportError as error:
            print(f"{part}: {error}", flush=True)
            continue
        named = [(f"{part}: {case.name}", case) for case in cases]
        found[part] = [(name, case) for name, case in named if wanted.search(name)]
    return found


def turns(planned: dict[str, list[tuple[str, Case]]], spent: dict[str, float]) -> Iterator[tuple[str, str, Case]]:
    """Yield part, name and row: next is always the part that has had the least of its time; ``spent`` is read anew."""
    waiting = {part: list(cases) for part, cases in planned.items() if cases}
    while waiting:
        part = min(waiting, key=lambda name: spent.get(name, 0.0) / PARTS[name])
        name, case = waiting[part].pop(0)
        if not waiting[part]:
            del waiting[part]
        yield part, name, case


def forced(run: Run, backend: str) -> Run:
    """Return the run with one backend for all operators."""

    def by_backend() -> object:
        with ops.backend(backend):
            return run()

    return by_backend


def defaults() -> None:
    """Undo what the last row left: flags, compiled code and its limits, memory."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def first_line(error: BaseException) -> str:
    """Return the kind and the first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:160]}"


def contestants(
    case: Case, others: bool = True, begin: Callable[[str], None] = lambda name: None
) -> tuple[dict[str, Run], dict[str, Any]]:
    """Return the runs of a row by name, each run once, and what is known of it: errors, refusals, backends.

    "ours" is what serves by default, "ours, by NAME" another backend of a table of the operators that it calls.

    Args:
        case: The row.
        others: Whether other backends run as well.
        begin: Is called with a name before anything of it runs.
    """
    found: dict[str, Run] = {}
    facts: dict[str, Any] = {"errors": {}, "refusals": {}, "differences": {}}
    torch.manual_seed(0)
    begin("ours")
    ours = case.ours()
    facts["served_by"] = served_by(ours)
    found["ours"] = ours
    serving = {name for names in facts["served_by"].values() for name in names}
    backends = dict.fromkeys(name for operator in facts["served_by"] for name in backends_of(operator))
    expected = ours()
    for name in backends:
        if serving == {name} or not others:
            continue
        begin(f"ours, by {name}")
        run = forced(ours, name)
        try:
            facts["differences"][name] = difference(run(), expected)
            found[f"ours, by {name}"] = run
        except ValueError as error:
            facts["refusals"][name] = first_line(error)
        except Exception as error:
            fatal(error)
            facts["errors"][f"ours, by {name}"] = first_line(error)
    for name, prepare in case.peers.items():
        torch.manual_seed(0)
        begin(name)
        try:
            run = prepare()
            run()
            found[name] = run
        except Exception as error:
            fatal(error)
            facts["errors"][name] = first_line(error)
    return found, facts


def difference(found: Any, expected: Any) -> float:
    """Return the relative norm of the difference of the first tensors of two results."""
    a, b = (next(filter(torch.is_tensor, pytree.tree_leaves(each))).double() for each in (found, expected))
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def spoiled(device: str) -> bool:
    """Whether the device takes no more work."""
    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def fatal(error: BaseException) -> None:
    """Raise the error again where the device takes no more work after it.

    Raises:
        SystemExit: It does not.
    """
    if spoiled("cuda" if torch.cuda.is_available() else "cpu"):
        raise SystemExit(SPOILED) from error


def measured(
    case: Case, settings: Settings, flush: Flush, others: bool = True, begin: Callable[[str], None] = lambda name: None
) -> dict[str, Any]:
    """Return a row: times and memory of all, and what ours has to do at least."""
    defaults()
    runs, facts = contestants(case, others, begin)
    work = roofline.work_of(runs["ours"])
    memory: dict[str, int] = {}
    racing: dict[str, Contestant] = {}
    for name, run in list(runs.items()):
        begin(name)
        try:
            memory[name] = peak_memory(run, settings.device)
            racing[name] = Contestant(run, settings.device)
        except Exception as error:
            fatal(error)
            facts["errors"][name] = first_line(error)
            if name == "ours":
                raise
    times = race(racing, flush, settings.race_seconds)
    for found in times.values():
        del found["times"]
    entries = {name: {**found, "memory": memory[name]} for name, found in times.items()}
    return {"goal": case.goal, "entries": entries, "work": work._asdict(), "kind": roofline.kind_of(case.name), **facts}


def work_through(settings: Settings) -> None:
    """Run or measure rows until all are done or the time is over."""
    record, begin = Path(settings.record), time.monotonic()
    trace = trace_of(record).open("w")
    flush = Flush(settings.device)
    spent = dict(settings.spent)

    def write(**line: Any) -> None:
        with record.open("a") as file:
            file.write(json.dumps(line) + "\n")

    for number, (part, name, case) in enumerate(turns(plan(settings.device, settings.pattern), spent)):
        if time.monotonic() - begin > settings.seconds:
            return
        if settings.share is not None:  # all workers count alike, so that each row is one's alone
            spent[part] = spent.get(part, 0.0) + 1.0
            if number % settings.share[1] != settings.share[0]:
                continue
        if name in settings.skip:
            continue
        lost = settings.losses.get(name, 0)
        if lost:
            case = replace(case, peers={})
        row_begin = time.monotonic()
        write(start=name)
        faulthandler.dump_traceback_later(settings.row_seconds, exit=True, file=trace)
        begin_contestant = lambda contestant: write(at=contestant)  # noqa: E731
        try:
            with calling_thread():
                if settings.share is None:
                    row = measured(case, settings, flush, lost < 2, begin_contestant)
                else:
                    row = {"warm": sorted(contestants(case, True, begin_contestant)[0])}
                    defaults()
            if settings.device == "cuda":
                torch.cuda.synchronize()
        except (SystemExit, Exception) as error:
            row = {"error": first_line(error.__cause__ or error)}
            if spoiled(settings.device):  # the row has not ended, which says so
                print(row["error"], flush=True)
                os._exit(SPOILED)
        faulthandler.cancel_dump_traceback_later()
        seconds = time.monotonic() - row_begin
        if settings.share is None:
            spent[part] = spent.get(part, 0.0) + seconds
        write(end=name, part=part, seconds=round(seconds, 2), row=row)
        del row


def main() -> None:
    """Do what the first argument says."""
    work_through(Settings(**json.loads(sys.argv[1])))
