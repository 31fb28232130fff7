"""The CUDA kernels' source, run thread by thread on the CPU; see ``tests/ops/deform_conv/test_emulation.py``."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from attn_plugins import ops
from tests.helpers.emulation import NEEDS
from tests.helpers.operator_checks import deterministic_mode
from tests.helpers.slow_cases import slow_but
from tests.ops.emulated_backend import NAME as EMULATED
from tests.ops.test_contract import BOUNDS, example
from tests.ops.test_contract_backends import check

pytestmark = NEEDS
slow = pytest.mark.slow
by = pytest.mark.parametrize("name, backend", [("deformable_attention", EMULATED)])
CASES = {
    "a vector a thread": dict(d=32),
    "a vector a thread, the last ones idle": dict(d=24),
    "several vectors a thread": dict(d=144, B=1, Q=3, M=2),
    "pairs": dict(d=6),
    "no vectors": dict(d=5),
    "one number": dict(d=1, M=1),
    "more points than a round locates": dict(K=7),
    "an odd number of points": dict(d=32, K=1, M=8),
    "one level, one pixel": dict(levels=((1, 1),), K=3),
    "more than a block": dict(levels=((3, 2),), Q=150, K=1),
    "far beside the map": dict(far=1e7),
    "no queries": dict(Q=0),
}

QUICK = [
    ("a vector a thread", torch.float32), ("several vectors a thread", torch.float16), ("pairs", torch.bfloat16),
    ("no vectors", torch.float64), ("more than a block", torch.float16),
]  # fmt: skip


@pytest.fixture(autouse=True, params=[0, 1], ids="order {}".format)
def order(request, monkeypatch):
    """Set the order of blocks and threads."""
    monkeypatch.setenv("EMULATOR_SEED", str(request.param))


@by
@pytest.mark.parametrize("case, dtype", slow_but(QUICK, [(case, dtype) for case in CASES for dtype in BOUNDS]), ids=str)
def test_equals_the_reference(name, backend, case, dtype):
    """By either kernel of the backward; the deterministic one has no float64."""
    for mode in (nullcontext, deterministic_mode)[: 1 if dtype == torch.float64 else 2]:
        with mode():
            check(example(name, dtype=dtype, **CASES[case]), backend, dtype)


@slow
@by
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_locations_and_weights_of_the_values_dtype(name, backend, dtype, strided):
    some = example(name, d=8)
    some = some._replace(tensors={n: t.to(dtype) for n, t in some.tensors.items()})
    spread = lambda call=some.call, **given: call(**{n: torch.stack((t, t), -1)[..., 0] for n, t in given.items()})  # noqa: E731
    check(some._replace(call=spread) if strided else some, backend, dtype)


@slow
@by
@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_map_that_no_point_reaches_is_not_read(name, backend, dtype):
    some = example(name, dtype=dtype, d=8)
    some.tensors["value"].fill_(float("inf"))
    some.tensors["sampling_locations"].fill_(3.0)
    leaves = some.leaves()
    with ops.backend(backend):
        output = some.call(**leaves)
        (grad,) = torch.autograd.grad(output, leaves["value"], torch.full_like(output, float("inf")))
    assert not output.any()
    assert not grad.any()
