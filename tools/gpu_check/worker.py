"""A process that measures rows one after another, and writes to a file when each starts and ends.

:mod:`.measure` runs it as ``python -c "from tools.gpu_check.worker import main; main()" SETTINGS``, with
:class:`Settings` as JSON. A row that ends the process or takes too long is recognised by its missing end.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from attn_plugins import ops
from tools.benchmark import operators
from tools.benchmark.case import Case, Run
from tools.benchmark.memory import peak_memory

from . import module_rows, peers, roofline, rows, selection
from .backends import backends_of, calling_thread, served_by
from .testing import trace_of
from .timing import Contestant, Flush, race

EVERY_ROW = "every row"  # name of the failed row of a part whose rows cannot be listed
UNUSABLE = 71  # exit status if the device is unusable
# Parts, and their relative shares of the time.
PARTS = {
    "operators": 3.0, "modules": 2.0, "deform_conv": 1.0, "deformable_attention": 1.0, "global_attention": 1.0,
    "augmented_conv": 0.7, "window_attention": 1.0, "criss_cross": 1.0, "sequence_attention": 1.0,
    "vision_transformers": 1.0, "halves": 0.5,
}  # fmt: skip
# (operator, backend) -> name and environment of another way in which the backend computes
VARIANTS = {("deform_conv2d", "cuda"): ("cuda without windows", {"ATTN_PLUGINS_SCATTER": "0"})}
DTYPE_ORDER = ("bfloat16", "float32", "TF32", "float16")


@dataclass
class Settings:
    """Settings of a worker.

    Attributes:
        device: ``cuda`` or ``cpu``.
        record: File that it appends to.
        seconds: Time after which it starts no further row.
        pattern: Regular expression for the names of rows.
        skip: Names of rows that are done.
        losses: How many processes each row has ended: after one it runs without peers, after two by default only.
        spent: Seconds that each part has taken so far.
        share: (number, count) of this worker's share of the rows, which only run once to fill caches; None to measure
            all rows.
        race_seconds: Time for the rounds of a row.
        row_seconds: Time after which a row is abandoned and the process ends.
        without: Backends of ours that are not compared where there are faster ones.
        every: All rows that match; without it and without a pattern, those of :mod:`.selection`.
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
    without: list[str] = field(default_factory=list)
    every: bool = False


def part_cases(part: str, device: str) -> list[Case]:
    """Return the rows of a part, the most informative dtypes first."""
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


class Row(NamedTuple):
    """A row to measure: its part, its name with the part in front, and the backends of ours that it leaves out."""

    part: str
    name: str
    case: Case
    without: tuple[str, ...] = ()


def plan(device: str, pattern: str, every: bool = False) -> tuple[dict[str, list[Row]], dict[str, str]]:
    """Return the rows by part, and the reasons of parts that have none.

    With ``every`` or a pattern these are all rows, with all peers; otherwise those of :mod:`.selection`.
    """
    wanted, found, broken = re.compile(pattern), dict[str, list[Row]](), dict[str, str]()
    for part in PARTS:
        try:
            cases = part_cases(part, device)
        except Exception as error:
            broken[part] = first_line(error)
            continue
        rows = [Row(part, f"{part}: {case.name}", case) for case in cases]
        rows = [row for row in rows if wanted.search(row.name)]
        found[part] = rows if every or pattern else [_selected(row) for row in rows if selection.is_selected(row.name)]
    return found, broken


def _selected(row: Row) -> Row:
    case = replace(row.case, peers=selection.peers_of(row.name, row.case.peers))
    return row._replace(case=case, without=tuple(selection.without(row.name)))


def in_turn(planned: Mapping[str, Sequence[Row]], spent: dict[str, float]) -> Iterator[Row]:
    """Yield the rows: the selection's first ones, others of the selection, the rest.

    Among these the next is always of the part with the least of its time in ``spent``, which callers update.
    """
    for rank in range(3):
        waiting = {part: [row for row in rows if selection.rank(row.name) == rank] for part, rows in planned.items()}
        while waiting := {part: rows for part, rows in waiting.items() if rows}:
            yield waiting[min(waiting, key=lambda name: spent.get(name, 0.0) / PARTS[name])].pop(0)


def forced(run: Run, backend: str) -> Run:
    """Return ``run`` with one backend for all operators."""

    def by_backend() -> object:
        with ops.backend(backend):
            return run()

    return by_backend


def with_environment(run: Run, variables: Mapping[str, str]) -> Run:
    """Return ``run`` with environment variables set while it runs."""

    def by_variables() -> object:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            return run()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    return by_variables


def own_runs(ours: Run, served_by: Mapping[str, list[str]], without: Collection[str]) -> dict[str, Run]:
    """Return ``ours`` by its other backends and by the variants of those that serve it."""
    serving = {name for names in served_by.values() for name in names}
    backends = dict.fromkeys(name for operator in served_by for name in backends_of(operator))
    found = {
        name: forced(ours, name)
        for name in backends
        if serving != {name} and not (name in without and len(backends) > 2)
    }
    for (operator, backend), (name, variables) in VARIANTS.items():
        if backend in served_by.get(operator, ()):
            found[name] = with_environment(ours, variables)
    return found


