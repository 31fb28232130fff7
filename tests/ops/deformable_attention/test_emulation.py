"""The CUDA kernels' source, run thread by thread on the CPU; see ``tests/ops/deform_conv/test_emulation.py``."""

from __future__ import annotations

import pytest
import torch

from attn_plugins.ops.deformable_attention.operands import Options, Terms
from attn_plugins.ops.deformable_attention.reference import deformable_attention as reference
from tests.helpers.emulation import NEEDS, error
from tests.ops.deform_conv.operands import same_where_finite
from tests.ops.deformable_attention.operands import SHAPES, operands

pytestmark = [*NEEDS, pytest.mark.slow]

CASES = {
    "a vector a thread": dict(d=32),
    "a vector a thread, the last ones idle": dict(d=24),
    "several vectors a thread": dict(d=144, batch=1, queries=3, heads=2),
    "pairs": dict(d=6),
    "no vectors": dict(d=5),
    "one number": dict(d=1, heads=1),
    "more points than a round locates": dict(d=4, K=7),
    "an odd number of points": dict(d=32, K=1, heads=8),
    "one level, one pixel": dict(shapes=((1, 1),), K=3),
    "more than a block": dict(shapes=((3, 2),), queries=150, K=1),
    "far beside the map": dict(margin=1e7),
    "no queries": dict(queries=0),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def problem(**case):
    """Return contiguous operands in float64 that are exact in bfloat16, and the options."""
    torch.manual_seed(0)
    shapes = case.get("shapes", SHAPES)
    value, locations, weights = operands(**case, grad=False)
    terms = Terms(value.bfloat16().double(), locations.flatten(3, 4).float().double(), weights.flatten(3))
    return terms, Options([n for shape in shapes for n in shape], [case.get("K", 2)] * len(shapes))


def in_dtype(terms, dtype):
    beside = dtype if dtype == torch.float64 else torch.float32
    return terms.value.to(dtype), terms.locations.to(beside), terms.weights.to(beside)


@pytest.fixture(autouse=True, params=[0, 1], ids="order {}".format)
def order(request, monkeypatch):
    """Set the order of blocks and threads."""
    monkeypatch.setenv("EMULATOR_SEED", str(request.param))


ALL = (0, 1, 2)
PARTS = [(case, dtype, (n,)) for case in list(CASES)[:6:2] for dtype in (torch.float32, torch.bfloat16) for n in ALL]


@pytest.mark.parametrize(
    "case, dtype, wanted", [*((case, dtype, ALL) for case in CASES for dtype in TOLERANCE), *PARTS], ids=str
)
def test_equals_the_reference(emulated, case, dtype, wanted):
    terms, options = problem(**CASES[case])
    leaves = Terms(*(t.clone().requires_grad_() for t in terms))
    output = reference(leaves, options)
    gradient = torch.randn_like(output).bfloat16().double()
    expected = torch.autograd.grad(output, leaves, gradient)
    given = in_dtype(terms, dtype)
    computed = emulated.deformable_attention(*given, *options)
    assert computed.dtype == dtype
    assert error(computed, output) < TOLERANCE[dtype]
    needs = [n in wanted for n in range(3)]
    results = emulated.deformable_attention_backward(gradient.to(dtype), *given, *options, *needs)
    for term, result, grad, needed in zip(given, results, expected, needs):
        assert result.dtype == term.dtype
        assert result.shape == (term.shape if needed else (0,))
        # Sums are in float32, whatever the dtype of the values.
        assert not needed or error(result, grad) < (1e-5 if term.dtype == torch.float32 else TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_locations_and_weights_of_the_values_dtype(emulated, dtype, strided):
    terms, options = problem(d=8)
    terms = Terms(*(t.to(dtype).double() for t in terms))
    leaves = Terms(*(t.clone().requires_grad_() for t in terms))
    output = reference(leaves, options)
    gradient = torch.randn_like(output).bfloat16().double()
    expected = torch.autograd.grad(output, leaves, gradient)
    given = [torch.stack((t, t), -1)[..., 0] if strided else t for t in (t.to(dtype) for t in terms)]
    given[1:] = (t.unflatten(3, (len(options.points), -1)) for t in given[1:])
    assert error(emulated.deformable_attention(*given, *options), output) < TOLERANCE[dtype]
    results = emulated.deformable_attention_backward(gradient.to(dtype), *given, *options, True, True, True)
    for result, grad in zip(results, expected):
        assert result.dtype == dtype
        assert error(result.view_as(grad), grad) < TOLERANCE[dtype]


def test_nan_reads_nothing(emulated):
    value = torch.full((1, 4, 1, 4), float("inf"))
    locations = torch.tensor([[float("nan"), 0.5], [0.5, float("nan")], [3.0, 0.5], [-1e30, 0.5]]).view(1, 4, 1, 1, 2)
    output = emulated.deformable_attention(value, locations, torch.ones(1, 4, 1, 1), [2, 2], [1])
    assert not output.any()


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_not_hidden(emulated, weight):
    terms, options = problem(margin=0.6)
    terms.weights[:, ::2, 1, 2] = weight
    output = emulated.deformable_attention(*terms, *options)
    assert same_where_finite(output, reference(terms, options))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("d", [4, 5, 32])
def test_infinite_pixels_spoil_their_own_samples_alone(emulated, value, d):
    """This includes the borders, where pixels inside substitute for those outside."""
    terms, options = problem(d=d, queries=20, margin=0.5)
    for pixel in (0, 6, 34, 35, 46):  # corners of the first two levels
        terms.value[0, pixel] = value
    expected = reference(terms, options)
    assert 0 < expected.isfinite().sum() < expected.numel()
    output = emulated.deformable_attention(*terms, *options)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_map_that_no_point_reaches_is_not_read(emulated, dtype):
    terms, options = problem(d=8)
    value, locations, weights = in_dtype(terms, dtype)
    value, locations = torch.full_like(value, float("inf")), torch.full_like(locations, 3.0)
    output = emulated.deformable_attention(value, locations, weights, *options)
    assert not output.any()
    arguments = (torch.full_like(output, float("inf")), value, locations, weights, *options, True, True, True)
    assert not emulated.deformable_attention_backward(*arguments)[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_misaligned_value(emulated, dtype):
    terms, options = problem(d=8)
    value, locations, weights = in_dtype(terms, dtype)
    shifted = torch.empty(value.numel() + 1, dtype=dtype)[1:].view(value.shape).copy_(value)
    outputs = [emulated.deformable_attention(source, locations, weights, *options) for source in (value, shifted)]
    assert torch.equal(*outputs)
