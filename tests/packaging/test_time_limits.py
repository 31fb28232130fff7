"""No test times out early on a process that has to wait on a busy machine."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("*.py"))
LEAST = 600  # seconds; a shorter limit would also end processes that do not hang


def short_limits(source: str) -> list[str]:
    """Return the calls with shorter time limits."""
    short = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        limits = [word.value for word in call.keywords if word.arg == "timeout"]
        limits += call.args if getattr(call.func, "attr", None) in ("wait", "settimeout") else []
        if any(isinstance(limit, ast.Constant) and (limit.value or LEAST) < LEAST for limit in limits):
            short.append(f"line {call.lineno}: {ast.unparse(call)}")
    return short


def test_time_limits_catch_hangs_alone():
    calls = {str(file.relative_to(TESTS)): short_limits(file.read_text(encoding="utf-8")) for file in FILES}
    assert not {file: limits for file, limits in calls.items() if limits}
