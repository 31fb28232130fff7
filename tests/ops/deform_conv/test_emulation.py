"""The CUDA kernels' source, run thread by thread on the CPU, to test them without a GPU.

``tools/emulation/cuda_emulator.h`` documents the emulation: races and accesses out of bounds are errors; speed and
registers are not emulated. ``test_contract_backends.py`` asks what every backend promises of the emulated kernels too,
and ``test_cuda.py`` tests the compiled ones on a GPU.
"""

from __future__ import annotations

import math
import os
from contextlib import nullcontext

import pytest
import torch

from attn_plugins.ops import reference
from tests.helpers.emulation import NEEDS, error
from tests.helpers.operator_checks import deterministic_mode
from tests.helpers.slow_cases import slow_but
from tests.ops.conftest import level
from tests.ops.emulated_backend import NAME as EMULATED
from tests.ops.test_contract import BOUNDS, assert_close, differentiate, example, forced, results
from tests.ops.test_contract_backends import check
from tools.emulation import build

pytestmark = NEEDS
slow = pytest.mark.slow
DOUBLE, SINGLE, HALF, BRAIN = BOUNDS
NAME = "deform_conv2d"
by = pytest.mark.parametrize("name, backend", [(NAME, EMULATED)])
CASES = {
    "plain": dict(C=16, out=8, groups=1, D=1),
    "many channels": dict(C=288, B=1, map=(3, 4), out=3, groups=1, D=1),  # 72 float vectors: three slices of a warp
    "odd": dict(C=15, D=3, groups=5, out=10),
    "pairs": dict(C=12),
    "runs within runs": dict(C=24, D=3, out=6),
    "stride and dilation": dict(stride=(2, 2), dilation=(2, 2), padding=(2, 2), map=(9, 8)),
    "one tap": dict(C=3, kernel=(1, 1), padding=(0, 0), groups=1, D=1),
    "one pixel": dict(map=(1, 1), B=1),
    "far offsets": dict(far=1e4),  # finite in float16
    "no images of planes": dict(B=0, map=(8, 16)),
    "one image, planes without copies": dict(B=1, map=(4, 6), C=8, out=6, D=1),
    "one image of several blocks, planes without copies": dict(B=1, map=(6, 4), C=8, out=5, groups=1, D=1),
    "products of several images, into planes": dict(B=3, map=(8, 16), C=8, out=5, groups=1, D=1),
    "products of parts of images, into planes": dict(map=(16, 16), C=8, kernel=(1, 1), padding=(0, 0), out=6, D=1),
}


@pytest.fixture(params=[None, "13"], ids=["own blocks", "blocks of 13 pixels"])
def blocks(request, monkeypatch):
    """Set the pixels per block, and another order of threads.

    With 13, a chunk holds at most one image, blocks end in the middle of a row, and a team has all taps of a pixel.
    """
    if request.param:
        monkeypatch.setenv("ATTN_PLUGINS_BLOCK_PIXELS", request.param)
        monkeypatch.setenv("EMULATOR_MULTIPROCESSORS", "1")
        monkeypatch.setenv("EMULATOR_SEED", "1")
    else:
        monkeypatch.delenv("ATTN_PLUGINS_BLOCK_PIXELS", raising=False)


QUICK = [("plain", SINGLE), ("many channels", HALF), ("odd", BRAIN), ("pairs", DOUBLE)]


@by
@pytest.mark.parametrize(
    "case, dtype",
    slow_but(QUICK, [(case, dtype) for n, case in enumerate(CASES) for k, dtype in enumerate(BOUNDS)
                     if (n + k) % 2 == 0 or (case, dtype) in QUICK]),
    ids=str,
)  # fmt: skip
def test_equals_reference(name, backend, blocks, case, dtype):
    """By either kernel of the backward; the deterministic one has no float64."""
    for mode in (nullcontext, deterministic_mode)[: 1 if dtype == DOUBLE else 2]:
        with mode():
            check(example(name, dtype=dtype, **CASES[case]), backend, dtype)


@slow
@by
def test_offsets_beyond_32_bits(name, backend):
    check(example(name, dtype=DOUBLE, far=1e9), backend, DOUBLE)


@by
@pytest.mark.parametrize("seed", slow_but([2], range(2, 6)))
def test_any_order_of_threads(name, backend, monkeypatch, seed):
    """The forward is bit-identical, and the backward equal up to the order of its sums."""
    some = example(name, dtype=DOUBLE, C=24, D=3, out=6)
    with forced(backend):
        expected = results(some)
        monkeypatch.setenv("EMULATOR_SEED", str(seed))
        actual = results(some)
    assert torch.equal(actual["output"], expected["output"])
    assert_close(actual, expected, 1e-12)


