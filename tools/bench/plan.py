"""The plan of half an hour on a GPU, ``gpu.yaml``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from .case import Case


@cache
def read() -> dict[str, Any]:
    """Return ``calls``, the steps of each call, and ``variants``."""
    return yaml.safe_load(Path(__file__).with_name("gpu.yaml").read_text(encoding="utf-8"))


def matching(cases: Sequence[Case], pattern: str) -> list[Case]:
    """Return the cases whose names contain a match of ``pattern``.

    Raises:
        ValueError: there is none.
    """
    found = [case for case in cases if re.search(pattern, case.name)]
    if not found:
        raise ValueError(f"no row matches {pattern!r}")
    return found
