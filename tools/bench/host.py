"""Count what the host does for one call of an operator on tiny tensors of a CPU: ``python -m tools.bench.host``.

Columns: ATen operators as the profiler sees them, those within others as well, functions of Python that are entered,
and those of C that Python calls.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .cases.calls import OPERATORS


class Count(NamedTuple):
    """Operators and functions of one call."""

    aten: int
    python: int
    c: int


def count(run: Callable[[], Any]) -> Count:
    """Count what one call of ``run`` does, after three others."""
    for _ in range(3):
        run()
    entered = {"call": 0, "c_call": -1}  # sys.setprofile itself

    def seen(frame: Any, event: str, argument: Any) -> None:
        if event in entered:
            entered[event] += 1

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        run()
    operators = sum(event.name.startswith("aten::") for event in profile.events())
    return Count(operators, entered["call"] - 1, entered["c_call"])


def passes_of_operator(name: str) -> dict[str, Callable[[], Any]]:
    """Return a forward without gradients, and a forward with the backward of all gradients."""
    shapes, call = OPERATORS[name]
    leaves = [torch.rand(shape).requires_grad_() for shape in shapes]
    tensors = [leaf.detach() for leaf in leaves]
    ones = torch.ones_like(call(*tensors))
    return {
        "forward": lambda: call(*tensors),
        "with backward": lambda: torch.autograd.grad(call(*leaves), leaves, ones),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tools.bench.host", description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="CALL", help=f"any of {', '.join(OPERATORS)} (default: all)")
    names = parser.parse_args(arguments).names
    if unknown := set(names) - {*OPERATORS}:
        parser.error(f"CALL must be any of {', '.join(OPERATORS)}, got {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    print("| call, pass | ATen | Python | C |\n| --- | --- | --- | --- |")
    for name in names or OPERATORS:
        for kind, run in passes_of_operator(name).items():
            print("|", " | ".join(map(str, (f"{name}, {kind}", *count(run)))), "|")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
