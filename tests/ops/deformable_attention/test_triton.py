"""Deformable attention in Triton against its definition: on CUDA, or interpreted where there is no device."""

from __future__ import annotations

from functools import partial

import pytest

from attn_plugins.ops.deformable_attention import triton as triton_deformable
from attn_plugins.ops.deformable_attention.operands import Options, Terms
from tests.helpers.operator_checks import deterministic_mode
from tests.helpers.triton_checks import DEVICE, needs_triton
from tests.ops.contract_examples import Example
from tests.ops.test_contract import example
from tests.ops.test_contract_backends import BRAIN, HALF, SINGLE, check

pytestmark = needs_triton
CASES = {
    "two images": dict(B=2),
    "one pixel": dict(levels=((1, 1),), M=1),
    "a width of no vector": dict(d=5, K=3, M=1),
    "several blocks of queries": dict(d=70, Q=20, M=1, K=1, levels=((2, 3),)),
    "several blocks of channels": dict(d=131, M=1, Q=2, K=1),
    "nine levels": dict(levels=((2, 1),) * 5 + ((1, 3),) * 4, K=1, M=1),
    "far beside the map": dict(far=1e5, M=1),
}


def drawn(**extents) -> Example:
    return example("deformable_attention", "tiny", DEVICE, **extents)


@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case):
    check(drawn(**CASES[case]), "triton", SINGLE)


@pytest.mark.parametrize("extents, dtype", [(dict(K=4, M=1), BRAIN), (CASES["nine levels"], HALF)], ids=str)
def test_places_in_halves(extents, dtype):
    some = drawn(**extents)
    check(some._replace(tensors={n: t.to(dtype) for n, t in some.tensors.items()}), "triton", dtype)


def test_points_that_differ_by_level():
    some = drawn(levels=((2, 3), (1, 1), (3, 2)))
    value, locations, weights = some.tensors.values()
    points = dict(value=value, sampling_locations=locations.flatten(3, 4), attention_weights=weights.flatten(3))
    check(some._replace(call=partial(some.call, points=(5, 0, 1)), tensors=points), "triton", SINGLE)


# --- what serves --------------------------------------------------------------------------------------------------


def test_calls_that_triton_cannot_compute_are_refused_in_words():
    terms, options = Terms(*drawn(d=4).tensors.values()), Options([3, 4, 1, 2], [2, 2])
    cannot = triton_deformable.BACKEND.cannot
    assert cannot(terms, options) is None
    assert cannot(Terms(*(t.to("meta") for t in terms)), options).endswith("and the tensors are on meta")
    for name in Terms._fields:
        exact = terms._replace(**{name: getattr(terms, name).double()})
        assert cannot(exact, options) == "its kernels take no float64"
    many = terms.value[:, :1].expand(1, 2**28, 2, 4)
    words = "an image or a grid has 2147483648 numbers, and its kernels count to 2147483647"
    assert cannot(terms._replace(value=many), options) == words
    with deterministic_mode():
        assert triton_deformable.BACKEND.cannot_backward(terms, options) == "its backward is not deterministic"
