"""What tests of emulated CUDA kernels share; see ``tools/emulation/cuda_emulator.h``.

Most of their cases are ``slow``; a few of each kernel are not, so that every run of the tests has run every kernel.
"""

from __future__ import annotations

import math
import mmap
import shutil
import sys

import pytest
import torch
from torch import Tensor

from tools.emulation.build import COMPILER

NEEDS = [
    pytest.mark.skipif(sys.platform != "linux", reason="the emulator knows Linux alone"),
    pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason="no C++ compiler"),
    pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch's stable ABI begins with 2.10"),
]


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference relative to the norm of the expected tensor."""
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def reserved(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros whose pages take memory only once they are written."""
    bytes = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(
            -1, bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        )
    except OSError as refusal:
        pytest.skip(f"the system does not reserve {bytes >> 20} MiB: {refusal}")
    return torch.frombuffer(memory, dtype=dtype).view(shape)
