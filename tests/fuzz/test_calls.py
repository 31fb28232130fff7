"""Random calls of every operator, of modules with random options and of soft non-maximum suppression for mmcv.

A valid call is compared with the reference, forward and backward; then one argument is broken, which has to raise a
ValueError or a TypeError that names it. Name, seed and number determine a call. ``make test`` runs some, ``make fuzz``
10,000 of each. A case is a hundred calls, so that pytest-xdist shares them among processes, and a crash ends one case.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import pytest

from . import attention, modules, sampling
from .draw import Draw

# cuBLAS reads it once, at its first product; without it, products raise an error in deterministic mode.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

OPERATORS = {
    "window_attention": attention.window,
    "global_attention": attention.everywhere,
    "sequence_attention": attention.sequence,
    "criss_cross_attention": attention.criss_cross,
    "deform_conv2d": sampling.convolution,
    "deformable_attention": sampling.deformable,
}
NAMES = (*OPERATORS, "modules", "mmcv_ext")
CASE = 100
START = time.monotonic()


def drawn(name: str, *number: Any) -> Any:
    """Return a call by name, seed, number and device."""
    source = Draw(name, *number)
    if name == "modules":
        return modules.ModuleCall(source)
    if name == "mmcv_ext":
        pytest.importorskip("torchvision")
        from .mmcv_ext import SoftNms

        return SoftNms(source)
    return OPERATORS[name](source).complete(source)


def judge(name: str, *number: Any) -> list[str]:
    """Draw and run a call; return its faults."""
    try:
        return drawn(name, *number).problems()
    except Exception as error:
        return [f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"]


def pytest_generate_tests(metafunc):
    option = metafunc.config.getoption
    names = NAMES if option("--device", "cpu") == "cpu" else NAMES[:-1]  # mmcv_ext: on CPUs alone
    firsts = range(0, option("--calls", 40), CASE) if option("--only", None) is None else [option("--only")]
    metafunc.parametrize("name, first", [(name, first) for name in names for first in firsts])


def test_random_calls(name, first, pytestconfig):
    option = pytestconfig.getoption
    seed, device, seconds = option("--seed", 0), option("--device", "cpu"), option("--seconds", None)
    alone = option("--only", None) is not None
    faults = []
    for number in range(first, first + 1 if alone else min(first + CASE, option("--calls", 40))):
        repeat = f"pytest tests/fuzz/test_calls.py -k {name} --seed {seed} --device {device} --only {number}"
        if pytestconfig.option.capture == "no":  # shown as it runs: it may end the process
            print(repeat, file=sys.stderr, flush=True)
        if alone:
            print(drawn(name, seed, number, device).describe())
        faults += [f"{repeat}  # {fault}" for fault in judge(name, seed, number, device)]
        if seconds is not None and time.monotonic() > START + seconds:
            break
    if faults:
        pytest.fail("\n".join(faults), pytrace=False)
