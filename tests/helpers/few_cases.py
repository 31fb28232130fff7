"""Pytest plugin that keeps a few cases of every test function, for processors that are slow or emulated.

``python -m pytest -p tests.helpers.few_cases --few-cases 4 tests/ops`` runs at most 4 cases of each function. The
function's name determines which, so that every run has the same cases.
"""

from __future__ import annotations

import random

import pytest


def pytest_addoption(parser):
    parser.addoption("--few-cases", type=int, default=1, metavar="N", help="run at most N cases of each test function")


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept: set[pytest.Item] = set()
    for name, cases in functions.items():
        kept.update(random.Random(name).sample(cases, min(config.option.few_cases, len(cases))))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
