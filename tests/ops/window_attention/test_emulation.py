"""Window attention's CUDA kernels: their source, run thread by thread on the CPU, and on a GPU where there is one.

``deform_conv/test_emulation.py`` says what an emulation can know, and ``test_contract_backends.py`` asks the rest.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from attn_plugins.ops.window_attention import cuda
from attn_plugins.ops.window_attention.operands import Options, Terms
from tests.helpers.emulation import NEEDS, error, reserved
from tests.helpers.operator_checks import deterministic_mode
from tests.helpers.slow_cases import slow_but
from tests.ops import test_saturated as saturated
from tests.ops.contract_examples import EXAMPLES, Example
from tests.ops.emulated_backend import NAME as EMULATED
from tests.ops.test_contract import BOUNDS, FIRST, assert_close, differentiate, example, forced, results
from tests.ops.test_contract_backends import check

pytestmark = NEEDS
slow = pytest.mark.slow
BOTH, CONTENT, POSITION = (n for n in EXAMPLES if n.startswith("window_attention") and "inside" not in n)
SINGLE, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
by = pytest.mark.parametrize(
    "name, backend, device", [(BOTH, EMULATED, "cpu"), pytest.param(BOTH, FIRST, "cuda", marks=pytest.mark.cuda)]
)
dtypes = pytest.mark.parametrize("dtype", [SINGLE, HALF, BRAIN], ids=str)
CASES = {
    "two lanes": dict(d=16, dv=16),
    "four lanes": dict(d=32, dv=24, B=1),
    "eight lanes": dict(d=64, dv=40, B=1),
    "sixteen lanes": dict(d=96, dv=128, B=1, M=1),
    "odd widths": dict(d=19, dv=5),
    "a lone channel": dict(d=1, dv=1),
    "256 < width": dict(d=300, dv=40, B=1, M=1, map=(3, 4)),
    "widest": dict(d=512, dv=512, B=1, M=1, map=(2, 3)),
    "stride 2": dict(stride=(2, 2), map=(7, 10)),
    "dilation 2": dict(dilation=(2, 2)),
    "stride and dilation": dict(kernel=(5, 3), stride=(2, 3), padding=(4, 2), dilation=(2, 2)),
    "steps with divisors": dict(kernel=(3, 4), stride=(4, 6), dilation=(6, 4), map=(11, 13), padding=(6, 6)),
    "keys that none sees": dict(kernel=(1, 2), stride=(3, 4), padding=(0, 0), dilation=(1, 2), map=(7, 12)),
    "even kernel": dict(kernel=(2, 4), padding=(1, 3)),
    "causal sequence": dict(kernel=(1, 31), map=(1, 40), padding=(0, 30), M=1),
    "a column": dict(map=(19, 1), M=1),
    "larger than the map": dict(kernel=(7, 9), map=(3, 4), B=1),
    "seven by seven": dict(kernel=(7, 7), map=(9, 11), B=1, d=32, dv=32),
    "too many taps for shared memory": dict(kernel=(15, 13), map=(5, 6), B=1, M=1),
    "one key": dict(map=(1, 1)),
    "several blocks": dict(map=(19, 23), B=1, kernel=(3, 1)),
    **{f"far {name} {n}": {name: n} for name, n in (("padding", (2**31 - 1, 0)), ("stride", (2**30, 1)),
                                                    ("dilation", (2**30, 2**30)), ("dilation", (5, 7)))},
}  # fmt: skip
SWITCHES = {
    "tensor cores": {},
    "no tensor cores": dict(ATTN_PLUGINS_WINDOW_TENSOR_CORES="0"),
    "general kernels": dict(ATTN_PLUGINS_WINDOW_FAST="0"),  # which also compute what the fast ones do
}


SWITCHED = [(dtype, name) for dtype in (SINGLE, HALF, BRAIN) for name in SWITCHES
            if dtype != SINGLE or name != "no tensor cores"]  # float32 uses none  # fmt: skip
# Every kernel: those of tensor cores, of teams of threads, and the general ones, which strides need as well.
QUICK = [
    ("two lanes", "exclude", HALF, "tensor cores"), ("odd widths", "zero", BRAIN, "tensor cores"),
    ("two lanes", "zero", SINGLE, "tensor cores"), ("odd widths", "exclude", HALF, "no tensor cores"),
    ("odd widths", "exclude", SINGLE, "general kernels"), ("stride and dilation", "zero", BRAIN, "tensor cores"),
]  # fmt: skip


@pytest.fixture
def switch(request, monkeypatch) -> str:
    for name, value in SWITCHES[request.param].items():
        monkeypatch.setenv(name, value)
    return request.param


def drawn(
    name: str, device="cpu", dtype=SINGLE, *, padding=None, dilation=(1, 1), border="exclude", **sizes
) -> Example:
    """Return an example of two heads of width 16 unless ``sizes`` say otherwise, with windows centred by default."""
    sizes = dict(M=2, d=16, dv=16, kernel=(3, 3)) | sizes
    centred = tuple(n // 2 * step for n, step in zip(sizes["kernel"], dilation))
    options = dict(padding=padding or centred, dilation=dilation, border=border)
    some = example(name, "small", device, dtype, options=options, **sizes)
    return some._replace(call=partial(some.call, scale=sizes["d"] ** -0.5))


def by_definition(some: Example) -> dict[str, torch.Tensor]:
    """Return output and gradients in float64."""
    with forced("reference"):
        return results(some._replace(tensors={n: t.cpu().double() for n, t in some.tensors.items()}))


@by
@pytest.mark.parametrize(
    "case, border, dtype, switch",
    slow_but(QUICK, [(case, border, *some) for case in CASES for border in ("exclude", "zero") for some in SWITCHED]),
    indirect=["switch"], ids=str,
)  # fmt: skip
def test_equals_the_reference(name, backend, device, case, border, dtype, switch):
    """With NaN where nothing is written."""
    for terms in (BOTH, CONTENT, POSITION):
        some = drawn(terms, device, dtype, border=border, **CASES[case])
        with deterministic_mode():
            check(some, backend, dtype)


@by
@pytest.mark.parametrize(
    "case, dtype, seed",
    slow_but([("odd widths", HALF, 1)],
             [(case, dtype, seed) for case in ("stride and dilation", "several blocks", "odd widths")
              for dtype in (SINGLE, HALF, BRAIN) for seed in range(1, 4)]),
    ids=str,
)  # fmt: skip
def test_any_order_of_threads(name, backend, device, case, dtype, seed, monkeypatch):
    """Nothing is added atomically: results are the same, bit by bit."""
    some = drawn(name, device, dtype, **CASES[case])
    with forced(backend):
        expected = results(some)
        monkeypatch.setenv("EMULATOR_SEED", str(seed))
        assert all(torch.equal(result, expected[n]) for n, result in results(some).items())


@slow
@by
@pytest.mark.parametrize("gap", [0, 1, 3, 8], ids="{} elements between rows".format)
@pytest.mark.parametrize("kernel", [(3, 3), (7, 7), (1, 4)], ids=str)
def test_position_logits_at_any_address(name, backend, device, kernel, gap):
    """Staged by vectors where neighbors follow each other, whatever the alignment; else one by one."""
    padding = kernel[0] // 2, kernel[1] // 2
    some = drawn(POSITION, device, HALF, kernel=kernel, padding=padding, map=(5, 9), B=1)
    expected = by_definition(some)
    value, logits = some.tensors["value"], some.tensors["position_logits"]
    *grid, taps = logits.shape
    row = grid[-1] * taps + gap
    strides = (grid[1] * grid[2] * row, grid[2] * row, row, taps, 1)
    for start in range(3):
        memory = torch.full((start + strides[0] * grid[0],), math.nan, dtype=HALF, device=device)
        apart = memory.as_strided(logits.shape, strides, start).copy_(logits)
        with forced(backend):
            actual = differentiate(
                some.call, dict(value=value.requires_grad_(), position_logits=apart.requires_grad_())
            )
        assert_close(actual, expected, BOUNDS[HALF])


@slow
@by
@dtypes
@pytest.mark.parametrize("bad", [math.inf, math.nan], ids=str)
@pytest.mark.parametrize("which", ["query", "key", "value", "gradient"])
def test_infinity_and_nan_reach_only_their_windows(name, backend, device, dtype, which, bad):
    """A weight of 0 outside of the window must not meet them."""
    for stride in ((1, 1), (2, 2)):
        some = drawn(name, device, dtype, map=(9, 13), B=1, M=1, stride=stride)
        factor = torch.ones_like(some.call(**some.tensors))
        some.tensors.get(which, factor)[0, 0, 2, 3, 5] = bad
        some = some._replace(call=lambda call=some.call, by=factor, **tensors: (out := call(**tensors)) * by.to(out))
        with forced(backend):
            actual = results(some)
        for n, wanted in by_definition(some).items():
            finite = wanted.isfinite()
            assert torch.equal(actual[n].cpu().isfinite(), finite)
            assert error(actual[n].cpu()[finite], wanted[finite]) < BOUNDS[dtype]


@slow
@by
@pytest.mark.parametrize("large", ["query", "key"])
@pytest.mark.parametrize("power", [-18, 13], ids="gradients of 2^{}".format)
def test_slopes_beyond_the_range_of_half_numbers(name, backend, device, power, large):
    """Under a large loss scale, and none: products of slopes are in range, the slopes themselves are not."""
    some = drawn(CONTENT, device, HALF, d=32, dv=64, B=1)
    for n in ("query", "key"):
        some.tensors[n] *= (2.0**9 if power < 0 else 2.0**-5) if n == large else 2.0 ** (-9 if power < 0 else -5)
    some.tensors["value"] *= 1 if power < 0 else 8
    other, random = "key" if large == "query" else "query", torch.Generator().manual_seed(1)
    slopes = (torch.randn(some.call(**some.tensors).shape, generator=random) * 2.0**power).half()

    def gradient(by: str | None, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        leaf = tensors[other].detach().requires_grad_()
        with forced(by):
            return torch.autograd.grad(some.call(**{**tensors, other: leaf}), leaf, slopes.to(leaf))[0].cpu()

    exact = gradient("reference", {n: t.cpu().double() for n, t in some.tensors.items()})
    assert error(gradient(backend, some.tensors), exact) < BOUNDS[HALF]


@slow
@by
@pytest.mark.parametrize("dtype", [SINGLE, BRAIN], ids=str)
def test_the_lowest_logits_are_not_masks(name, backend, device, dtype):
    """A window of such logits alone has equal weights, as the softmax of any constant."""
    some = drawn(name, device, dtype, B=1)
    logits = some.tensors["position_logits"]
    logits[0, 0, 2, 3] = logits[..., 4, 3, 1:] = torch.finfo(BRAIN).min
    with forced(backend):
        assert error(some.call(**some.tensors).cpu(), by_definition(some)["output"]) < BOUNDS[dtype]


@slow
@saturated.SIZES
@pytest.mark.parametrize("dtype, switch", SWITCHED, indirect=["switch"], ids=str)
@pytest.mark.parametrize("name, backend", [(BOTH, EMULATED)])
@pytest.mark.parametrize("keys", [1, 2, 8, 64])
def test_gradients_of_saturated_rows(name, backend, dtype, keys, size, switch):
    """Their errors are those of the definition, as of other backends; of one head of one image."""
    times = 6 if switch == "general kernels" else 3  # their mean of slopes is a running one
    saturated.check(name, keys, size, dtype, backend, "cpu", times, B=1, M=1)


@by
@pytest.mark.parametrize("dtype", slow_but([HALF], [SINGLE, HALF]), ids=str)
def test_queries_beyond_the_map(name, backend, device, dtype):
    """Position logits alone may have any grid of queries; a window without a key gives 0."""
    some = drawn(POSITION, device, dtype, B=1)
    some.tensors["position_logits"] = torch.randn(1, 2, 9, 12, 9).to(some.tensors["value"])
    actual = check(some, backend, dtype)
    assert not actual["output"][:, :, 6:].any()


def test_unsuitable_values_are_refused_in_words(emulated_windows):
    options = Options((3, 3), (1, 1), (1, 1), (1, 1), "exclude", 0.3)
    wide, logits = torch.zeros(1, 1, 1, 2, 513), torch.zeros(1, 1, 1, 2, 9)
    for value, words in ((wide.double(), "float64"), (wide, "heads of up to 512 channels"), (logits, "on cpu")):
        assert words in cuda.cannot(Terms(None, None, value, logits), options)
    output, lse = torch.empty_like(wide), torch.empty(1, 1, 1, 2)
    with pytest.raises(RuntimeError, match="up to 512 channels"):
        emulated_windows.forward_(None, None, wide, logits, output, lse, options.numbers(), options.border, 0.3)


@slow
def test_far_keys(emulated_windows, monkeypatch):
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
    emulated_windows.forward_(query, keys, keys, None, output, lse, options.numbers(), options.border, 0.1)
    pairs = keys[0, 0, rows, :4].double().view(3, 2, 4, d)
    seen = torch.stack([pairs[:, i, j : j + 3] for i in (0, 1) for j in (0, 1)], 2)
    weights = torch.einsum("yxd,yxkd->yxk", query[0, 0].double() * 0.1, seen).softmax(-1)
    assert error(output[0, 0], torch.einsum("yxk,yxkd->yxd", weights, seen)) < 1e-3
