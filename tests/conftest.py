"""Fixtures of the whole suite. They import no toolkit, because a GPU test machine may have none."""

from __future__ import annotations

import gc
import logging
import math
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent

if not torch.cuda.is_available():  # set before anything imports Triton, whose kernels are then interpreted
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser):
    parser.addoption("--at-most", type=int, metavar="N", help="run the first N cases of a function, on slow machines")


def pytest_terminal_summary(terminalreporter):
    if not torch.cuda.is_available():
        terminalreporter.write_line("no tests marked cuda: no device")


def pytest_itemcollected(item):
    """Mark what a GPU is used for where there is one: files that use either device, and cases of Triton's kernels."""
    either = getattr(getattr(item, "module", None), "DEVICE", None) == "cuda"
    values = getattr(getattr(item, "callspec", None), "params", {}).values()
    if either or (torch.cuda.is_available() and any(isinstance(v, str) and v == "triton" for v in values)):
        item.add_marker("cuda")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """After an error that leaves the device unusable, end this worker of pytest-xdist, which starts another."""
    if "PYTEST_XDIST_WORKER" in os.environ and item.get_closest_marker("cuda"):
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(71)


@pytest.hookimpl(trylast=True)  # of the cases that -m and -k select
def pytest_collection_modifyitems(config, items):
    left_out = [marker for marker in ("install", "site") if marker not in config.option.markexpr]
    if not torch.cuda.is_available():
        left_out.append("cuda")
    kept = [item for item in items if not any(map(item.get_closest_marker, left_out))]
    if (most := config.option.at_most) is not None:
        rank = ranks()
        kept = [item for item in kept if rank(item) < most]
    if torch.cuda.is_available():
        put_cuda_first(kept)
    remaining = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in remaining])
    items[:] = kept

    peers = [item for item in items if item.get_closest_marker("peers")]
    if peers and (reason := missing_mmcv()):
        for item in peers:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    """Keep what is imported by now, some million objects, out of later garbage collections."""
    gc.collect()
    gc.freeze()


def ranks() -> Callable[[pytest.Item], int]:
    """Return a function that counts the cases of each test function, from 0."""
    numbers: dict[str, Iterator[int]] = defaultdict(count)
    return lambda item: next(numbers[item.nodeid.partition("[")[0]])


def put_cuda_first(items: list[pytest.Item]) -> None:
    """Begin with one case of every function marked cuda, then its second: a time limit may end a run on a GPU."""
    rank = ranks()
    items.sort(key=lambda item: rank(item) if item.get_closest_marker("cuda") else math.inf)


def missing_mmcv() -> str | None:
    """Return why there is no compiled mmcv to compare with, or None."""
    from tools.bench import compiled_mmcv

    try:
        return None if compiled_mmcv.is_compiled() else compiled_mmcv.NOT_COMPILED
    except ImportError:
        return compiled_mmcv.NOT_COMPILED


@pytest.fixture(autouse=True)
def warnings_are_logged() -> None:
    """Undo what toolkits do to logging when they are imported or run: tests read our warnings."""
    logging.disable(logging.NOTSET)
    logging.getLogger().setLevel(logging.WARNING)
    for name in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "attn_plugins"]:
        logger = logging.getLogger(name)
        logger.disabled, logger.propagate = False, True


@pytest.fixture
def python(tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """Run code in a fresh interpreter, outside the repository: ``python("import torch", SOME_VARIABLE="0")``.

    ``packages`` maps file names to sources that come first on the path, to stand in for installed packages.
    """

    def run(code: str, *, packages: dict[str, str] | None = None, check: bool = True, **environment: str):
        for name, source in (packages or {}).items():
            file = tmp_path / "path" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)
        path = os.pathsep.join(filter(None, [str(tmp_path / "path"), os.environ.get("PYTHONPATH", "")]))
        result = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=1800,
        )
        if check:
            assert result.returncode == 0, f"{code}\n{result.stdout}\n{result.stderr}"
        return result

    return run
