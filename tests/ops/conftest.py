"""Fixtures of the operators' tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attn_plugins.core import plans
from tests.ops.emulated_backend import NAME as EMULATED
from tests.ops.emulated_backend import emulated_by
from tools.emulation.build import EMULATION, load

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


def level(session: pytest.Session) -> int:
    """Return the level of optimization that pays for the selected tests: large emulations are ``slow``."""
    return int(any(item.get_closest_marker("slow") for item in session.items))


@pytest.fixture(scope="session")
def emulated(request):
    """Load the sampling operators' kernels once: a process can define their schemas only once."""
    load(EMULATION / "sampling.cpp", int(os.environ.get("EMULATED_ARCH", "900")), level(request.session))
    return torch.ops.attn_plugins_emulated


@pytest.fixture(scope="session")
def emulated_windows(request):
    load(Path(__file__).parent / "window_attention/emulation.cpp", 800, level(request.session))
    return torch.ops.attn_plugins_emulated_window


@pytest.fixture(autouse=True)
def emulated_backend(request) -> Iterator[None]:
    """Give a case of the backend "emulated" that backend, for the operator whose example its ``name`` is."""
    case = getattr(request.node, "callspec", None)
    if case is None or case.params.get("backend") != EMULATED:
        yield
        return
    operator = case.params["name"].split(",")[0].replace("1d", "2d")
    kernels = request.getfixturevalue("emulated_windows" if operator == "window_attention" else "emulated")
    with emulated_by(operator, kernels):
        yield
