"""Builds a library of emulated CUDA kernels: ``cuda_emulator.h`` says what that is."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

EMULATION = Path(__file__).resolve().parent
ROOT = EMULATION.parents[2]
COMPILER = shlex.split(os.environ.get("CXX", "c++"))

# Undefined behaviour (a misaligned vector, an overflowing conversion) ends the process instead of passing unseen.
FLAGS = """-shared -fPIC -O1 -std=c++20 -fsanitize=alignment,bounds,integer-divide-by-zero,float-cast-overflow
    -fsanitize=signed-integer-overflow -fsanitize-undefined-trap-on-error -DTORCH_TARGET_VERSION=0x020a000000000000"""

NEEDS = [
    pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason="no C++ compiler"),
    pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch's stable ABI begins with 2.10"),
]


def load(source: Path, folder: Path) -> None:
    """Compile ``source`` into ``folder``, and load its operators."""
    library = folder / "emulated.so"
    site = Path(torch.__file__).parent
    folders = [EMULATION, ROOT / "csrc", site / "include"]
    command = [*COMPILER, *FLAGS.split(), *(f"-I{folder}" for folder in folders)]
    command += [str(source), "-o", str(library), f"-L{site / 'lib'}", "-ltorch_cpu"]
    subprocess.run(command, check=True)
    torch.ops.load_library(str(library))


def error(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to the expected one's."""
    return ((found.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()
