"""Window attention's CUDA kernels: their source, run thread by thread on the CPU, and on a GPU where there is one.

``deform_conv/test_emulation.py`` says what an emulation can know.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from attn_plugins.ops import reference
from attn_plugins.ops.common.gradients import fill
from attn_plugins.ops.window_attention import cuda
from attn_plugins.ops.window_attention.operands import Options, Terms
from tests.helpers.emulation import NEEDS, error, reserved
from tests.ops import test_saturated as saturated
from tools.emulation.build import load

pytestmark = [*NEEDS, pytest.mark.slow]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    load(Path(__file__).with_name("emulation.cpp"), tmp_path_factory.mktemp("emulation"), arch=800)
    return torch.ops.attn_plugins_emulated_window


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def compute(request, monkeypatch):
    """Window attention and its gradients, by emulated kernels or on a GPU; NaN stays where nothing is written."""
    device = "cpu" if request.param == "emulated" else "cuda"
    if device == "cpu":
        operators = request.getfixturevalue("emulated")
        monkeypatch.setattr(cuda, "forward_kernels", operators.forward_)
        monkeypatch.setattr(cuda, "backward_kernels", operators.backward_)

    def move(t):
        """With its strides, also where they are 0."""
        if t is None or device == "cpu":
            return t
        if 0 in t.stride():
            return t.to(device).expand(t.shape)
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t)

    def run(terms, geometry, grad_output, scale=0.3, needs=(True,) * 4):
        terms, grad_output = [move(t) for t in terms], move(grad_output)
        value = terms[2]
        output = value.new_full(grad_output.shape, math.nan)
        lse = value.new_full(grad_output.shape[:-1], math.nan, dtype=torch.float32)
        terms, options = Terms(*terms), geometry._replace(scale=scale)
        cuda.forward(terms, options, output, lse)
        grads = {
            name: None if t is None or not need else torch.empty_like(t).fill_(math.nan)
            for name, t, need in zip(terms._fields, terms, needs)
        }
        fill(grads, cuda.backward(grad_output, terms, options, output, lse, grads))
        return output.cpu(), [None if g is None else g.cpu() for g in grads.values()]

    return run


def problem(
    *, B=2, M=2, size=(5, 7), kernel=(3, 3), stride=(1, 1), padding=None, dilation=(1, 1), logits="both", d=16, dv=16,
    zero_border=False, seed=0,
):  # fmt: skip
    """Random terms in float64 but exact in bfloat16, geometry and a gradient of the output."""
    random = torch.Generator().manual_seed(seed)
    padding = padding or tuple(n // 2 * step for n, step in zip(kernel, dilation))
    grid = tuple(-(-n // s) for n, s in zip(size, stride))

    def draw(*shape):
        return torch.randn(B, M, *shape, generator=random, dtype=torch.float64).bfloat16().double()

    content, position = logits != "position", logits != "content"
    terms = (
        draw(*grid, d) if content else None,
        draw(*size, d) if content else None,
        draw(*size, dv),
        draw(*grid, math.prod(kernel)) if position else None,
    )
    return terms, Options(kernel, stride, padding, dilation, "zero" if zero_border else "exclude", 0.3), draw(*grid, dv)


def expected_of(terms, geometry, grad_output, scale=0.3):
    """Output, log-sum-exp and gradients of the terms (None where there is none)."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in terms]
    output = reference.window_attention(*leaves, *geometry._replace(scale=scale))
    gradients = iter(torch.autograd.grad(output, [t for t in leaves if t is not None], grad_output))
    return output.detach(), [None if t is None else next(gradients) for t in leaves]


