"""The deformable operators as devices of capability 8.0 run them: sums in global memory take one number at a time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = (
    "test_any_order_of_threads", "test_channels_last_and_strided", "test_infinite", "test_misaligned",
    "test_sums_in_another_order", "test_writes_only_what_is_needed", "test_planes_however_they_are_cut",
)  # fmt: skip


@pytest.mark.slow
def test_capability_8_0():
    """In a process of its own, since a process can load the emulated operators of one capability alone."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *emulations()]
    command += ["-k", " or ".join(TESTS)]
    environment = os.environ | {"EMULATED_ARCH": "800"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 40


def emulations() -> list[str]:
    """Return the other files of tests that use the emulator."""
    return sorted(
        str(file) for file in Path(__file__).parents[1].glob("deform*/test_*emulation.py") if file != Path(__file__)
    )