@slow
@by
@pytest.mark.parametrize("wanted", [("input",), ("offset",), ("weight",), ("input", "weight"), ("mask", "weight")])
def test_writes_only_what_is_needed(name, backend, blocks, wanted):
    some = example(name, dtype=DOUBLE)
    with forced("reference"):
        expected = results(some)
    leaves = {n: t.requires_grad_(n in wanted) for n, t in some.tensors.items()}
    with forced(backend):
        actual = differentiate(some.call, leaves)
    assert_close(actual, {n: expected[n] for n in actual}, 1e-12)


@slow
@by
@pytest.mark.parametrize("dtype", [DOUBLE, SINGLE, BRAIN], ids=str)
@pytest.mark.parametrize("layout", ["channels last", "misaligned channels last", "crop"])
@pytest.mark.parametrize("C", [8, 10])  # a map of 10 channels has no whole number of vectors
def test_channels_last_and_strided(name, backend, blocks, layout, dtype, C):
    """Where the input is channels-last in memory, the output is as well, and the same bit by bit."""
    some = example(name, dtype=dtype, C=C)
    with forced(backend):
        expected = results(some)
    given, last = some.tensors["input"], torch.channels_last
    if layout == "crop":  # neither contiguous nor aligned
        given = torch.nn.functional.pad(given, (1, 1, 1, 1), value=math.nan)[:, :, 1:-1, 1:-1]
    else:
        start = int(layout.startswith("misaligned"))
        memory = torch.zeros(given.numel() + 1, dtype=dtype)[start:][: given.numel()]
        given = memory.view(given.to(memory_format=last).permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2).copy_(given)
    offset, mask = some.tensors["offset"], some.tensors["mask"]
    views = dict(input=given, offset=torch.stack((offset, offset), -1)[..., 0], mask=mask.mT.contiguous().mT)
    with forced(backend):
        output = some.call(**{**some.tensors, **views})
        actual = differentiate(some.call, {n: t.requires_grad_() for n, t in {**some.tensors, **views}.items()})
    assert output.is_contiguous(memory_format=torch.contiguous_format if layout == "crop" else last)
    assert torch.equal(output, expected["output"])
    assert_close(actual, expected, BOUNDS[dtype])


@by
@pytest.mark.parametrize(
    "case, layout, forward, backward",
    [
        (dict(B=1, map=(4, 6), groups=1), torch.contiguous_format, 3, 3),  # the bias is a launch
        (dict(B=2, groups=1), torch.contiguous_format, 3, 3),  # the output is transposed
        (dict(B=2, groups=1), torch.channels_last, 2, 3),
    ],
    ids=["one map", "small maps", "channels last"],
)
def test_launches(name, backend, emulated, case, layout, forward, backward):
    """Products and the bias' gradient are launches of PyTorch's. Half precision rounds the map's gradient."""
    some = example(name, dtype=BRAIN, C=8, **case)
    some.tensors["input"] = some.tensors["input"].to(memory_format=layout)
    before = emulated.launches()
    with forced(backend):
        some.call(**some.tensors)
        assert emulated.launches() - before == forward
        results(some)
    assert emulated.launches() - before == 2 * forward + backward


@slow
def test_samples_on_the_border_equal_bilinear_interpolation(emulated):
    """Samples on -1, 0, H - 1 and H, whose corners leave the map one by one."""
    input = torch.randn(1, 8, 4, 4).double()
    rows = torch.tensor([-1.0, -0.5, 0.0, 2.5, 3.0, 3.5, 4.0, -1.0000001]).double()
    y, x = torch.meshgrid(rows, rows, indexing="ij")
    grid = torch.arange(8).double()
    offset = torch.stack((y - grid.view(8, 1), x - grid.view(1, 8)))[None]
    input_grid = torch.zeros(1, 8, 8, 8).double()
    input_grid[:, :, :4, :4] = input
    weight = torch.eye(8).double().view(8, 8, 1, 1)
    output = emulated.deform_conv2d(input_grid, offset, weight, None, None, [1, 1], [0, 0], [1, 1], 1, 1)
    assert error(output, reference.bilinear_samples(input_grid, y[None], x[None]).permute(0, 3, 1, 2)) < 1e-14