def compare(compute, terms, geometry, grad_output, dtype=torch.float32):
    expected, gradients = expected_of(terms, geometry, grad_output)
    output, grads = compute([None if t is None else t.to(dtype) for t in terms], geometry, grad_output.to(dtype))
    assert error(output, expected) < TOLERANCE[dtype]
    for name, grad, gradient in zip(("query", "key", "value", "position_logits"), grads, gradients):
        assert (grad is None) == (gradient is None)
        if grad is not None:
            assert grad.dtype == dtype
            if gradient.any():
                assert error(grad, gradient) < TOLERANCE[dtype], name
            else:  # of a single key, where all that is left is the rounding of what cancels
                sizes = [grad_output.norm(), *(t.norm() for t in terms if t is not None)]
                assert grad.double().norm() < TOLERANCE[dtype] * torch.stack(sizes).prod(), name


CASES = {
    "two lanes": {},
    "four lanes": dict(d=32, dv=24, B=1),
    "eight lanes": dict(d=64, dv=40, B=1),
    "sixteen lanes": dict(d=96, dv=128, B=1, M=1),
    "odd widths": dict(d=19, dv=5),
    "a lone channel": dict(d=1, dv=1),
    "256 < width": dict(d=300, dv=40, B=1, M=1, size=(3, 4)),
    "widest": dict(d=512, dv=512, B=1, M=1, size=(2, 3)),
    "stride 2": dict(stride=(2, 2), size=(7, 10)),
    "dilation 2": dict(dilation=(2, 2)),
    "stride and dilation": dict(kernel=(5, 3), stride=(2, 3), padding=(4, 2), dilation=(2, 2)),
    "steps with divisors": dict(kernel=(3, 4), stride=(4, 6), dilation=(6, 4), size=(11, 13), padding=(6, 6)),
    "keys that none sees": dict(kernel=(1, 2), stride=(3, 4), padding=(0, 0), dilation=(1, 2), size=(7, 12)),
    "even kernel": dict(kernel=(2, 4), padding=(1, 3)),
    "causal sequence": dict(kernel=(1, 31), size=(1, 40), padding=(0, 30), M=1),
    "a column": dict(kernel=(3, 3), size=(19, 1), M=1),
    "larger than the map": dict(kernel=(7, 9), size=(3, 4), B=1),
    "seven by seven": dict(kernel=(7, 7), size=(9, 11), B=1, d=32, dv=32),
    "too many taps for shared memory": dict(kernel=(15, 13), size=(5, 6), B=1, M=1),
    "one key": dict(size=(1, 1)),
    "several blocks": dict(size=(19, 23), B=1, kernel=(3, 1)),
}


@pytest.mark.parametrize("zero_border", [False, True], ids=["exclude", "zero"])
@pytest.mark.parametrize("logits", ["content", "position", "both"])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(compute, case, logits, zero_border):
    compare(compute, *problem(**CASES[case], logits=logits, zero_border=zero_border))


@pytest.fixture(params=["1", "0"], ids=["tensor cores", "no tensor cores"])
def tensor_cores(request, monkeypatch):
    monkeypatch.setenv("ATTN_PLUGINS_WINDOW_TENSOR_CORES", request.param)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_half_precision(compute, case, dtype, tensor_cores):
    compare(compute, *problem(**CASES[case]), dtype)


