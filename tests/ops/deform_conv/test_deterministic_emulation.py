"""The deterministic backward of the CUDA kernels' source, run thread by thread on the CPU: its sums of integers.

``test_emulation.py`` compares it with the reference.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_plugins.ops import reference
from attn_plugins.ops.deform_conv import cuda
from attn_plugins.ops.deform_conv.operands import Terms
from tests.helpers.emulation import NEEDS
from tests.helpers.operator_checks import deterministic_mode, vary_with_order
from tests.helpers.slow_cases import slow_but
from tests.ops.emulated_backend import NAME as EMULATED
from tests.ops.test_contract import example, forced, results

pytestmark = NEEDS
slow = pytest.mark.slow
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ALL = (True, True, True, True)
SEVERAL_BLOCKS = dict(B=2, C=6, map=(12, 16), out=4)  # of 128 pixels, where that is asked for
SIZES = {
    "plain": dict(B=2, C=8, map=(5, 6), out=4),
    "odd": dict(B=1, C=15, map=(4, 5), out=10, groups=5, D=3),
    "many channels": dict(B=1, C=72, map=(3, 4), out=3, kernel=(1, 2)),
    "stride, groups that cut offset groups": dict(B=2, C=12, map=(7, 6), out=6, groups=3, D=2, stride=2),
    "several blocks": SEVERAL_BLOCKS,
}


class Problem:
    """Operands in float64 whose terms of the input's gradient are exact in float32: of few binary digits.

    Each gradient of a column is one of ``grad_output``'s, times a power of two.
    """

    def __init__(self, B=2, C=8, map=(5, 6), out=4, groups=1, D=1, kernel=(3, 3), stride=1, padding=1, masked=True):
        torch.manual_seed(0)
        self.stride, self.padding, self.groups, self.D = [stride] * 2, [padding] * 2, groups, D
        self.taps = math.prod(kernel)
        size = [(n + 2 * padding - k) // stride + 1 for n, k in zip(map, kernel)]
        self.samples = math.prod(size) * self.taps  # that may reach one sum
        self.input = torch.randn(B, C, *map).bfloat16().double()
        self.offset = torch.randint(-20, 21, (B, D * self.taps * 2, *size)).double() / 8
        self.mask = torch.randint(1, 256, (B, D * self.taps, *size)).double() / 256 if masked else None
        of_group = (groups, C // groups, *kernel)
        chosen = torch.randint(out // groups, of_group).unsqueeze(1)
        power = 2.0 ** torch.randint(-2, 3, of_group).unsqueeze(1).double()
        weight = torch.zeros(groups, out // groups, *of_group[1:]).double().scatter(1, chosen, power)
        self.weight = weight.flatten(0, 1)
        self.grad_output = torch.randn(B, out, *size).bfloat16().double()

    def call(self, backward, dtype=torch.float32, needs=ALL) -> tuple[Tensor, ...]:
        tensors = (self.grad_output, self.input, self.offset, self.weight, self.mask)
        tensors = (None if t is None else t.to(dtype) for t in tensors)
        return backward(*tensors, self.stride, self.padding, [1, 1], self.groups, self.D, *needs)

    def input_gradient(self) -> Tensor:
        leaf = self.input.clone().requires_grad_()
        geometry = self.stride, self.padding, [1, 1]
        output = reference.deform_conv2d(leaf, self.offset, self.weight, None, self.mask, *geometry)
        return torch.autograd.grad(output, leaf, self.grad_output)[0]

    def unit(self) -> float:
        """Return 2^(i + j - t) of ``fixed_point.cuh``."""
        grad = self.grad_output.unflatten(1, (self.groups, -1))
        columns = torch.einsum("bgohw,gock->bgckhw", grad, self.weight.flatten(2).unflatten(0, (self.groups, -1)))
        exponents = math.frexp(columns.abs().max())[1]
        if self.mask is not None:
            exponents += math.frexp(self.mask.abs().max())[1]
        return 2.0 ** (exponents - 59 + self.samples.bit_length())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "plain"])
@pytest.mark.parametrize("size", slow_but(["plain"], [n for n in SIZES if n != "several blocks"]))
def test_the_sum_is_exact_where_its_terms_are(emulated, size, masked, dtype):
    """It is rounded once, so it equals the exact sum in the input's dtype, bit for bit."""
    problem = Problem(**SIZES[size], masked=masked)
    computed, *_ = problem.call(emulated.deform_conv2d_deterministic_backward, dtype)
    assert torch.equal(computed, problem.input_gradient().float().to(dtype))