@slow
@by
@pytest.mark.parametrize("map", [(5, 7), (8, 16), (1, 9)], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_infinite_pixels_spoil_their_own_samples_alone(name, backend, value, map):
    """This includes the borders, where pixels inside substitute for those outside."""
    some = example(name, dtype=DOUBLE, map=map, C=8, far=2)
    for row, column in ((0, 0), (-1, -1), (0, -1), (map[0] // 2, map[1] // 2)):
        some.tensors["input"][0, :, row, column] = value
    with forced(backend):
        output = some.call(**some.tensors)
    with forced("reference"):
        expected = some.call(**some.tensors)
    assert 0 < expected.isfinite().sum() < expected.numel()
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


@slow
@by
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_map_that_no_sample_reaches_is_not_read(name, backend, value, dtype):
    some = example(name, dtype=dtype, B=1, C=16)
    some.tensors["input"].fill_(value)
    some.tensors["offset"].fill_(1e4)
    for factor in (1.0, math.inf):
        with forced(backend):
            actual = results(some._replace(call=lambda **tensors: some.call(**tensors) * factor))  # noqa: B023
        assert not actual["input"].any()
        if factor == 1:
            assert torch.equal(actual["output"], some.tensors["bias"].view(1, -1, 1, 1).expand_as(actual["output"]))
            assert not any(actual[n].any() for n in ("offset", "weight", "mask"))


@pytest.mark.parametrize(
    "fault, message",
    [(1, "race: .* no __syncthreads orders"), (2, "reads 4 bytes at byte 1024 of a tensor that has 1024"),
     (3, "writes 4 bytes of shared memory at byte 1024 of tile")],
)  # fmt: skip
def test_the_emulator_reports_races_and_bounds(emulated, fault, message):
    x = torch.arange(256.0)
    out = torch.empty_like(x)
    emulated.faulty(out, x, 0, 1)
    assert torch.equal(out, x.flip(0))
    with pytest.raises(RuntimeError, match=message):
        emulated.faulty(out, x, fault, 1)


def test_a_library_is_compiled_when_something_has_changed(emulated, monkeypatch, request):
    def compile(source, *rest):
        raise LookupError(source.name)

    arch = int(os.environ.get("EMULATED_ARCH", "900"))
    options = build.EMULATION / "sampling.cpp", arch, level(request.session)
    monkeypatch.setattr(build, "_compile", compile)
    assert build.library(*options).is_file()
    monkeypatch.setattr(build, "CHECKS", f"{build.CHECKS} -DOTHER")
    with pytest.raises(LookupError, match=r"sampling\.cpp"):
        build.library(*options)


@slow
def test_a_grid_that_is_too_large_is_an_error(emulated):
    x = torch.arange(256.0)
    with pytest.raises(RuntimeError, match="a grid of 2147483648 blocks is too large"):
        emulated.faulty(torch.empty_like(x), x, 0, 2**31)


def test_division_by_multiplication(emulated):
    random = torch.Generator().manual_seed(0)
    last = 2**31 - 1
    for divisor in (1, 2, 3, 5, 7, 9, 10, 64, 97, 641, 2**16 - 1, 2**16, 2**16 + 1, 2**30 - 1, 2**30, last - 1, last):
        numbers = torch.randint(last + 1, (200,), generator=random)
        whole = numbers // divisor * divisor
        numbers = torch.cat((numbers, whole, (whole - 1).clamp_min(0), torch.tensor([0, divisor - 1, divisor, last])))
        pairs = torch.stack((numbers, torch.zeros_like(numbers)), 1)
        emulated.divide_(pairs, divisor)
        assert torch.equal(pairs, torch.stack((numbers // divisor, numbers % divisor), 1)), divisor


@pytest.mark.parametrize("dtype", slow_but([SINGLE, HALF], [*BOUNDS]), ids=str)
@pytest.mark.parametrize("shape", [(2, 33, 70), (1, 1, 40), (3, 64, 1), (0, 3, 4)], ids=str)
def test_transposed_matrices_equal_addcmul(emulated, shape, dtype):
    """Rows may lie apart; a scale and an addend are rounded once, as ``torch.addcmul`` does."""
    N, rows, columns = shape
    wide = torch.randn(N, rows, columns + 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    matrices = wide[..., 1 : columns + 1]
    assert torch.equal(emulated.transposed(matrices, None, None), matrices.mT)
    scale, addend = torch.tensor(0.3).to(dtype), torch.randn(N, columns, rows).to(dtype)
    result = emulated.transposed(matrices, addend, scale)
    assert result.is_contiguous()
    torch.testing.assert_close(result, torch.addcmul(addend, scale, matrices.mT))
    torch.testing.assert_close(emulated.transposed(matrices, None, scale), scale * matrices.mT)
