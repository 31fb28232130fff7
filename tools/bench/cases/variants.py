"""Our kernels with other blocks than their defaults, as ``variants`` of ``gpu.yaml`` lists them, on some of our rows.

A row's peers are ours with each candidate; one whose results differ from those of the default cannot run.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from attn_plugins.ops.common import tuned

from ..case import Case, Run, tensors
from ..measure import difference, forced
from ..report import MISMATCH

SWITCH = "ATTN_PLUGINS_"  # begins the names of variables of the environment that kernels in C++ read


@cache
def plan() -> dict[str, Any]:
    """Return the plan of half an hour on a GPU: ``calls``, the steps of each call, and ``variants``."""
    return yaml.safe_load(Path(__file__).parents[1].joinpath("gpu.yaml").read_text(encoding="utf-8"))


def matching(cases: Sequence[Case], pattern: str) -> list[Case]:
    """Return the cases whose names contain a match of ``pattern``.

    Raises:
        ValueError: there is none.
    """
    matches = [case for case in cases if re.search(pattern, case.name)]
    if not matches:
        raise ValueError(f"no row matches {pattern!r}")
    return matches


def candidates(values: Any) -> Iterator[tuple[str, Any]]:
    """Yield the candidates of a name with their titles: of lists for each field of a block all combinations."""
    for value in itertools.product(*values) if isinstance(values[0], list) else values:
        yield ("×".join(map(str, value)) if isinstance(value, tuple) else str(value)), value


def trying(name: str, value: Any) -> AbstractContextManager[Any]:
    """Set one candidate."""
    return patch.dict(os.environ, {name: str(value)}) if name.startswith(SWITCH) else tuned.trying(name, value)


def ours_with(name: str, value: Any, prepare: Callable[[], Run], limit: float) -> Callable[[], Run]:
    """Return a preparation of ``prepare``'s run with a candidate; the default for None."""

    def make() -> Run:
        run = prepare() if name.startswith(SWITCH) else forced(prepare(), "triton")
        if value is None:
            return run

        def tried() -> object:
            with trying(name, value):
                return run()

        results = zip(tensors(tried()), tensors(run()))
        if (error := max(difference(*both) for both in results)) > limit:
            raise RuntimeError(f"the results differ by {error:.1g}")
        return tried

    return make


def cases(device: str) -> list[Case]:
    if device != "cuda":
        return []
    from . import cases as of_room

    rows, made = cache(lambda room: of_room(room, device)), list[Case]()
    for variant in plan()["variants"]:
        for name, (room, pattern) in itertools.product(variant["names"], variant["rows"]):
            for case in matching(rows(room), pattern):
                limit = MISMATCH.get(case.kind, 0.1)
                peers = {
                    title: ours_with(name, value, case.ours, limit) for title, value in candidates(variant["values"])
                }
                ours = ours_with(name, None, case.ours, limit)
                made.append(Case(f"{name}: {room}: {case.name}", ours, peers, kind=case.kind))
    return made
