"""Run the tests that use a CUDA device in separate processes, so that a crash affects no other test.

Each process runs some tests of one file. If it crashes or hangs, its current test has failed, and another process runs
the rest.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from .machine import ROOT
from .processes import Budget, run

FOLDERS = ("tests/ops", "tests/terms", "tests/modules", "tests/timm")
WEIGHT_A_PROCESS = 60  # total weight of the tests of a process
STARTS = 6  # maximum number of processes for the same tests, each after one that ended early
TEST_SECONDS = 90.0
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # loading other packages' plugins takes seconds per process
# Weights of tests relative to a quick one, by a part of their names.
WEIGHTS = {re.compile("compil", re.I): 15, re.compile("triton|opcheck|gradcheck", re.I): 3}


class Result(NamedTuple):
    """Outcome of a test, ``passed``, ``failed``, ``skipped`` or ``not run``, and the reason."""

    outcome: str
    seconds: float = 0.0
    message: str = ""


def pytest_command(*arguments: str | Path) -> list[str | Path]:
    """Return the command line of pytest with the plugin."""
    plugin = f"{__package__}.pytest_plugin"
    return [sys.executable, "-m", "pytest", "-q", "-p", plugin, "-p", "no:cacheprovider", *arguments]


def collect(budget: Budget, log: Path, scratch: Path, folders: Sequence[str] = FOLDERS) -> tuple[list[str], str | None]:
    """Collect the tests; return their identifiers, and the problem that occurred, or None."""
    listing = scratch / "collected"
    folders = [folder for folder in folders if (ROOT / folder).exists()]
    words = ["--collect-only", "--device-tests", "--continue-on-collection-errors", "--list-to", listing, *folders]
    done = run(pytest_command(*words), budget.left(), log, ALONE)
    found = listing.read_text().splitlines() if listing.exists() else []
    if done.status in (0, 5):
        return found, None
    return found, f"collecting tests: {'time is over' if done.status is None else done.last_line()}"


def weight(identifier: str) -> int:
    """Return about how long a test takes relative to a quick one."""
    return next((each for pattern, each in WEIGHTS.items() if pattern.search(identifier)), 1)


def chunks(identifiers: Iterable[str], most: int = WEIGHT_A_PROCESS) -> list[list[str]]:
    """Group tests into chunks of one file and a total weight of ``most``, heaviest first."""
    found: list[list[str]] = []
    file, total = "", 0
    for each in identifiers:
        total += weight(each)
        if each.split("::")[0] != file or total > most:
            file, total = each.split("::")[0], weight(each)
            found.append([])
        found[-1].append(each)
    return sorted(found, key=lambda tests: -sum(map(weight, tests)))


def run_chunk(tests: Sequence[str], number: int, budget: Budget, log: Path, scratch: Path, seconds: float) -> dict:
    """Run ``tests``, all of one file, and return the result of each."""
    found: dict[str, Result] = {}
    for start in range(STARTS):
        rest = [name for name in tests if name not in found]
        if not rest or budget.over():
            break
        listing, record = scratch / f"{number}-{start}.tests", scratch / f"{number}-{start}.jsonl"
        listing.write_text("\n".join(rest) + "\n")
        words = ["--listed", listing, "--record", record, "--test-seconds", f"{seconds:g}", rest[0].split("::")[0]]
        done = run(pytest_command(*words), budget.left(), scratch / f"{number}.log", ALONE)
        ended, at = read_record(record)
        found |= ended
        if at is not None:
            why = f"its process ended with status {done.status}"
            if done.status is None:
                why = "the time of all tests was over"
            elif trace := trace_of(record).read_text():
                why = f"{trace[:1000]}\ntook more than {seconds:g} s"
            outcome = "not run" if done.status is None else "failed"
            found[at] = Result(outcome, message=f"{done.output[-800:]}\n{why}")
        elif not ended:  # nothing started: the file does not import, or the identifiers are unknown
            found |= {name: Result("failed", message=f"no test was run: {done.output[-800:]}") for name in rest}
    return {name: found.get(name, Result("not run", message="the time was over")) for name in tests}


def trace_of(record: Path) -> Path:
    """Return the file for the traceback of a test that takes too long."""
    return record.with_suffix(".trace")


def read_record(path: Path) -> tuple[dict[str, Result], str | None]:
    """Return the results of tests that ended, and the test that only started, or None."""
    ended: dict[str, Result] = {}
    at = None
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:  # the process died while it wrote
            continue
        if "start" in entry:
            at = entry["start"]
        else:
            ended[entry["end"]] = Result(entry["outcome"], entry["seconds"], entry["message"])
            at = None
    return ended, at


def run_tests(
    identifiers: Sequence[str], jobs: int, budget: Budget, log: Path, scratch: Path, seconds: float = TEST_SECONDS
) -> dict[str, Result]:
    """Run all tests with ``jobs`` processes in parallel and return their results; failing tests raise nothing."""
    found: dict[str, Result] = {}
    with ThreadPoolExecutor(jobs) as pool:
        running = [
            pool.submit(run_chunk, tests, number, budget, log, scratch, seconds)
            for number, tests in enumerate(chunks(identifiers))
        ]
        for each in running:
            found |= each.result()
    return found


def summary(results: dict[str, Result], problem: str | None) -> tuple[bool, str]:
    """Return whether no test failed, and a summary line."""
    counts = Counter(result.outcome for result in results.values())
    words = [f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped", "not run") if counts[kind]]
    passed = bool(counts["passed"]) and not counts["failed"] and not counts["not run"] and problem is None
    return passed, ", ".join([*words, *([problem] if problem else [])]) or "no test was found"
