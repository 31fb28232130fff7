"""The CUDA kernels' source, run thread by thread on the CPU, to test them without a GPU.

``tools/emulation/cuda_emulator.h`` documents the emulation: races and accesses out of bounds are errors; speed and
registers are not emulated. ``test_cuda.py`` tests the compiled kernels on a GPU.
"""

from __future__ import annotations

import math

import pytest
import torch

from attn_plugins.ops import reference
from tests.helpers.emulation import NEEDS, error
from tests.ops.deform_conv.operands import same_where_finite

pytestmark = NEEDS
slow = pytest.mark.slow


def problem(
    *, B=2, C=16, H=5, W=7, out=8, kernel=3, stride=1, padding=1, dilation=1, groups=1, offset_groups=1,
    mask=True, bias=True, spread=1.5, seed=0,
):  # fmt: skip
    """Return random arguments of the operator in float64 that are exact in bfloat16."""
    random = torch.Generator().manual_seed(seed)

    def tensor(*shape, scale=1.0):
        values = torch.randn(shape, generator=random, dtype=torch.float64) * scale
        return values.bfloat16().double()

    size = [(n + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 for n in (H, W)]
    taps = offset_groups * kernel**2
    tensors = (
        tensor(B, C, H, W),
        tensor(B, 2 * taps, *size, scale=spread),
        tensor(out, C // groups, kernel, kernel, scale=0.1),
        tensor(out) if bias else None,
        tensor(B, taps, *size).sigmoid().bfloat16().double() if mask else None,
    )
    return tensors, ([stride] * 2, [padding] * 2, [dilation] * 2, groups, offset_groups)


CASES = {
    "plain": {},
    "unmasked, unbiased": dict(mask=False, bias=False),
    "many channels": dict(C=288, B=1, H=3, W=4, out=3),  # 72 float vectors: three slices of a warp
    "odd": dict(C=15, offset_groups=3, groups=5, out=10),
    "pairs": dict(C=12, groups=2, offset_groups=2, out=6),
    "runs within runs": dict(C=24, groups=2, offset_groups=3, out=6),
    "stride and dilation": dict(stride=2, dilation=2, padding=2, H=9, W=8),
    "one tap": dict(C=3, kernel=1, padding=0, out=4),
    "one pixel": dict(H=1, W=1, B=1),
    "offsets beyond 32 bits": dict(spread=1e9),
    "far offsets": dict(spread=1e4),  # finite in float16
    "no images": dict(B=0),
    "no images of planes": dict(B=0, H=8, W=16),
    "one image, planes without copies": dict(B=1, H=4, W=6, C=8, out=6, groups=2),
    "one image of several blocks, planes without copies": dict(B=1, H=6, W=4, C=8, out=5),
    "products of several images, into planes": dict(B=3, H=8, W=16, C=8, out=5),
    "products of parts of images, into planes": dict(B=2, H=16, W=16, C=8, kernel=1, padding=0, groups=2, out=6),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


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


def expected_gradients(tensors, parameters, grad_output):
    leaves = [None if t is None else t.clone().requires_grad_() for t in tensors]
    output = reference.deform_conv2d(*leaves, *map(tuple, parameters[:3]))
    wanted = [leaves[i] for i in (0, 1, 2, 4, 3) if leaves[i] is not None]
    return output.detach(), torch.autograd.grad(output, wanted, grad_output)


QUICK = [("plain", torch.float32), ("many channels", torch.float16), ("odd", torch.bfloat16), ("pairs", torch.float64)]


@pytest.mark.parametrize(
    "case, dtype",
    [
        *QUICK,
        *(pytest.param(case, dtype, marks=slow) for n, case in enumerate(CASES)
          for k, dtype in enumerate(TOLERANCE) if (n + k) % 2 == 0 and (case, dtype) not in QUICK),
    ],
    ids=str,
)  # fmt: skip
def test_equals_reference(emulated, blocks, case, dtype):
    tensors, parameters = problem(**CASES[case])
    shape = (tensors[0].shape[0], tensors[2].shape[0], *tensors[1].shape[2:])
    grad_output = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16().double()
    expected, gradients = expected_gradients(tensors, parameters, grad_output)
    cast = [None if t is None else t.to(dtype) for t in tensors]
    output = emulated.deform_conv2d(*cast, *parameters)
    assert output.dtype == dtype
    assert error(output, expected) < TOLERANCE[dtype]
    input, offset, weight, _, mask = cast
    results = emulated.deform_conv2d_backward(
        grad_output.to(dtype), input, offset, weight, mask, *parameters, True, True, True, True
    )
    assert len(results) == 5
    for name, result, gradient in zip(("input", "offset", "weight", "mask", "bias"), results, gradients):
        assert result.dtype == dtype, name
        assert error(result, gradient) < TOLERANCE[dtype], name


@slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_any_order_of_threads(emulated, monkeypatch, seed):
    """The forward is bit-identical, and the backward equal up to the order of its sums."""
    tensors, parameters = problem(C=24, groups=2, offset_groups=3, out=6)
    input, offset, weight, bias, mask = tensors
    expected = emulated.deform_conv2d(*tensors, *parameters)
    arguments = (expected, input, offset, weight, mask, *parameters, True, True, True)
    gradients = emulated.deform_conv2d_backward(*arguments)
    monkeypatch.setenv("EMULATOR_SEED", str(seed))
    assert torch.equal(emulated.deform_conv2d(*tensors, *parameters), expected)
    for shuffled, gradient in zip(emulated.deform_conv2d_backward(*arguments), gradients):
        assert error(shuffled, gradient) < 1e-12


@slow
@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)], ids=str)
def test_writes_only_what_is_needed(emulated, blocks, needs):
    tensors, parameters = problem()
    input, offset, weight, _, mask = tensors
    grad_output = torch.randn(input.shape[0], weight.shape[0], *offset.shape[2:], dtype=torch.float64)
    _, gradients = expected_gradients(tensors, parameters, grad_output)
    results = emulated.deform_conv2d_backward(grad_output, input, offset, weight, mask, *parameters, *map(bool, needs))
    for result, gradient, needed in zip(results, gradients, (*needs, needs[1])):
        assert (error(result, gradient) < 1e-12) if needed else (result.numel() == 0)


@slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_channels_last_and_strided(emulated, blocks, dtype):
    tensors, parameters = problem()
    plain = [t.to(dtype) for t in tensors]
    input, offset, weight, bias, mask = plain
    padded = torch.full((2, 18, 7, 9), float("nan"), dtype=dtype)
    padded[:, 1:17, 1:6, 1:8] = input  # neither contiguous nor aligned
    expected = emulated.deform_conv2d(*plain, *parameters)
    for variant in (input.to(memory_format=torch.channels_last), padded[:, 1:17, 1:6, 1:8]):
        wide = torch.stack((offset, offset), -1)[..., 0]
        output = emulated.deform_conv2d(variant, wide, weight, bias, mask.mT.contiguous().mT, *parameters)
        last = variant.is_contiguous(memory_format=torch.channels_last)
        assert output.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
        assert torch.equal(output, expected)
        arguments = (weight, mask, *parameters, True, True, True)
        a = emulated.deform_conv2d_backward(expected, input, offset, *arguments)
        b = emulated.deform_conv2d_backward(output, variant, wide, *arguments)
        for x, y in zip(a, b):
            torch.testing.assert_close(x, y)


@slow
def test_misaligned_input(emulated):
    tensors, parameters = problem(C=8, B=1)
    input, *rest = (t.half() for t in tensors)
    shifted = torch.zeros(input.numel() + 1).half()[1:].view(1, 5, 7, 8).permute(0, 3, 1, 2).copy_(input)
    last = input.to(memory_format=torch.channels_last)
    assert torch.equal(
        emulated.deform_conv2d(shifted, *rest, *parameters), emulated.deform_conv2d(last, *rest, *parameters)
    )


@slow
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e9, -1e9, 3e38])
@pytest.mark.parametrize("spoiled", ["row", "column", "mask"])
def test_numbers_beyond_the_map_and_no_numbers(emulated, spoiled, value):
    """Far offsets read 0 and NaN ones NaN, with the gradients of the definition, as in torchvision."""
    tensors, parameters = problem(spread=0.7)
    first = dict(row=0, column=1).get(spoiled)
    (tensors[4] if first is None else tensors[1][:, first::2])[0, ::3, 1:3, 2] = value
    grad_output = torch.ones(2, 8, 5, 7).double()
    expected, gradients = expected_gradients(tensors, parameters, grad_output)
    input, offset, weight, _, mask = tensors
    output = emulated.deform_conv2d(*tensors, *parameters)
    grads = emulated.deform_conv2d_backward(
        grad_output, input, offset, weight, mask, *parameters, True, True, True, True
    )
    assert all(map(same_where_finite, (output, *grads), (expected, *gradients)))


@slow
def test_borders_exactly(emulated):
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
@pytest.mark.parametrize("shape", [(5, 7), (8, 16), (1, 9)], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_infinite_pixels_spoil_their_own_samples_alone(emulated, value, shape):
    """This includes the borders, where pixels inside substitute for those outside."""
    (input, offset, weight, bias, mask), parameters = problem(H=shape[0], W=shape[1], B=2, C=8, spread=3)
    for row, column in ((0, 0), (-1, -1), (0, -1), (shape[0] // 2, shape[1] // 2)):
        input[0, :, row, column] = value
    output = emulated.deform_conv2d(input, offset, weight, bias, mask, *parameters)
    expected = reference.deform_conv2d(input, offset, weight, bias, mask, *map(tuple, parameters[:3]))
    assert 0 < expected.isfinite().sum() < expected.numel()
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


@slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_map_that_no_sample_reaches_is_not_read(emulated, value, dtype):
    (input, offset, weight, bias, mask), parameters = problem(B=1, C=16)
    far = torch.full_like(offset, 1e4)
    tensors = [t.to(dtype) for t in (torch.full_like(input, value), far, weight, bias, mask)]
    output = emulated.deform_conv2d(*tensors, *parameters)
    assert torch.equal(output, tensors[3].view(1, -1, 1, 1).expand_as(output))
    arguments = [*tensors[:3], tensors[4], *parameters, True, True, True]
    for gradient in (1.0, float("inf")):
        grads = emulated.deform_conv2d_backward(torch.full_like(output, gradient), *arguments)
        assert not grads[0].any()
        if gradient == 1:
            assert not any(grad.any() for grad in grads)


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


@slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(2, 33, 70), (1, 1, 40), (3, 64, 1), (0, 3, 4)], ids=str)
def test_transposition(emulated, shape, dtype):
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
