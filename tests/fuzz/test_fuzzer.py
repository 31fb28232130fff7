"""The random calls themselves: what is drawn, and faults that they find."""

from __future__ import annotations

import re
from functools import partial
from importlib import import_module

import pytest
import torch

from . import broken
from .call import bits, compare
from .test_calls import NAMES, OPERATORS, drawn, judge

CRISS_CROSS = "criss_cross_attention"


@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_determined_by_its_number(name):
    def described(seed: int, number: int) -> tuple:
        call = drawn(name, seed, number)
        return (call.describe(), *(bits(buffer).numpy().tobytes() for buffer in call.source.buffers))

    calls = {seed: [described(seed, number) for number in range(20)] for seed in (3, 4)}
    assert calls[3] == [described(3, number) for number in range(20)]
    assert len({*calls[3], *calls[4]}) == 40


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_is_drawn(operator):
    """All dtypes; strided, expanded and empty tensors; arguments absent, present, differentiated and invalid."""
    calls = [drawn(operator, 0, number) for number in range(300)]
    tensors = [tensor for call in calls for tensor in call.tensors().values()]
    assert {call.dtype() for call in calls} == {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    assert any(not tensor.is_contiguous() for tensor in tensors)
    assert any(tensor.stride(-1) > 1 for tensor in tensors if tensor.dim() and tensor.shape[-1] > 1)
    assert any(0 in tensor.stride() for tensor in tensors)
    assert any(tensor.numel() == 0 for tensor in tensors)
    assert any(buffer.isnan().any() for call in calls for buffer in call.source.buffers)
    floats = {name for call in calls for name in call.floats()}
    assert {name for call in calls for name in call.differentiated} == floats
    optional = {name for name in floats if any(call.arguments[name] is None for call in calls)}
    assert floats - optional <= {"value", "input", "offset", "weight", "sampling_locations", "attention_weights"}
    assert {name for name, _ in filter(None, map(broken.draw, calls))} == set(calls[0].arguments)


def wrong_number(true, multiply, result, *arguments):
    true(multiply, result, *arguments)
    result[-1:, -1:, -1:, -1:, -1:] += 0.5


def wrong_error(true, *terms):
    try:
        true(*terms)
    except ValueError as error:
        other = RuntimeError("INTERNAL ASSERT FAILED") if "key" in str(error) else ValueError("it does not fit")
        raise other from None


def wrong_memory(true, query, key, value, position_logits):
    true(query, key, value, position_logits)
    if value.device.type == "cpu":
        buffer = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
        buffer[buffer.isnan()] = 1


FUNCTIONAL, EAGER = (f"attn_plugins.ops.{CRISS_CROSS}.{file}" for file in (CRISS_CROSS, "eager"))
FAULTS = {
    r"(output|gradient of \w+) is \S+ at \(.*\), not \S+: \S+ roundings": (EAGER, "_mix", wrong_number),
    r"the ValueError does not name \w+: it does not fit": (FUNCTIONAL, "_check", wrong_error),
    r"RuntimeError instead of ValueError or TypeError: INTERNAL ASSERT": (FUNCTIONAL, "_check", wrong_error),
    r"with scale = .*: no error": (FUNCTIONAL, "finite", lambda true, name, value: 1.0),
    r"an argument, or memory beside it, was written to": (FUNCTIONAL, "_check", wrong_memory),
}


@pytest.mark.parametrize("words", FAULTS)
def test_a_fault_is_found(words, monkeypatch):
    file, name, wrong = FAULTS[words]
    module = import_module(file)
    monkeypatch.setattr(module, name, partial(wrong, getattr(module, name)))
    assert any(re.search(words, fault) for number in range(80) for fault in judge(CRISS_CROSS, 0, number))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_is_no_fault_and_more_is(dtype):
    exact = torch.linspace(0.5, 2, 50, dtype=torch.float64)
    plain = exact.to(dtype)
    assert compare(plain, exact, plain, dtype, 1.0) is None
    wrong = plain.clone()
    wrong[7] *= 1 + 100 * torch.finfo(dtype).eps
    assert re.match(r"is .* at \(7,\)", compare(wrong, exact, plain, dtype, 1.0))
    wrong[3] = float("nan")
    assert "1 numbers that are not finite" in compare(wrong, exact, plain, dtype, 1.0)
    assert f"is torch.float64 (50,), not {dtype} (50,)" == compare(exact, exact, plain, dtype, 1.0)
