"""The deformable operators as devices of capability 8.0 run them: sums in global memory take one number at a time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

OPS = Path(__file__).parents[1]
TESTS = (
    "test_any_order_of_threads or test_channels_last_and_strided or test_infinite or test_writes_only_what_is_needed"
    " or test_planes_however_they_are_cut or (emulated and deform and (test_only_wanted_gradients or test_views))"
)


@pytest.mark.slow
def test_capability_8_0():
    """In a process of its own, since a process can load the emulated operators of one capability alone."""
    files = [*OPS.glob("deform*/test_*emulation.py"), OPS / "test_contract_backends.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", TESTS]
    command += [str(file) for file in files if file != Path(__file__)]
    environment = os.environ | {"EMULATED_ARCH": "800"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 40
