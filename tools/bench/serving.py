"""Backends of the operators: which there are, and which served a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import attn_plugins.ops  # noqa: F401 - defines the operators
from attn_plugins.ops import backends
from attn_plugins.ops.operator import Operator


def operators() -> dict[str, Operator]:
    """Return all operators that the package defines, by name."""
    modules = [module for name, module in sys.modules.items() if name.startswith("attn_plugins.ops.")]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Operator)]
    return {each.name: each for each in found}


def backends_of(operator: str) -> list[str]:
    """Return the backends in an operator's table, preferred ones first; empty for a functional without a table."""
    found = operators().get(operator)
    return [] if found is None else [each.name for each in found.table]


def served_by(run: Callable[[], Any]) -> dict[str, list[str]]:
    """Run once, and return the backends that computed each operator, forward and backward, in order of use."""
    found: dict[str, list[str]] = {}
    choose = backends.choose

    def watched(operator: str, table: Any, terms: Any, options: Any, backward: bool = False) -> Any:
        chosen = choose(operator, table, terms, options, backward)
        names = found.setdefault(operator, [])
        if chosen.name not in names:
            names.append(chosen.name)
        return chosen

    backends.choose = watched
    try:
        run()
    finally:
        backends.choose = choose
    return found