@pytest.mark.parametrize("logits", ["content", "both"])
@pytest.mark.parametrize("zero_border", [False, True], ids=["exclude", "zero"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_general_kernels(compute, monkeypatch, case, dtype, zero_border, logits):
    """They also compute what the fast kernels do."""
    monkeypatch.setenv("ATTN_PLUGINS_WINDOW_FAST", "0")
    compare(compute, *problem(**CASES[case], logits=logits, zero_border=zero_border), dtype)


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", ["stride and dilation", "several blocks", "odd widths"])
def test_any_order_of_threads(compute, monkeypatch, case, dtype, seed):
    """Nothing is added atomically: results are the same, bit by bit."""
    terms, geometry, grad_output = problem(**CASES[case])
    arguments = [t.to(dtype) for t in terms], geometry, grad_output.to(dtype)
    expected, gradients = compute(*arguments)
    monkeypatch.setenv("EMULATOR_SEED", str(seed))
    output, grads = compute(*arguments)
    assert torch.equal(output, expected)
    assert all(torch.equal(a, b) for a, b in zip(grads, gradients))


@pytest.mark.parametrize("zero_border", [False, True], ids=["exclude", "zero"])
@pytest.mark.parametrize("logits", ["content", "position"])
@pytest.mark.parametrize("case", ["two lanes", "four lanes", "stride 2", "keys that none sees", "causal sequence"])
def test_terms_on_tensor_cores(compute, case, logits, zero_border):
    compare(compute, *problem(**CASES[case], logits=logits, zero_border=zero_border), torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("needs", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (1, 0, 0, 1)], ids=str)
def test_only_wanted_gradients(compute, needs, dtype):
    terms, geometry, grad_output = problem(B=1)
    _, gradients = expected_of(terms, geometry, grad_output)
    _, grads = compute([t.to(dtype) for t in terms], geometry, grad_output.to(dtype), needs=needs)
    for grad, gradient, need in zip(grads, gradients, needs):
        assert (grad is not None) == bool(need)
        assert grad is None or error(grad, gradient) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_views_give_what_copies_give(compute, dtype):
    """Heads of a channels-last projection, logits of planes, misaligned rows, strided channels."""
    terms, geometry, grad_output = problem(kernel=(3, 5))
    query, key, value, position = (t.to(dtype) for t in terms)
    close = {} if dtype == torch.float32 else dict(rtol=4e-3, atol=4e-3)

    def heads_last(t):
        return t.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4)

    planes = position.permute(0, 1, 4, 2, 3).contiguous().permute(0, 1, 3, 4, 2)
    misaligned = torch.zeros(key.numel() + 1, dtype=dtype)[1:].view(key.shape).copy_(key)
    strided = torch.stack((value, value), -1)[..., 0]
    grad = grad_output.to(dtype)
    expected, wanted = compute([query, key, value, position], geometry, grad)
    for views in (
        (heads_last(query), heads_last(key), heads_last(value), planes),
        (query, misaligned, strided, position),
    ):
        output, grads = compute(views, geometry, heads_last(grad))
        torch.testing.assert_close(output, expected, **close)
        for a, b in zip(grads, wanted):
            torch.testing.assert_close(a, b, **close)
    # One set of logits for all, and the gradient of a sum.
    shared = position[:1, :1]
    spread = shared.expand_as(position).contiguous()
    ones = torch.ones((), dtype=dtype).expand_as(grad)
    output, grads = compute([query, key, value, shared], geometry, ones)
    expected, wanted = compute([query, key, value, spread], geometry, ones.contiguous())
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    torch.testing.assert_close(grads[3], wanted[3].sum((0, 1), keepdim=True), **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masked_windows_and_extreme_logits(compute, dtype):
    (query, key, value, position), geometry, grad_output = problem(B=1)
    position[0, 0, 1, 2] = -math.inf
    position[0, 1, 2, :, 3] = -math.inf
    output, grads = compute([t.to(dtype) for t in (query, key, value, position)], geometry, grad_output.to(dtype))
    expected, gradients = expected_of((query, key, value, position), geometry, grad_output)
    assert error(output, expected) < TOLERANCE[dtype]
    assert not output[0, 0, 1, 2].any()
    assert not grads[3][0, 0, 1, 2].any()
    for grad, gradient in zip(grads, gradients):
        assert error(grad, gradient) < TOLERANCE[dtype]
    rising = torch.linspace(-3e4, 6e4, 9, dtype=dtype).expand(1, 1, 2, 2, 9)  # every tap is the new greatest
    one = torch.randn(1, 1, 2, 2, 8, dtype=dtype)
    output, _ = compute([None, None, one, rising], geometry, torch.randn_like(one))
    torch.testing.assert_close(output, one[:, :, 1:, 1:].expand_as(one))


@pytest.mark.parametrize("padding", [0, 1, 3, 8], ids="{} elements between rows".format)
@pytest.mark.parametrize("kernel", [(3, 3), (7, 7), (1, 4)], ids=str)
def test_position_logits_at_any_address(compute, kernel, padding):
    """Staged by vectors where neighbours follow each other, whatever the alignment; else one by one."""
    (_, _, value, position), geometry, grad_output = problem(kernel=kernel, size=(5, 9), B=1, logits="position")
    expected, gradients = expected_of((None, None, value, position), geometry, grad_output)
    for start in range(3):
        *grid, taps = position.shape
        row = grid[-1] * taps + padding
        strides = (grid[1] * grid[2] * row, grid[2] * row, row, taps, 1)
        memory = torch.full((start + strides[0] * grid[0],), math.nan, dtype=torch.float16)
        logits = memory.as_strided(position.shape, strides, start).copy_(position)
        output, grads = compute([None, None, value.half(), logits], geometry, grad_output.half())
        assert error(output, expected) < TOLERANCE[torch.float16]
        assert error(grads[2], gradients[2]) < TOLERANCE[torch.float16]
        assert error(grads[3], gradients[3]) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("bad", [math.inf, math.nan], ids=str)
@pytest.mark.parametrize("which", ["query", "key", "value", "grad_output"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_infinity_and_nan_reach_only_their_windows(compute, dtype, which, bad):
    """A weight of 0 outside of the window must not meet them."""
    for stride in ((1, 1), (2, 2)):
        terms, geometry, grad_output = problem(size=(9, 13), B=1, M=1, stride=stride)
        spoilt = dict(query=terms[0], key=terms[1], value=terms[2], grad_output=grad_output)[which]
        spoilt[0, 0, 2, 3, 5] = bad
        expected, gradients = expected_of(terms, geometry, grad_output)
        output, grads = compute([t.to(dtype) for t in terms], geometry, grad_output.to(dtype))
        for result, wanted in zip([output, *grads], [expected, *gradients]):
            finite = wanted.isfinite()
            torch.testing.assert_close(result.isfinite(), finite)
            assert error(result[finite], wanted[finite]) < TOLERANCE[dtype]


@pytest.mark.parametrize("large", [0, 1], ids=["query", "key"])
@pytest.mark.parametrize("power", [-18, 13], ids="gradients of 2^{}".format)
def test_slopes_beyond_the_range_of_half_numbers(compute, power, large):
    """Under a large loss scale, and none: products of slopes are in range, the slopes themselves are not."""
    terms, geometry, grad_output = problem(logits="content", d=32, dv=64, B=1)
    query, key, value, _ = terms
    factors = [2.0**-9, 2.0**-9] if power < 0 else [2.0**-5, 2.0**-5]
    factors[large] = 2.0**9 if power < 0 else 2.0**-5
    value = value * (1 if power < 0 else 32)
    terms = (query * factors[0], key * factors[1], value, None)
    grad_output = (grad_output * 2.0**power).half().double()
    _, gradients = expected_of(terms, geometry, grad_output)
    _, grads = compute([None if t is None else t.half() for t in terms], geometry, grad_output.half())
    assert grads[1 - large].isfinite().all()
    assert error(grads[1 - large], gradients[1 - large]) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_lowest_logits_are_not_masks(compute, dtype):
    """A window of such logits alone has equal weights, as the softmax of any constant."""
    (query, key, value, position), geometry, grad_output = problem(B=1)
    position[0, 0, 2, 3] = torch.finfo(torch.bfloat16).min
    position[0, 1, 2, 3, 1:] = torch.finfo(torch.bfloat16).min
    expected, _ = expected_of((query, key, value, position), geometry, grad_output)
    output, _ = compute([t.to(dtype) for t in (query, key, value, position)], geometry, grad_output.to(dtype))
    assert error(output, expected) < TOLERANCE[dtype]


@saturated.SIZES
@pytest.mark.parametrize("keys", [1, 2, 8, 64])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gradients_of_saturated_rows(emulated, monkeypatch, dtype, keys, size, tensor_cores):
    """Their errors are those of the definition, as of other backends; of one head of one image."""
    monkeypatch.setattr(cuda, "forward_kernels", emulated.forward_)
    monkeypatch.setattr(cuda, "backward_kernels", emulated.backward_)
    monkeypatch.setattr(cuda.library, "refusal", lambda *device: None)

    def make(draw):
        terms, options = saturated.window_attention(keys, draw)
        return {name: t[:1, :1] for name, t in terms.items()}, options

    saturated.check(saturated.window_attention, make, keys, size, dtype, "cuda", "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_queries_beyond_the_map(compute, dtype):
    """Position logits alone may have any grid of queries; a window without a key gives 0."""
    (_, _, value, _), geometry, _ = problem(B=1)
    position, grad_output = torch.randn(1, 2, 9, 12, 9), torch.randn(1, 2, 9, 12, 16)
    expected, gradients = expected_of((None, None, value, position.double()), geometry, grad_output.double())
    output, grads = compute([None, None, value.to(dtype), position.to(dtype)], geometry, grad_output.to(dtype))
    assert not output[:, :, 6:].any()
    assert error(output, expected) < TOLERANCE[dtype]
    assert error(grads[2], gradients[2]) < TOLERANCE[dtype]
    assert error(grads[3], gradients[3]) < TOLERANCE[dtype]


def test_what_the_kernels_serve(compute):
    terms, _, _ = problem(B=1)
    options = problem()[1]
    assert "float64" in cuda.refuses(Terms(*terms), options)
    assert "on cpu" in cuda.refuses(Terms(*(t.half() for t in terms)), options)
    wide = torch.zeros(1, 1, 1, 2, 513)
    assert "heads of up to 512 channels" in cuda.refuses(Terms(None, None, wide, None), options)
    with pytest.raises(RuntimeError, match="up to 512 channels"):
        compute([None, None, wide, torch.zeros(1, 1, 1, 2, 9)], problem()[1], wide)


def test_far_keys(emulated, monkeypatch):
    """Keys of more than 2^31 elements, of which few queries see few."""
    monkeypatch.setenv("EMULATOR_RACES", "0")  # whose traces would take a multiple of the memory
    size, step, d = 6000, 2999, 64
    keys = reserved(1, 1, size, size, d, dtype=torch.float16)
    random = torch.Generator().manual_seed(0)
    rows = torch.tensor([0, 1, step, step + 1, 2 * step, 2 * step + 1])
    keys[0, 0, rows, :4] = torch.randn(6, 4, d, generator=random).half()
    query = torch.randn(1, 1, 3, 3, d, generator=random).half()
    output, lse = torch.full_like(query, math.nan), torch.full((1, 1, 3, 3), math.nan)
    options = Options((2, 2), (step, 1), (0, 0), (1, 1), "exclude", 0.1)
    emulated.forward_(query, keys, keys, None, output, lse, options.numbers(), options.border, 0.1)
    pairs = keys[0, 0, rows, :4].double().view(3, 2, 4, d)
    seen = torch.stack([pairs[:, i, j : j + 3] for i in (0, 1) for j in (0, 1)], 2)
    weights = torch.einsum("yxd,yxkd->yxk", query[0, 0].double() * 0.1, seen).softmax(-1)
    assert error(output[0, 0], torch.einsum("yxk,yxkd->yxd", weights, seen)) < 1e-3


FAR = [dict(padding=(2**40, 0)), dict(stride=(2**30, 1)), dict(dilation=(2**32, 2**33)), dict(dilation=(5, 7))]


@pytest.mark.parametrize("case", FAR, ids=str)
@pytest.mark.parametrize("zero_border", [False, True], ids=["exclude", "zero"])
def test_windows_beyond_the_map(compute, case, zero_border):
    compare(compute, *problem(**case, B=1, zero_border=zero_border))
