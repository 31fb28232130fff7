"""Fixtures of the whole suite. They import no toolkit, because a GPU test machine may have none."""

from __future__ import annotations

import gc
import math
import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import combinations, count
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent

if not torch.cuda.is_available():  # set before anything imports Triton, whose kernels are then interpreted
    os.environ.setdefault("TRITON_INTERPRET", "1")


SAMPLE = 6  # cases of a product of parameters, where the mark `sampled` says no other number


def pytest_addoption(parser):
    group = parser.getgroup("sampling")
    group.addoption("--all-cases", action="store_true", help="run all cases of products of parameters")
    group.addoption("--at-most", type=int, metavar="N", help="run at most N cases of a function, where tests are slow")
    group.addoption("--sample-seed", default="0", metavar="SEED", help="choose other cases of products (default 0)")


def pytest_report_header(config):
    cases = "all" if config.option.all_cases else f"a sample of products, --sample-seed {config.option.sample_seed}"
    cuda = "" if torch.cuda.is_available() else "; none marked cuda: no device"
    return f"cases: {cases}{cuda}"


def pytest_terminal_summary(terminalreporter, config):
    if config.option.verbose < 0:  # then pytest prints no header
        terminalreporter.write_line(pytest_report_header(config))


def pytest_itemcollected(item):
    if getattr(getattr(item, "module", None), "DEVICE", None) == "cuda":  # of a file that uses either device
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
    if not config.option.all_cases:
        functions = defaultdict(list)
        for item in kept:
            functions[item.nodeid.partition("[")[0]].append(item)
        seed, most = config.option.sample_seed, config.option.at_most
        chosen = {item for name, cases in functions.items() for item in sample(cases, seed + name)[:most]}
        kept = [item for item in kept if item in chosen]
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


def put_cuda_first(items: list[pytest.Item]) -> None:
    """Begin with one case of every function marked cuda, then its second: a time limit may end a run on a GPU."""
    numbers: dict[str, Iterator[int]] = defaultdict(count)

    def rank(item: pytest.Item) -> float:
        return next(numbers[item.nodeid.partition("[")[0]]) if item.get_closest_marker("cuda") else math.inf

    items.sort(key=rank)


def sample(cases: list[pytest.Item], seed: str) -> list[pytest.Item]:
    """Choose some cases of a test function at random; each value of each parameter occurs in at least one.

    Of the remaining cases, one with more new values, then with more new pairs of values, comes first.
    """
    mark = cases[0].get_closest_marker("sampled")
    number = mark.args[0] if mark else SAMPLE
    if len(cases) <= number:
        return cases
    values = {case: list(enumerate(case.callspec._idlist)) for case in cases}  # one id for each `parametrize`
    every_value = mark is None or mark.kwargs.get("every_value", True)
    new_values = {value for case in cases for value in values[case]} if every_value else set()
    old_pairs: set[tuple] = set()
    chosen, left = [], random.Random(seed).sample(cases, len(cases))
    while new_values or len(chosen) < number:
        gains = [(len(new_values & {*values[c]}), len({*combinations(values[c], 2)} - old_pairs)) for c in left]
        best = left.pop(gains.index(max(gains)))
        chosen.append(best)
        new_values.difference_update(values[best])
        old_pairs.update(combinations(values[best], 2))
    return chosen


def missing_mmcv() -> str | None:
    """Return why there is no compiled mmcv to compare with, or None."""
    from tools.bench import compiled_mmcv

    try:
        return None if compiled_mmcv.is_compiled() else compiled_mmcv.NOT_COMPILED
    except ImportError:
        return compiled_mmcv.NOT_COMPILED


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
