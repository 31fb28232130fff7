"""A pytest plugin that runs listed tests, records each as it starts and ends, and stops once CUDA is unusable.

After an illegal memory access every CUDA call of the process fails, so all later tests would fail as well.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from .testing import trace_of

UNUSABLE = 71  # exit status


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu_check")
    group.addoption("--device-tests", action="store_true", help="only tests that need a CUDA device or use one")
    group.addoption("--listed", type=Path, help="run only tests whose identifiers are in this file")
    group.addoption("--list-to", type=Path, help="write the identifiers of collected tests, one per line")
    group.addoption("--record", type=Path, help="append a JSON line as each test starts and ends")
    group.addoption("--test-seconds", type=float, default=90.0, help="end the process if a test takes longer")


def pytest_configure(config: pytest.Config) -> None:
    config.option.all_cases = True  # of products of parameters, of which tests/conftest.py otherwise takes a sample
    if config.getoption("--record") is not None:
        config.pluginmanager.register(Recorder(config), "gpu_check_recorder")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    listed = config.getoption("--listed")
    wanted = None if listed is None else set(listed.read_text().splitlines())
    chosen = [
        item
        for item in items
        if (wanted is None or item.nodeid in wanted) and (not config.getoption("--device-tests") or on_device(item))
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def on_device(item: pytest.Item) -> bool:
    """Return whether a test is marked ``cuda``, or belongs to a file whose ``DEVICE`` is the available one."""
    module = getattr(item, "module", None)
    return item.get_closest_marker("cuda") is not None or getattr(module, "DEVICE", None) == "cuda"


def pytest_collection_finish(session: pytest.Session) -> None:
    target = session.config.getoption("--list-to")
    if target is not None:
        target.write_text("".join(f"{item.nodeid}\n" for item in session.items))


class Recorder:
    """Record of tests, in a file that survives the process."""

    def __init__(self, config: pytest.Config) -> None:
        self.path, self.limit = config.getoption("--record"), config.getoption("--test-seconds")
        self.outcome, self.message = "passed", ""
        self.trace = trace_of(self.path).open("w")  # pytest captures stderr

    def write(self, **line: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.write(start=item.nodeid)
        self.outcome, self.message = "passed", ""
        begin = time.monotonic()
        faulthandler.dump_traceback_later(self.limit, exit=True, file=self.trace)
        try:
            result = yield
            error = cuda_error()
        finally:
            faulthandler.cancel_dump_traceback_later()
        if error is not None:
            self.outcome, self.message = "failed", f"{error}\n{self.message}"
        seconds = round(time.monotonic() - begin, 3)
        self.write(end=item.nodeid, outcome=self.outcome, seconds=seconds, message=self.message[-1500:])
        if error is not None:
            os._exit(UNUSABLE)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.outcome, self.message = "failed", report.longreprtext
        elif report.skipped and self.outcome == "passed":
            self.outcome = "skipped"
            self.message = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)


def cuda_error() -> str | None:
    """Wait for the device; return its error, or None."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None