@slow
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "plain"])
@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**50])
def test_each_term_is_rounded_to_the_unit(emulated, scale, masked):
    """Each pixel gets one term, which is rounded to the unit that the largest factors and the samples determine.

    Pixels of the last row and column get halves of it, each rounded.
    """
    problem = Problem(B=2, C=8, map=(5, 7), kernel=(1, 1), padding=0, masked=masked)
    problem.offset.zero_()
    problem.weight = torch.eye(8).double().view(8, 8, 1, 1)
    problem.grad_output = torch.randn_like(problem.input).float().double() * 2.0**-30 * scale
    problem.grad_output[1, 3, 2, 2] = 2.0**10 * scale  # one of them; 35 samples leave 53 binary digits below it
    computed, *_ = problem.call(emulated.deform_conv2d_deterministic_backward)
    unit = problem.unit()
    terms = (problem.grad_output if problem.mask is None else problem.grad_output * problem.mask).float().double()
    inside, expected = computed[..., :-1, :-1], ((terms / unit).round() * unit).float()[..., :-1, :-1]
    assert torch.equal(inside, expected)
    assert not torch.equal(inside.double(), terms[..., :-1, :-1])


@slow
@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**50])
@pytest.mark.parametrize("term", ["mask", "gradient"])
@pytest.mark.parametrize("pixels", [None, "128"])
def test_error_bound(emulated, term, scale, pixels, monkeypatch):
    """Beside one that is 2^40 times as large, factors err as the comment of fixed_point.cuh says, and measurably."""
    if pixels:  # blocks of fewer samples, then of a few more roundings to float32
        monkeypatch.setenv("ATTN_PLUGINS_BLOCK_PIXELS", pixels)
    problem = Problem(**SEVERAL_BLOCKS)
    outlier = problem.mask if term == "mask" else problem.grad_output
    outlier *= scale
    outlier[0, 0, 0] *= 2.0**40
    expected = problem.input_gradient()
    computed, *_ = problem.call(emulated.deform_conv2d_deterministic_backward)
    wrong = (computed.double() - expected).abs()
    # At most four terms a sample, half a unit each.
    bound = 2 * problem.samples * problem.unit() + expected.abs() * 2.0 ** (-22 if pixels else -24)
    assert (wrong <= bound).all()
    assert (wrong > expected.abs() * 2.0**-22).any()


@pytest.mark.parametrize("backend", [EMULATED])
@pytest.mark.parametrize(
    "name, blocks, dtype",
    slow_but([("deform_conv1d", "128", torch.float32)],
             [(name, blocks, dtype) for name in ("deform_conv2d", "deform_conv1d") for blocks in (None, "128")
              for dtype in DTYPES]),
    ids=str,
)  # fmt: skip
def test_any_order_gives_the_same_bits_in_deterministic_mode(name, backend, dtype, blocks, monkeypatch):
    if blocks:
        monkeypatch.setenv("ATTN_PLUGINS_BLOCK_PIXELS", blocks)
    extents = dict(map=(12, 16)) if name.endswith("2d") else dict(L=160)
    some = example(name, dtype=dtype, **extents)

    def run() -> dict[str, Tensor]:
        with forced(backend):
            return results(some)

    with deterministic_mode():
        assert not vary_with_order(run, monkeypatch)
    varying = vary_with_order(run, monkeypatch)  # floats are added in another order
    assert varying == ["input"] if dtype == torch.float32 else varying in ([], ["input"])  # no other sum is of atomics


