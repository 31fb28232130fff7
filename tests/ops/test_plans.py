"""Plans of Triton's calls: a repeated call computes what a first one does, and other arguments are other calls."""

from __future__ import annotations

import weakref

import pytest
import torch

from attn_plugins import ops
from attn_plugins.core import backends, plans
from attn_plugins.core.operator import OPERATORS as operators
from tests.helpers.triton_checks import DEVICE, needs_triton, randn
from tests.ops.test_contract_backends import IN_TRITON, check, drawn, in_triton_marks
from tools.bench.measure import served_by

pytestmark = needs_triton
SEQUENCE = (2, 1, 3)
QUICK = ["global_attention"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=in_triton_marks(n in QUICK)) for n in IN_TRITON])
def test_calls_repeat(name, monkeypatch):
    dtype = torch.float16 if name.startswith("criss_cross") else torch.float32
    some = drawn(name, "triton", DEVICE, dtype)
    operator = operators[name.split(",")[0]]
    monkeypatch.setattr(operator, "_of_state", operator.terms._fields.index("value"))  # as without a CUDA binary
    for _ in range(2):
        check(some, "triton", dtype, times=2)
        for tensor in some.floats().values():
            tensor.copy_(tensor.flip(-1))
    kept = [type(plan) for key, plan in plans._plans.items() if key[1] == operator.name]
    assert kept == [plans.Plan] * 2


def test_a_plan_is_of_one_kind_of_call():
    query, key, value = (randn(*SEQUENCE, 16, seed=seed) for seed in range(3))
    strided = randn(*SEQUENCE, 32)[..., ::2]
    calls = [
        dict(query=query, key=key, value=value),
        dict(query=query, key=key, value=value, causal=True),
        dict(query=query, key=key, value=value, scale=2.0),
        dict(query=query[:1], key=key[:1], value=value[:1]),
        dict(query=strided, key=key, value=value),
        dict(query=query.half(), key=key.half(), value=value.half()),
        dict(query=query, key=query, value=query),  # of the first kind, but one tensor in three places
    ]
    for n in [*range(len(calls))] * 3:
        with backends.backend("triton"):
            actual = ops.sequence_attention(**calls[n])
        with backends.backend("reference"):
            expected = ops.sequence_attention(**calls[n])
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


def test_calls_without_launches_hold_no_tensors():
    """While a call is recorded, none of its tensors is freed: of another backend's chunks, a few fit a device."""
    kept = []

    def chunks(x):
        total = torch.zeros_like(x)
        for _ in range(4):
            part = x * 2
            kept.append(weakref.ref(part))
            total += part
            del part
            assert kept[-1]() is None
        return total

    for _ in range(4):
        plans.replay(chunks, ("chunks",), [torch.ones(3)])


def test_what_serves_a_repeated_call_is_found():
    sequences = [randn(1, 1, 3, 4, seed=seed) for seed in range(3)]
    with backends.backend("triton"):
        for _ in range(4):
            assert served_by(lambda: ops.sequence_attention(*sequences)) == {"sequence_attention": ["triton"]}


def test_no_more_kinds_are_kept_than_there_is_room_for(monkeypatch):
    monkeypatch.setattr(plans, "MOST", 2)
    for width in (4, 5, 6):
        with backends.backend("triton"):
            ops.sequence_attention(*[randn(1, 1, 3, width)] * 3)
    assert len(plans._plans) == 1
