"""Fixtures shared by the tests of this region's CUDA sources."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.ops.emulation.kernels import load


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    """Compile the operators of ``emulation.cpp`` once; a library can define its schemas only once per process."""
    arch = int(os.environ.get("EMULATED_ARCH", "900"))
    load(Path(__file__).with_name("emulation.cpp"), tmp_path_factory.mktemp("emulation"), arch)
    return torch.ops.attn_plugins_emulated
