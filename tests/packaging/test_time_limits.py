"""No test depends on how fast the machine is, or on how much of it is free."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("*.py"))
LEAST = 600  # seconds; a shorter limit would end more than what hangs
CLOCKS = {"perf_counter", "monotonic", "process_time", "thread_time", "sleep"}


def hasty(source: str) -> list[str]:
    """The calls that wait for a process or a clock and would give up early, or that measure time."""
    found = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name = getattr(call.func, "attr", getattr(call.func, "id", None))
        limits = [word.value for word in call.keywords if word.arg == "timeout"]
        limits += call.args if name in ("wait", "settimeout") else []
        short = any(isinstance(limit, ast.Constant) and (limit.value or LEAST) < LEAST for limit in limits)
        if short or name in CLOCKS:
            found.append(f"line {call.lineno}: {ast.unparse(call)}")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(TESTS)))
def test_no_test_reads_a_clock(file):
    assert hasty(file.read_text(encoding="utf-8")) == []


def test_what_is_found():
    source = "subprocess.run(x, timeout=300)\nrun(timeout=600)\nprocess.wait(60)\nprocess.wait()\ntime.sleep(1)\n"
    assert [line.partition(":")[0] for line in hasty(source)] == ["line 1", "line 3", "line 5"]
