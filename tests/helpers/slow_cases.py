"""Which cases of a costly test every run has; the others are ``slow``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def slow_but(quick: Collection[Any], cases: Sequence[Any]) -> list:
    """Return the cases of a parametrization, all marked ``slow`` but those in ``quick``."""
    assert all(case in cases for case in quick), quick
    as_values = [case if type(case) is tuple else (case,) for case in cases]
    return [
        case if case in quick else pytest.param(*values, marks=pytest.mark.slow)
        for case, values in zip(cases, as_values)
    ]
