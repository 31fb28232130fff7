"""Run mmcv's operators on this package's stand-in or on mmcv's compiled extension, in one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import mmcv.ops  # noqa: F401  imports every module that holds the extension
import pytest
import torch

from attn_plugins import mmcv_ext


@contextmanager
def extension(module: ModuleType) -> Iterator[None]:
    """Let all modules of ``mmcv.ops`` call ``module`` instead of their extension."""
    holders = [m for name, m in sys.modules.items() if name.startswith("mmcv.ops.") and hasattr(m, "ext_module")]
    before = [holder.ext_module for holder in holders]
    try:
        for holder in holders:
            holder.ext_module = module
        yield
    finally:
        for holder, former in zip(holders, before):
            holder.ext_module = former


@pytest.fixture
def stand_in() -> Iterator[None]:
    torch.manual_seed(0)
    with extension(mmcv_ext):
        yield
