"""Fuzz operators and modules: random calls against the reference, forward and backward, then with one argument broken.

python -m tools.fuzz                                        # 10,000 calls of every operator
python -m tools.fuzz window_attention --calls 500 --seed 7  # one operator, other calls
python -m tools.fuzz window_attention --seed 7 --only 1234  # one call with a description, as printed for a failure

A call is determined by operator, seed and number. A broken argument must raise a ValueError or a TypeError that names
it. Calls run in separate processes: one that crashes or hangs is reported like any other failure. The exit status is 1
if anything failed.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import os
import sys
import time
from collections.abc import Sequence

import torch

from tools import command_parser

from . import workers
from .operators import NAMES, drawn, judge

# cuBLAS reads it once, at its first product; without it, products fail in deterministic mode.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
COMMAND = (sys.executable, "-m", "tools.fuzz")


def main(arguments: Sequence[str] | None = None, command: Sequence[str] = COMMAND) -> int:
    """Run the tool; ``command`` starts a worker, with the arguments of its share of the calls."""
    options = _parser().parse_args(arguments)
    for name in options.operators:
        if name not in NAMES:
            _parser().error(f"no operator named {name}; there are {', '.join(NAMES)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        _parser().error("--device cuda: torch finds no CUDA device here")
    names = options.operators or list(NAMES)
    if options.only is not None and len(names) != 1:
        _parser().error("--only needs the name of one operator")
    if options.share:
        workers.work(options.share, lambda number: judge(names[0], options.seed, number, options.device))
        return 0
    if options.only is not None:
        return _show(names[0], options)
    failures: list[str] = []
    for name in names:
        failures += _fuzz(name, options, command)
    if failures:
        print(f"{len(failures)} failures in {options.calls * len(names)} calls:", *failures, sep="\n")
    return int(bool(failures))


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("fuzz", __doc__)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help=f"any of {', '.join(NAMES)}; default: all")
    parser.add_argument("--calls", type=int, default=10_000, help="calls of each operator")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run, which determines its calls")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes; 0: this one")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="describe and run this call alone, in this process")
    parser.add_argument("--share", help=argparse.SUPPRESS)  # FIRST:STOP:STEP of the calls, in a worker
    return parser


def _fuzz(name: str, options: argparse.Namespace, command: Sequence[str]) -> list[str]:
    """Run all calls of one operator; print a line for each failure at once, and return all failures."""
    line = [name, "--seed", str(options.seed), *(["--device", "cuda"] if options.device == "cuda" else [])]
    start, failures, errors = time.perf_counter(), list[str](), [0.0]

    def report(result: workers.Result) -> None:
        errors.append(result.roundings)
        for fault in result.faults:
            failures.append(f"python -m tools.fuzz {' '.join(line)} --only {result.number}  # {fault}")
            print(failures[-1], flush=True)

    if options.workers:
        asyncio.run(workers.run([*command, *line], options.calls, options.workers, report))
    else:
        for number in range(options.calls):
            report(workers.Result(number, *judge(name, options.seed, number, options.device)))
    took = time.perf_counter() - start
    print(
        f"{name}: {options.calls} calls, seed {options.seed}, {took:.0f} s, errors up to {max(errors):.3g} roundings, "
        f"{len(failures)} failures",
        flush=True,
    )
    return failures


def _show(name: str, options: argparse.Namespace) -> int:
    """Describe one call, then run it."""
    faulthandler.enable(sys.__stderr__)
    print(drawn(name, options.seed, options.only, options.device).describe(), flush=True)
    faults, roundings = judge(name, options.seed, options.only, options.device)
    print(*(faults or [f"nothing is wrong: {roundings:.2g} roundings"]), sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
