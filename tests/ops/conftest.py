"""Fixtures of the operators' tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from attn_plugins.ops.common import plans
from tests.helpers.operator_checks import deterministic_mode
from tests.ops.emulation.kernels import EMULATION, load
from tests.ops.sequence_attention.operands import taking

# cuBLAS reads it once, at its first product; without it, products raise an error in deterministic mode.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def no_plans(monkeypatch):
    """Let no test repeat what another's choices were."""
    monkeypatch.setattr(plans, "_plans", {})


@pytest.fixture
def full_float32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def deterministic():
    with deterministic_mode():
        yield


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    """Compile the operators of ``emulation/sampling.cpp`` once: a process can define its schemas only once."""
    arch = int(os.environ.get("EMULATED_ARCH", "900"))
    load(EMULATION / "sampling.cpp", tmp_path_factory.mktemp("emulation"), arch)
    return torch.ops.attn_plugins_emulated


@pytest.fixture(params=["compiled", "plain"])
def path(request) -> Iterator[str]:
    """Run the test with the compiled kernels, and with their substitute on machines without them."""
    with taking(request.param):
        yield request.param
