"""Deformable attention in Triton against its definition: on CUDA, or interpreted where there is no device."""

from __future__ import annotations

import pytest
import torch

from attn_plugins.ops import backend
from attn_plugins.ops.deformable_attention import triton as triton_deformable
from attn_plugins.ops.deformable_attention.deformable_attention import ATTEND
from attn_plugins.ops.deformable_attention.operands import Options, Terms
from tests.helpers.operator_checks import deterministic_mode
from tests.helpers.triton_checks import DEVICE, check, needs_triton
from tests.ops.test_contract import example
from tests.ops.test_contract_backends import check as by_triton

pytestmark = needs_triton
HALF, BRAIN = torch.float16, torch.bfloat16
CASES = {
    "two images": dict(B=2),
    "one pixel": dict(levels=((1, 1),)),
    "a width of no vector": dict(d=5, K=3),
    "several blocks of queries": dict(d=70, Q=20, M=1, K=1, levels=((2, 3),)),
    "several blocks of channels": dict(d=131, M=1, Q=2, K=1),
    "nine levels": dict(levels=((2, 1),) * 5 + ((1, 3),) * 4, K=1, M=1),
    "far beside the map": dict(far=1e5),
}
MAPS = ((3, 4), (1, 2))


def make(**extents) -> Terms:
    return Terms(*example("deformable_attention", "tiny", DEVICE, **extents).tensors.values())


@pytest.mark.parametrize("case", CASES)
def test_definition(case):
    by_triton(example("deformable_attention", "tiny", DEVICE, **CASES[case]), "triton", torch.float32)


@pytest.mark.parametrize("case, dtype", [("points in fours", BRAIN), ("nine levels", HALF)], ids=str)
def test_places_in_halves(case, dtype):
    extents = CASES.get(case, dict(K=4, M=1))
    levels = extents.get("levels", MAPS)
    options = Options([n for level in levels for n in level], [extents["K"]] * len(levels))
    check(ATTEND, Terms(*(t.to(dtype) for t in make(**extents))), options)


def test_points_that_differ_by_level():
    terms = make(levels=((2, 3), (1, 1), (3, 2)))
    terms = terms._replace(locations=terms.locations.flatten(3, 4), weights=terms.weights.flatten(3))
    check(ATTEND, terms, Options([2, 3, 1, 1, 3, 2], [5, 0, 1]))


# --- what serves --------------------------------------------------------------------------------------------------


def test_refusals():
    assert [row.name for row in ATTEND.table] == ["cpu", "cuda", "triton", "eager"]
    terms, options = make(d=4), Options([3, 4, 1, 2], [2, 2])
    refuses = triton_deformable.BACKEND.refuses
    if DEVICE == "cpu":
        assert refuses(terms, options) == "its kernels are for CUDA, and the tensors are on cpu"
    with backend("triton"):
        assert refuses(terms, options) is None
        for name in Terms._fields:
            exact = terms._replace(**{name: getattr(terms, name).double()})
            assert refuses(exact, options) == "its kernels take no float64"
        many = terms.value[:, :1].expand(1, 2**28, 2, 4)
        words = "an image or a grid has 2147483648 numbers, and its kernels count to 2147483647"
        assert refuses(terms._replace(value=many), options) == words
        with deterministic_mode():
            assert triton_deformable.BACKEND.refuses_backward(terms, options) == "its backward is not deterministic"