def defaults() -> None:
    """Reset what the last row changed: flags, compiled code and its limits, memory."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def first_line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:160]}"


def contestants(
    case: Case, others: bool = True, begin: Callable[[str], None] = lambda name: None, without: Collection[str] = ()
) -> tuple[dict[str, Run], dict[str, Any]]:
    """Return the functions of a row by name, each run once, and facts about the row: errors, refusals, backends.

    "ours" uses the default backends, "ours, by NAME" another backend of the operators that it calls, or a variant. The
    fact ``first`` has the seconds that ours and each peer took to be prepared and run once, which compiles.

    Args:
        case: The row.
        others: Whether to include other backends.
        begin: Function called with each name before it runs.
        without: Names of backends to leave out, unless there are only two.
    """
    found: dict[str, Run] = {}
    facts: dict[str, Any] = {"errors": {}, "refusals": {}, "differences": {}, "first": {}}
    torch.manual_seed(0)
    begin("ours")
    at = time.monotonic()
    ours = case.ours()
    facts["served_by"] = served_by(ours)
    found["ours"] = ours
    expected = ours()
    facts["first"]["ours"] = round(time.monotonic() - at, 2)
    for name, run in own_runs(ours, facts["served_by"], without).items() if others else ():
        begin(f"ours, by {name}")
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
        at = time.monotonic()
        try:
            run = prepare()
            run()
            found[name] = run
        except Exception as error:
            fatal(error)
            facts["errors"][name] = first_line(error)
        facts["first"][name] = round(time.monotonic() - at, 2)
    return found, facts


def difference(found: Any, expected: Any) -> float:
    """Return the relative norm of the difference between the first tensors of two results."""
    a, b = (next(filter(torch.is_tensor, pytree.tree_leaves(each))).double() for each in (found, expected))
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def unusable(device: str) -> bool:
    """Return whether the device fails after an earlier error."""
    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def fatal(error: BaseException) -> None:
    """End the process if ``error`` left the device unusable.

    Raises:
        SystemExit: the device is unusable.
    """
    if unusable("cuda" if torch.cuda.is_available() else "cpu"):
        raise SystemExit(UNUSABLE) from error


def measured(
    case: Case,
    settings: Settings,
    flush: Flush,
    others: bool = True,
    begin: Callable[[str], None] = lambda name: None,
    without: Collection[str] = (),
) -> dict[str, Any]:
    """Measure a row: times and memory of all contestants, and our minimum work."""
    defaults()
    runs, facts = contestants(case, others, begin, without)
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


def run_rows(settings: Settings) -> None:
    """Run or measure rows until all are done or the time is over."""
    record, begin = Path(settings.record), time.monotonic()
    trace = trace_of(record).open("w")
    flush = Flush(settings.device)
    spent = dict(settings.spent)

    def write(**line: Any) -> None:
        with record.open("a") as file:
            file.write(json.dumps(line) + "\n")

    rows_by_part, broken = plan(settings.device, settings.pattern, settings.every)
    if settings.share is None:
        write(planned=[row.name for rows in rows_by_part.values() for row in rows])
        for part, reason in broken.items():
            if (name := f"{part}: {EVERY_ROW}") not in settings.skip:
                write(end=name, part=part, seconds=0.0, row={"error": reason})
    for number, (part, name, case, without) in enumerate(in_turn(rows_by_part, spent)):
        if time.monotonic() - begin > settings.seconds:
            return
        if settings.share is not None:  # all workers count alike, so that each row belongs to one of them
            spent[part] = spent.get(part, 0.0) + 1.0
            if number % settings.share[1] != settings.share[0]:
                continue
        if name in settings.skip:
            continue
        without = (*without, *settings.without)
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
                    row = measured(case, settings, flush, lost < 2, begin_contestant, without)
                else:
                    row = {"warm": sorted(contestants(case, True, begin_contestant, without)[0])}
                    defaults()
            if settings.device == "cuda":
                torch.cuda.synchronize()
        except (SystemExit, Exception) as error:
            row = {"error": first_line(error.__cause__ or error)}
            if unusable(settings.device):  # the record shows the row as not ended
                print(row["error"], flush=True)
                os._exit(UNUSABLE)
        faulthandler.cancel_dump_traceback_later()
        seconds = time.monotonic() - row_begin
        if settings.share is None:
            spent[part] = spent.get(part, 0.0) + seconds
        write(end=name, part=part, seconds=round(seconds, 2), row=row)
        del row


def main() -> None:
    """Run the rows for the settings in the first argument."""
    peers.make_importable()
    run_rows(Settings(**json.loads(sys.argv[1])))
