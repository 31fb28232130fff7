"""Deformable attention in Triton against its definition: on CUDA, or interpreted where there is no device."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_plugins.ops import backend, deformable_attention, explain
from attn_plugins.ops.common import library, triton_launch
from attn_plugins.ops.common.backends import Failure
from attn_plugins.ops.deformable_attention import triton as triton_deformable
from attn_plugins.ops.deformable_attention.deformable_attention import ATTEND
from attn_plugins.ops.deformable_attention.operands import Options, Terms
from tests.helpers.operator_checks import deterministic_mode
from tests.helpers.triton_checks import DEVICE, check, needs_triton
from tests.ops.deformable_attention.operands import operands

pytestmark = needs_triton
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
MAPS = ((3, 5), (1, 2))
INF, NAN = float("inf"), float("nan")


def make(shapes=MAPS, *, batch=1, queries=3, heads=2, d=4, K=2, dtype=SINGLE, **given) -> tuple[Terms, Options]:
    """Random terms, none of which is at a whole pixel even as rounded to ``dtype``."""
    torch.manual_seed(0)
    sizes = dict(batch=batch, queries=queries, heads=heads, d=d, K=K)
    tensors = operands(shapes, **sizes, device=DEVICE, grad=False, **given)
    return Terms(*(t.to(dtype) for t in tensors)), Options([n for shape in shapes for n in shape], [K] * len(shapes))


CASES = {
    "two images": dict(batch=2),
    "one pixel": dict(shapes=((1, 1),)),
    "a width of no vector": dict(d=5, K=3),
    "several blocks of queries": dict(d=70, queries=20, heads=1, K=1, shapes=((2, 3),)),
    "several blocks of channels": dict(d=131, heads=1, queries=2, K=1),
    "points in fours": dict(K=4, heads=1, dtype=BRAIN),
    "nine levels": dict(shapes=((2, 1),) * 5 + ((1, 3),) * 4, K=1, heads=1),
    "nine levels, half": dict(shapes=((2, 1),) * 5 + ((1, 3),) * 4, K=1, heads=1, dtype=HALF),
    "far beside the map": dict(margin=1e5),
}


@pytest.mark.parametrize("case", CASES)
def test_definition(case):
    check(ATTEND, *make(**CASES[case]))


def test_points_that_differ_by_level():
    terms, options = make(((2, 3), (1, 1), (3, 2)), K=2)
    terms = terms._replace(locations=terms.locations.flatten(3, 4), weights=terms.weights.flatten(3))
    check(ATTEND, terms, options._replace(points=[5, 0, 1]))


@pytest.mark.parametrize("missing", ["value", "locations", "weights"])
def test_gradients_that_are_not_wanted(missing):
    terms, options = make(dtype=HALF)
    needs = [name != missing for name in Terms._fields]
    grad = torch.ones_like(ATTEND.fake(terms, options)[0])
    with backend("triton"):
        grads = ATTEND._backward(grad, *terms, *options, needs)
        all_of_them = ATTEND._backward(grad, *terms, *options, [True] * 3)
    for ours, full, need in zip(grads, all_of_them, needs):
        torch.testing.assert_close(ours, full if need else full.new_empty(0))


def test_at_a_whole_pixel_the_derivative_is_that_to_its_right():
    value = torch.tensor([1.0, 3.0, 10.0, 30.0], device=DEVICE).view(1, 4, 1, 1)
    #                 on every pixel; one pixel left and one right of the map; far to the left
    x = (torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0, 4.0, -2.0], device=DEVICE) + 0.5) / 4
    places = torch.stack((x, torch.full_like(x, 0.5)), -1).view(1, 7, 1, 1, 1, 2).requires_grad_()
    with backend("triton"):
        output = deformable_attention(value, ((1, 4),), places, torch.ones_like(places[..., 0]))
        output.sum().backward()
    assert output.flatten().tolist() == [1, 3, 10, 30, 0, 0, 0]
    assert (places.grad[..., 0].flatten() / 4).tolist() == [2, 7, 20, -30, 1, 0, 0]


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_nothing_is_read_for_nan_or_beside_the_map():
    """Nor do they have gradients; a weight that is not finite multiplies 0."""
    value = torch.full((1, 4, 1, 2), INF, device=DEVICE, requires_grad=True)
    places = torch.tensor([[NAN, 0.5], [0.5, NAN], [3.0, 0.5], [INF, 0.5], [-1e30, 0.5]], device=DEVICE)
    places = places.view(1, 5, 1, 1, 1, 2).requires_grad_()
    weights = torch.ones(1, 5, 1, 1, 1, device=DEVICE, requires_grad=True)
    with backend("triton"):
        output = deformable_attention(value, ((2, 2),), places, weights)
        grads = torch.autograd.grad(output.sum(), (value, places, weights))
        infinite = deformable_attention(value, ((2, 2),), places, torch.full_like(weights, INF))
    assert not any(t.any() for t in (output, *grads))
    assert infinite.isnan().all()


def test_a_result_has_second_gradients():
    terms, options = make(heads=1, queries=2, K=1)
    leaves = [t.requires_grad_() for t in terms]
    grads = {}
    for kind in ("triton", "reference"):
        with backend(kind):
            output = deformable_attention(leaves[0], MAPS, *leaves[1:])
            first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
            grads[kind] = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    for ours, theirs in zip(grads["triton"], grads["reference"]):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


# --- what serves --------------------------------------------------------------------------------------------------


def test_refusals():
    assert [row.name for row in ATTEND.table] == ["cpu", "cuda", "triton", "eager"]
    terms, options = make()
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


@pytest.mark.skipif(torch.version.cuda is None, reason="a CPU-only torch")
def test_serves_cuda_where_no_binary_does(monkeypatch):
    missing = "there is no _C_cuda binary"
    refusal = library.refusal
    monkeypatch.setattr(
        library, "refusal", lambda device, kind: Failure(missing) if kind == "cuda" else refusal(device, kind)
    )
    monkeypatch.setattr(triton_launch, "_refusal", lambda index: None)
    with FakeTensorMode():
        value, places = torch.empty(1, 4, 2, 8, device="cuda"), torch.empty(1, 3, 2, 1, 2, 2, device="cuda")
        choice = explain(deformable_attention, value, ((2, 2),), places, places[..., 0])
        assert (choice.serves, choice.refusals["cuda"]) == ("triton", missing)
        monkeypatch.setattr(triton_launch, "_refusal", lambda index: "Triton is not installed")
        assert explain(deformable_attention, value, ((2, 2),), places, places[..., 0]).serves == "eager"
