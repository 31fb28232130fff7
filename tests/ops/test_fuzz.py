"""Some of the fuzzer's calls (``make fuzz`` runs 10,000 per operator), also in deterministic mode."""

from __future__ import annotations

import pytest
import torch

from tools.fuzz import check
from tools.fuzz.operators import NAMES, OPERATORS, judge, legal_call


@pytest.mark.parametrize("operator", NAMES)
def test_random_calls_of_all_dtypes(operator):
    faults = [
        f"python -m tools.fuzz {operator} --only {number}: {fault}"
        for number in range(80)
        for fault in judge(operator, 0, number)[0]
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("operator", OPERATORS)
def test_random_calls_of_all_dtypes_are_deterministic(operator, deterministic):
    """No operator refuses, and two runs give identical bits."""
    for number in range(80, 140):
        call = legal_call(operator, 0, number)
        first, second = (check.compute(call) for _ in range(2))
        for name, tensor in first.items():
            assert tensor.dtype == call.dtype()
            same = torch.equal(bits(tensor), bits(second[name]))
            assert same, f"{name} differs between two runs of\n{call.describe()}"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
