"""The deterministic backward of the CUDA kernels' source, run thread by thread on the CPU: its sums of integers.

``test_emulation.py`` compares it with the reference.
"""

from __future__ import annotations

import math

import pytest
import torch

from attn_plugins.ops.deformable_attention import cuda
from attn_plugins.ops.deformable_attention.operands import Options, Terms
from attn_plugins.ops.deformable_attention.reference import deformable_attention as reference
from tests.helpers.emulation import NEEDS
from tests.helpers.operator_checks import deterministic_mode, vary_with_order
from tests.ops.emulated_backend import NAME as EMULATED
from tests.ops.test_contract import example, forced, results

pytestmark = NEEDS
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def in_dtype(terms, dtype):
    return terms.value.to(dtype), terms.locations.float(), terms.weights.float()


def by_kernel(kernel, terms, options, grad_output, dtype=torch.float32):
    return kernel(grad_output.to(dtype), *in_dtype(terms, dtype), *options, True, True, True)


def by_definition(terms, options, grad_output):
    """Return the gradient of the value."""
    leaves = Terms(*(t.clone().requires_grad_() for t in terms))
    return torch.autograd.grad(reference(leaves, options), leaves, grad_output)[0]


def exact_problem(queries=24, shapes=((8, 4), (2, 2)), K=4, d=8, heads=2):
    """Return operands in float64 whose terms of the value's gradient are exact in float32: of few binary digits."""
    torch.manual_seed(0)
    sizes = torch.tensor([(w, h) for h, w in shapes]).double().view(-1, 1, 2)  # powers of two
    pixels = torch.randint(-6, 40, (1, queries, heads, len(shapes), K, 2)).double() / 8 % (sizes + 1) - 0.5
    weights = torch.randint(1, 256, (1, queries, heads, len(shapes) * K)).double() / 256
    value = torch.randn(1, sum(h * w for h, w in shapes), heads, d).bfloat16().double()
    gradient = torch.randn(1, queries, heads * d).bfloat16().double()
    terms = Terms(value, ((pixels + 0.5) / sizes).flatten(3, 4), weights)
    return terms, Options([n for shape in shapes for n in shape], [K] * len(shapes)), gradient


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_is_exact_where_its_terms_are(emulated, dtype):
    """It is rounded once, so it equals the exact sum in the value's dtype, bit for bit."""
    problem = exact_problem()
    result, *_ = by_kernel(emulated.deformable_attention_deterministic_backward, *problem, dtype)
    assert torch.equal(result, by_definition(*problem).float().to(dtype))


@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 2.0**70])
@pytest.mark.parametrize("term", ["weights", "gradient"])
def test_error_bound(emulated, term, scale):
    """Beside one that is 2^40 times as large, factors err as the comment of fixed_point.cuh says, and measurably."""
    terms, options, grad_output = exact_problem()
    outlier = terms.weights if term == "weights" else grad_output
    outlier *= scale
    outlier[0, 0, 0] *= 2.0**40
    expected = by_definition(terms, options, grad_output)
    computed, *_ = by_kernel(emulated.deformable_attention_deterministic_backward, terms, options, grad_output)
    samples = terms.weights.shape[1] * max(options.points)
    exponents = sum(math.frexp(factor.abs().max())[1] for factor in (terms.weights, grad_output))  # i + j
    unit = 2.0 ** (exponents - 59 + samples.bit_length())
    wrong = (computed.double() - expected).abs()
    bound = 2 * samples * unit + expected.abs() * 2.0**-24  # at most four terms a sample, half a unit each
    assert (wrong <= bound).all()
    assert (wrong > expected.abs() * 2.0**-22).any()


@pytest.mark.parametrize("name, backend", [("deformable_attention", EMULATED)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_order_gives_the_same_bits_in_deterministic_mode(name, backend, dtype, monkeypatch):
    some = example(name, dtype=dtype, d=32, Q=60, levels=((3, 2),), K=4, M=1)

    def run() -> dict[str, torch.Tensor]:
        with forced(backend):
            return results(some)

    with deterministic_mode():
        assert not vary_with_order(run, monkeypatch)
    assert "value" in vary_with_order(run, monkeypatch) or dtype != torch.float32  # floats added in another order


@pytest.mark.parametrize("spoilt", ["weights", "gradient", "both"])
@pytest.mark.parametrize("d", [8, 5])
def test_numbers_that_are_not_finite_come_out(emulated, d, spoilt):
    """They come out in the same places as from sums of floats, and the other sums keep their precision."""
    terms, options, grad_output = exact_problem(d=d)
    bad = torch.tensor([math.inf, -math.inf, math.nan]).double()
    if spoilt != "gradient":
        terms.weights[0, ::9, 1, 2] = bad
    if spoilt != "weights":
        grad_output[0, 1::9, 3] = bad
        grad_output[0, ::5, 1] = math.inf
    problem = terms, options, grad_output
    results = by_kernel(emulated.deformable_attention_deterministic_backward, *problem)
    for result, expected in zip(results, by_kernel(emulated.deformable_attention_backward, *problem)):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert results[0].isfinite().any()
    assert not results[0].isfinite().all()
    if spoilt == "both":
        assert (results[0] == math.inf).any()
        assert results[0].isnan().any()


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sum_does_not_overflow(emulated, sign):
    """Every sample reads one pixel, with factors just below a power of two, of which there are as many as fit."""
    terms, options, grad_output = exact_problem(queries=255, shapes=((1, 1),), K=1, d=4, heads=1)
    terms = terms._replace(locations=torch.full_like(terms.locations, 0.5), weights=terms.weights * 0 + 1 - 2.0**-10)
    grad_output = torch.full_like(grad_output, sign * (1 - 2.0**-8))
    computed, *_ = by_kernel(emulated.deformable_attention_deterministic_backward, terms, options, grad_output)
    assert torch.equal(computed, by_definition(terms, options, grad_output).float())


@pytest.mark.parametrize("filled", [0.0, 1.0])
def test_zero_factors_give_zero_gradients(emulated, filled):
    """Zeros have no exponent."""
    terms, options, grad_output = exact_problem()
    terms = terms._replace(weights=torch.full_like(terms.weights, filled))
    grad_output = torch.full_like(grad_output, 1 - filled)
    computed, *_ = by_kernel(emulated.deformable_attention_deterministic_backward, terms, options, grad_output)
    assert not computed.any()


def test_float64_is_refused(emulated):
    terms, options, grad_output = exact_problem()
    with pytest.raises(RuntimeError, match="takes no float64"):
        emulated.deformable_attention_deterministic_backward(grad_output, *terms, *options, True, True, True)


def test_the_mode_refuses_float64_alone(monkeypatch):
    terms, options, _ = exact_problem()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert cuda.BACKEND.cannot_backward(terms, options) == "its backward is not deterministic in float64"
    assert cuda.BACKEND.cannot_backward(Terms(*in_dtype(terms, torch.float32)), options) is None
