"""Command ``check``: build, tests, comparison of random calls with the reference, memory checkers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tools.benchmark.results import dump
from tools.files import write_text

from . import machine, memory, testing
from .processes import Budget

STAGES = ("build", "tests", "fuzz", "memory")
# Time limit of each stage in seconds; the last stage may use all that is left.
SECONDS = {"build": 210.0, "tests": 330.0, "fuzz": 55.0, "memory": 140.0}
OPERATORS = (
    "window_attention", "global_attention", "sequence_attention", "criss_cross_attention", "deform_conv2d",
    "deformable_attention",
)  # fmt: skip


class Stage(NamedTuple):
    """Outcome of a stage: ``passed``, ``FAILED``, ``no time`` or ``no device``, with explanatory lines."""

    name: str
    outcome: str
    seconds: float
    lines: list[str]
    details: list[dict[str, Any]] = []


def check(stages: Sequence[str], budget: Budget, jobs: int, out: Path, force_build: bool = False) -> int:
    """Run the stages, write results after each, print a summary, and return the exit status.

    Without a device every stage says so and ends.
    """
    out.mkdir(parents=True, exist_ok=True)
    log = out / "check.log"
    log.write_text("")
    done: list[Stage] = []
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as folder:
        scratch = Path(folder)
        run: dict[str, Callable[[Budget], Stage]] = {
            "build": lambda part: _build(part, log, force_build),
            "tests": lambda part: _tests(part, log, scratch, jobs),
            "fuzz": lambda part: _fuzz(part, scratch, jobs),
            "memory": lambda part: _memory(part, scratch, jobs),
        }
        for name in stages:
            print(f"=== {name}", flush=True)
            limit = budget.left() if name == stages[-1] else SECONDS[name]
            if not torch.cuda.is_available():
                stage = Stage(name, "no device", 0.0, [machine.NO_DEVICE])
            elif budget.over():
                stage = Stage(name, "no time", 0.0, [])
            else:
                stage = run[name](budget.part(limit))
            done.append(stage)
            print("\n".join(stage.lines), flush=True)
            write(out, done, budget)
    print("=== summary\n" + "\n".join(summary(done)), flush=True)
    if any(stage.outcome == "no device" for stage in done):
        return 2
    return 0 if all(stage.outcome == "passed" for stage in done) else 1


def _stage(name: str, passed: bool, part: Budget, lines: list[str], details: Any = ()) -> Stage:
    return Stage(name, "passed" if passed else "FAILED", round(part.spent(), 1), lines, list(details))


def _build(part: Budget, log: Path, force: bool) -> Stage:
    passed, line = machine.build(part, log, torch.cuda.get_device_capability(), force)
    return _stage("build", passed, part, [line])


def _tests(part: Budget, log: Path, scratch: Path, jobs: int) -> Stage:
    # Reference results are computed on the CPU at the same time, and inductor would start a process per core.
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    tests, problem = testing.collect(part, log, scratch)
    results = testing.run_tests(tests, jobs, part, log, scratch)
    passed, line = testing.summary(results, problem)
    bad = {name: each for name, each in results.items() if each.outcome in ("failed", "not run")}
    details = [
        {"test": name, "outcome": each.outcome, "seconds": each.seconds, "message": each.message}
        for name, each in results.items()
        if name in bad or each.seconds > 20
    ]
    lines = [f"{each.outcome.upper()} {name}: {reason(each.message)}" for name, each in list(bad.items())[:60]]
    return _stage("tests", passed, part, [*lines, line], details)


def reason(message: str) -> str:
    """Return the most informative line of a failure: the last line that pytest marks, else the last line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    marked = [line for line in lines if line.startswith("E ")]
    chosen = marked[0] if marked else lines[-1] if lines else "no message"
    return chosen.removeprefix("E").strip()[:200]


def _fuzz(part: Budget, scratch: Path, jobs: int) -> Stage:
    found = memory.fuzz(OPERATORS, jobs, part, scratch / "check.log")
    return _stage("fuzz", all(each.passed for each in found), part, _lines(found), [each._asdict() for each in found])


def _memory(part: Budget, scratch: Path, jobs: int) -> Stage:
    found = memory.check_memory(OPERATORS, jobs, part, scratch / "check.log")
    return _stage("memory", all(each.passed for each in found), part, _lines(found), [each._asdict() for each in found])


def _lines(found: Sequence[memory.Found]) -> list[str]:
    return [f"{'passed' if each.passed else 'FAILED'} {each.name}: {each.line}" for each in found]


def summary(done: Sequence[Stage]) -> list[str]:
    """Return a line for each stage."""
    return [f"{stage.name}: {stage.outcome} in {stage.seconds:.0f} s. {(stage.lines or [''])[-1]}" for stage in done]


def write(out: Path, done: Sequence[Stage], budget: Budget) -> None:
    """Write ``check.json`` and ``check.md``."""
    facts = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "seconds": round(budget.spent(), 1),
    }
    stages = [{**stage._asdict(), "details": stage.details} for stage in done]
    write_text(out / "check.json", dump({**facts, "stages": stages}))
    lines = ["# Check on a GPU", "", ", ".join(f"{name} {value}" for name, value in facts.items()), ""]
    for stage in done:
        lines += [f"## {stage.name}: {stage.outcome}", "", *(f"* {line}" for line in stage.lines), ""]
    write_text(out / "check.md", "\n".join(lines))
