"""The gradient of values that deformable attention on CUDA sums in shared memory: emulated, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from attn_plugins.ops.deformable_attention.operands import Options, Terms
from attn_plugins.ops.deformable_attention.reference import deformable_attention as reference
from tests.ops.deformable_attention.operands import operands
from tests.ops.deformable_attention.test_emulation import in_dtype
from tests.ops.emulation.kernels import NEEDS, error

pytestmark = [*NEEDS, pytest.mark.slow]
SHAPES = ((11, 17), (6, 9), (1, 2))
CASES = {
    "a head a warp": dict(d=32),
    "two warps a head, the last threads idle": dict(d=40, heads=3),
    "half of the threads": dict(d=16, batch=3),
    "a head": dict(d=20, heads=1),
    "levels of unequal points": dict(d=16, points=(3, 0, 1)),
    "one pixel": dict(d=16, shapes=((1, 1),)),
    "a row": dict(d=16, shapes=((1, 40),)),
    "far beside the map": dict(d=16, margin=1e7),
    "no images": dict(d=16, batch=0),
}
LARGE, SMALL = 227 << 10, 80 << 10  # shared memory of a block: an H100's, and one with room for 18 cells


@pytest.fixture(params=[LARGE, SMALL], ids=["large windows", "small windows"], autouse=True)
def windows(request, monkeypatch):
    monkeypatch.setenv("ATTN_PLUGINS_SCATTER", "4")
    monkeypatch.setenv("EMULATOR_SHARED", str(request.param))


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def gradients(request):
    """Return a function of a problem, a dtype and the numbers of the wanted gradients that computes these."""
    emulated = request.param == "emulated"
    operators = request.getfixturevalue("emulated") if emulated else torch.ops.attn_plugins
    device = "cpu" if emulated else "cuda"

    def compute(terms, options, gradient, dtype, wanted=(0, 1, 2)):
        given = [t.to(device) for t in (gradient.to(dtype), *in_dtype(terms, dtype))]
        grads = [torch.zeros(t.shape, device=device) if n in wanted else None for n, t in enumerate(terms)]
        operators.deformable_attention_backward_(*given, *grads, *options)
        return [None if g is None else g.cpu() for g in grads]

    return compute


def problem(d, shapes=SHAPES, points=None, heads=2, batch=1, margin=0.2):
    """Return operands whose queries are the pixels, in float64 but exact in bfloat16, the options and a gradient."""
    torch.manual_seed(0)
    points = points or (2,) * len(shapes)
    pixels, L = sum(h * w for h, w in shapes), len(shapes)
    value, locations, weights = operands(
        shapes, batch=batch, queries=pixels, heads=heads, d=d, K=max(points), margin=margin, grad=False
    )
    kept = [(level, k) for level in range(L) for k in range(points[level])]
    locations = torch.stack([locations[:, :, :, level, k] for level, k in kept], 3)
    weights = torch.stack([weights[:, :, :, level, k] for level, k in kept], 3)
    terms = Terms(value.bfloat16().double(), locations.float().double(), weights.float().double())
    gradient = torch.randn(batch, pixels, heads * d).bfloat16().double()
    return terms, Options([n for shape in shapes for n in shape], list(points)), gradient


def expected_gradients(terms, options, gradient):
    leaves = Terms(*(t.clone().requires_grad_() for t in terms))
    return torch.autograd.grad(reference(leaves, options), leaves, gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(gradients, case, dtype):
    call = problem(**CASES[case])
    for result, expected in zip(gradients(*call, dtype), expected_gradients(*call)):
        assert error(result, expected) < 1e-5


def test_sums_in_another_order_than_global_memory(gradients, monkeypatch):
    """The results differ in their last bits, which shows that the windows serve."""
    call = problem(d=32)
    by_windows, *_ = gradients(*call, torch.float32)
    alone, *_ = gradients(*call, torch.float32, wanted=(0,))
    monkeypatch.setenv("ATTN_PLUGINS_SCATTER", "0")
    directly, *_ = gradients(*call, torch.float32)
    assert not torch.equal(directly, by_windows)
    assert error(alone, by_windows.double()) < 1e-6
    assert error(directly, by_windows.double()) < 1e-6


@pytest.mark.parametrize("seed", range(2, 5))
def test_any_order_of_threads(gradients, monkeypatch, seed):
    monkeypatch.setenv("EMULATOR_SEED", str(seed))
    call = problem(d=20, heads=3)
    assert error(gradients(*call, torch.float32)[0], expected_gradients(*call)[0]) < 1e-5


def test_nowhere_and_infinity(gradients):
    """A sample at NaN adds nothing; an infinite gradient reaches its own pixels alone."""
    terms, options, gradient = problem(d=16)
    terms.locations[:, ::3] = float("nan")
    gradient[:, 1::50] = float("inf")
    actual, *_ = gradients(terms, options, gradient, torch.float32)
    expected, *_ = expected_gradients(terms, options, gradient)
    finite = expected.isfinite()
    assert 0 < finite.sum() < finite.numel()
    assert torch.equal(actual.isfinite(), finite)
    assert error(actual[finite], expected[finite]) < 1e-5