@slow
@pytest.mark.parametrize("spoilt", ["mask", "gradient", "both"])
@pytest.mark.parametrize("size", ["plain", "odd"])
def test_numbers_that_are_not_finite_come_out(emulated, size, spoilt):
    """They come out in the same places as from sums of floats, and the other sums keep their precision."""
    problem = Problem(**SIZES[size])
    bad = torch.tensor([math.inf, -math.inf, math.nan]).double()
    if spoilt != "gradient":
        problem.mask[0, 2, 0, 1:4] = bad
    if spoilt != "mask":
        problem.grad_output[0, 1, 2, 1:4] = bad
    actual = problem.call(emulated.deform_conv2d_deterministic_backward)
    for result, expected in zip(actual, problem.call(emulated.deform_conv2d_backward)):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert actual[0].isfinite().any()
    assert not actual[0].isfinite().all()
    if spoilt == "both":
        assert (actual[0].abs() == math.inf).any()
        assert actual[0].isnan().any()


@slow
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "plain"])
def test_the_largest_sum_does_not_overflow(emulated, masked, sign):
    """Every sample reads one pixel, with factors just below a power of two, of which there are as many as fit."""
    problem = Problem(B=1, C=4, map=(1, 1), padding=8, masked=masked)
    offset, places = problem.offset.view(3, 3, 2, 15, 15), torch.arange(15).double() - 8  # of 3 x 3 taps
    for tap in range(3):
        offset[tap, :, 0] = -(places + tap).unsqueeze(1)
        offset[:, tap, 1] = -(places + tap)
    assert problem.samples == 2025
    problem.weight = (problem.weight != 0).double()
    if masked:
        problem.mask.fill_(1 - 2.0**-10)
    problem.grad_output.fill_(sign * (1 - 2.0**-8))
    computed, *_ = problem.call(emulated.deform_conv2d_deterministic_backward)
    assert torch.equal(computed, problem.input_gradient().float())


@pytest.mark.parametrize("zero", ["mask", "gradient"])
def test_zero_factors_give_zero_gradients(emulated, zero):
    """Zeros have no exponent."""
    problem = Problem()
    (problem.mask if zero == "mask" else problem.grad_output).zero_()
    assert not problem.call(emulated.deform_conv2d_deterministic_backward)[0].any()


@slow
@pytest.mark.parametrize("layout", ["a mask with strides", "channels last"])
def test_layouts(emulated, layout):
    problem = Problem(**SIZES["plain"])
    expected = problem.call(emulated.deform_conv2d_deterministic_backward)
    if layout == "channels last":
        problem.input = problem.input.to(memory_format=torch.channels_last)
    else:  # whose memory also holds numbers that are not its own
        mask = problem.mask.float()
        problem.mask = torch.stack((mask, torch.full_like(mask, 2.0**100)), -1)[..., 0]
    for result, wanted in zip(problem.call(emulated.deform_conv2d_deterministic_backward), expected):
        assert torch.equal(result, wanted)


@pytest.mark.parametrize("needed", range(4), ids=["input", "samples", "weight", "bias"])
def test_gradients_not_needed_are_empty(emulated, needed):
    problem = Problem(**SIZES["plain"])
    needs = [n == needed for n in range(4)]
    every = problem.call(emulated.deform_conv2d_deterministic_backward)
    some = problem.call(emulated.deform_conv2d_deterministic_backward, needs=needs)
    wanted = {0: (0,), 1: (1, 3), 2: (2,), 3: (4,)}[needed]
    for n, result in enumerate(some):
        expected = every[n] if n in wanted else result.new_empty(0)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)  # channels are summed in another order


def test_float64_is_refused(emulated):
    with pytest.raises(RuntimeError, match="takes no float64"):
        Problem().call(emulated.deform_conv2d_deterministic_backward, torch.float64)


def test_the_mode_refuses_float64_alone(monkeypatch):
    problem = Problem()
    terms = Terms(problem.input, problem.offset, problem.weight, None, problem.mask)
    assert cuda.BACKEND.cannot_backward(terms, None) is None
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert cuda.BACKEND.cannot_backward(terms, None) == "its backward is not deterministic in float64"
    terms = Terms(*(None if t is None else t.float() for t in terms))
    assert cuda.BACKEND.cannot_backward(terms, None) is None
