"""The conditions of a measurement."""

from __future__ import annotations

import pytest
import torch

from attn_plugins.core import library
from tools.machine import LIMITS, instructions, machine


@pytest.mark.parametrize(
    "capability, level, limits, words",
    [
        ("AVX512", 4, {}, "AVX-512"),
        ("AVX512", None, {}, "AVX-512"),
        ("AVX2", 4, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "AVX2 (ours AVX-512, oneDNN up to AVX2)"),
        ("DEFAULT", 1, {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}, "baseline (MKL up to SSE4_2)"),
        ("SVE256", 0, {}, "SVE256 (ours baseline)"),
    ],
)
def test_instructions_of_pytorch_and_of_others_that_differ(capability, level, limits, words, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(library, "cpu_level", lambda: level)
    for variable in LIMITS.values():
        monkeypatch.delenv(variable, raising=False)
    for variable, value in limits.items():
        monkeypatch.setenv(variable, value)
    assert instructions() == words
    assert f", {words}, " in machine((), 2)["cpu"]
    assert machine(("torch",), 2)["cpu"].endswith("cores, 2 threads")
