"""Plans of Triton's calls: a repeated call computes what a first one does, and other arguments are other calls."""

from __future__ import annotations

import pytest
import torch

from attn_plugins import ops
from attn_plugins.ops.common import backends, plans
from attn_plugins.ops.criss_cross_attention import criss_cross_attention as criss_cross
from attn_plugins.ops.deformable_attention import deformable_attention as deformable
from attn_plugins.ops.global_attention import global_attention
from attn_plugins.ops.sequence_attention import sequence_attention
from attn_plugins.ops.window_attention import window_attention as window
from tests.helpers.triton_checks import DEVICE, check, needs_triton, randn

pytestmark = needs_triton
MAP, SEQUENCE = (1, 1, 3, 4), (2, 1, 12)
MASK = torch.arange(12).expand(2, 12) >= torch.tensor([[12], [9]])
CALLS = {
    "rows and columns": (global_attention, [(*MAP, 16)] * 3 + [(*MAP, 3), (*MAP, 4), None], (0.5,)),
    "key logits of one head": (global_attention, [(*MAP, 16)] * 3 + [None, None, (1, 1, 3, 4)], (0.5,)),
    "criss-cross": (criss_cross, [(*MAP, 16)] * 3 + [None], (0.5, True)),
    "samples": (deformable, [(2, 7, 1, 4), (2, 3, 1, 4, 2), (2, 3, 1, 4)], ((2, 3, 1, 1), (2, 2))),
    "windows": (window, [(*MAP, 8)] * 3 + [(1, 1, 3, 4, 3)], ((1, 3), (1, 1), (0, 1), (1, 1), "exclude", 0.5)),
    "band": (sequence_attention, [(*SEQUENCE, 16)] * 3 + [(*SEQUENCE, 3), SEQUENCE, None], (MASK, 0, False, 0.5)),
    "pairs": (sequence_attention, [(*SEQUENCE, 8)] * 3 + [None, None, (1, 1, 12, 12)], (None, 0, True, 1.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls_repeat(name, monkeypatch):
    module, shapes, options = CALLS[name]
    options = [option.to(DEVICE) if isinstance(option, torch.Tensor) else option for option in options]
    operator, dtype = module.ATTEND, torch.float16 if module is criss_cross else torch.float32
    place = operator.terms._fields.index("value")
    monkeypatch.setattr(operator, "_of_state", place)  # as where there is no CUDA binary
    for seed in range(2):
        terms = [shape if shape is None else randn(*shape, dtype=dtype, seed=seed) for shape in shapes]
        check(operator, operator.terms(*terms), operator.options(*options))
    kept = [
        type(plan)
        for key, plan in plans._plans.items()
        if key[:2] in (("forward", operator.name), ("backward", operator.name))
    ]
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
    assert [type(plan) for plan in plans._plans.values()] == [plans.Plan] * 6


def test_no_more_kinds_are_kept_than_there_is_room_for(monkeypatch):
    monkeypatch.setattr(plans, "MOST", 2)
    for width in (4, 5, 6):
        with backends.backend("triton"):
            ops.sequence_attention(*[randn(1, 1, 3, width)] * 3)
    assert len(plans._plans) == 1
