"""The input gradient that the CUDA convolution sums in shared memory, emulated: equal to the reference in every cut."""

from __future__ import annotations

import pytest
import torch

from tests.ops.deform_conv.test_emulation import expected_gradients, problem
from tests.ops.emulation.kernels import NEEDS, error

pytestmark = [*NEEDS, pytest.mark.slow]
CASES = {
    "four channels a thread": dict(C=256, B=1, H=7, W=11, out=4),
    "four channels, not all threads": dict(C=300, B=1, H=5, W=9, out=3, mask=False),
    "two channels a thread": dict(C=128, H=9, W=11, out=4),
    "two channels, not all threads": dict(C=140, B=1, H=6, W=9, out=3, mask=False),
    "one channel a thread": dict(C=40, H=9, W=18, out=4),
    "two blocks a tile": dict(C=97, B=1, H=4, W=5, out=3),
    "groups": dict(C=192, B=1, H=5, W=7, groups=3, offset_groups=2, out=6),
    "stride and dilation": dict(C=32, stride=2, dilation=2, padding=2, H=17, W=12, out=4),
    "5 x 5": dict(C=32, kernel=5, padding=1, H=8, W=7, out=4),
    "one tap": dict(C=32, kernel=1, padding=0, out=4),
    "one row": dict(C=32, H=1, W=70, B=1, out=4),
    "one pixel": dict(C=32, H=1, W=1, B=1, out=4),
    "wide offsets": dict(C=32, H=12, W=20, spread=4, out=4),
    "far offsets": dict(C=32, spread=1e9, out=4),
    "no images": dict(C=32, B=0, out=4),
}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
LARGE, SMALL = 227 << 10, 80 << 10  # shared memory of a block: an H100's, and one with room for 30 cells


@pytest.fixture(params=[LARGE, SMALL], ids=["large windows", "small windows"], autouse=True)
def windows(request, monkeypatch):
    monkeypatch.setenv("ATTN_PLUGINS_SCATTER", "4")
    monkeypatch.setenv("EMULATOR_SHARED", str(request.param))
    return request.param


def input_gradient(emulated, tensors, parameters, grad_output, dtype, others=True):
    """Return the emulated gradient of the input."""
    input, offset, weight, _, mask = (None if t is None else t.to(dtype) for t in tensors)
    needs = (True, others, others)
    return emulated.deform_conv2d_backward(grad_output.to(dtype), input, offset, weight, mask, *parameters, *needs)


def gradient_of(tensors, seed=1):
    shape = (tensors[0].shape[0], tensors[2].shape[0], *tensors[1].shape[2:])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().double()


def check(emulated, tensors, parameters) -> None:
    """Compare the gradient of the input with the reference's."""
    grad_output = gradient_of(tensors)
    _, (expected, *_) = expected_gradients(tensors, parameters, grad_output)
    gradient, *_ = input_gradient(emulated, tensors, parameters, grad_output, torch.float32)
    assert error(gradient, expected) < 2e-6


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pixels", [None, "13"], ids=["own blocks", "blocks of 13 pixels"])
def test_equals_the_reference(emulated, monkeypatch, pixels, case, dtype):
    if pixels:  # blocks begin and end within the rows of a tile
        monkeypatch.setenv("ATTN_PLUGINS_BLOCK_PIXELS", pixels)
        monkeypatch.setenv("EMULATOR_SEED", "1")
    tensors, parameters = problem(**CASES[case])
    grad_output = gradient_of(tensors)
    _, gradients = expected_gradients(tensors, parameters, grad_output)
    results = input_gradient(emulated, tensors, parameters, grad_output, dtype)
    for name, result, gradient in zip(("input", "offset", "weight", "mask"), results, gradients):
        assert result.dtype == dtype
        assert error(result, gradient) < TOLERANCE[dtype], name


@pytest.mark.parametrize(
    "case", ["four channels a thread", "two channels a thread", "one channel a thread", "wide offsets"]
)
def test_sums_in_another_order_than_global_memory(emulated, monkeypatch, case):
    """The results differ in their last bits, which shows that the windows serve."""
    tensors, parameters = problem(**CASES[case])
    grad_output = gradient_of(tensors)
    by_windows, *_ = input_gradient(emulated, tensors, parameters, grad_output, torch.float32)
    alone, *_ = input_gradient(emulated, tensors, parameters, grad_output, torch.float32, others=False)
    assert error(alone, by_windows.double()) < 1e-6
    monkeypatch.setenv("ATTN_PLUGINS_SCATTER", "0")
    directly, *_ = input_gradient(emulated, tensors, parameters, grad_output, torch.float32)
    assert not torch.equal(directly, by_windows)
    assert error(directly, by_windows.double()) < 1e-6


@pytest.mark.parametrize("channels", ["1", "2"])
def test_fewer_channels_a_thread(emulated, monkeypatch, channels):
    monkeypatch.setenv("ATTN_PLUGINS_SCATTER", channels)
    tensors, parameters = problem(**CASES["four channels a thread"])
    check(emulated, tensors, parameters)


@pytest.mark.parametrize("seed", range(2, 5))
def test_any_order_of_threads(emulated, monkeypatch, seed):
    monkeypatch.setenv("EMULATOR_SEED", str(seed))
    tensors, parameters = problem(C=48, H=9, W=10, spread=3, out=4)
    check(emulated, tensors, parameters)


@pytest.mark.parametrize("down, across", [(9, -7), (-12, 15), (19, 0), (0, -23.5), (-20.5, -24.5)])
def test_windows_follow_the_offsets(emulated, down, across):
    """All samples move by the same distance, to the other end of the map, or beyond its border."""
    tensors, parameters = problem(C=32, B=1, H=20, W=24, spread=0.2, out=4)
    tensors[1][:, ::2] += down
    tensors[1][:, 1::2] += across
    check(emulated, tensors, parameters)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e9, 3e38])
def test_samples_that_are_nowhere_add_nothing(emulated, value):
    tensors, parameters = problem(C=32, B=1, out=4)
    tensors[1][:, ::4] = value
    check(emulated, tensors, parameters)
    tensors[1].fill_(value)
    infinite = torch.full_like(gradient_of(tensors), float("inf"))
    gradient, *_ = input_gradient(emulated, tensors, parameters, infinite, torch.float32)
    assert not gradient.any()


def test_infinite_gradients_reach_their_own_pixels_alone(emulated):
    tensors, parameters = problem(C=32, B=1, H=6, W=20, spread=0.3, out=4)
    grad_output = gradient_of(tensors)
    grad_output[:, :, 0, :3] = float("inf")
    _, (expected, *_) = expected_gradients(tensors, parameters, grad_output)
    gradient, *_ = input_gradient(emulated, tensors, parameters, grad_output, torch.float32)
    assert torch.equal(gradient.isfinite(), expected.isfinite())
    finite = expected.isfinite()
    assert 0 < finite.sum() < finite.numel()
    assert error(gradient[finite], expected[finite]) < 2e-6


def test_tiles(emulated):
    """Tiles have at most 64 output pixels, and windows half as many cells again as taps without offsets need."""
    h100, a100, ada = (((bytes << 10) // 2 - (9 << 10)) // 8 for bytes in (228, 164, 100))
    assert emulated.tiles([50, 68, 3, 3, 1, 1], h100, 1) == (8, 8, 105)
    assert emulated.tiles([50, 68, 3, 3, 1, 1], h100, 2) == (4, 8, 52)
    assert emulated.tiles([50, 68, 3, 3, 1, 1], ((227 << 10) - (9 << 10)) // 8, 4) == (8, 8, 54)  # one block
    assert emulated.tiles([50, 68, 3, 3, 1, 1], a100, 2) == (4, 8, 36)
    assert emulated.tiles([50, 68, 3, 3, 1, 1], ada, 1) == (4, 8, 41)
    assert emulated.tiles([25, 34, 3, 3, 2, 1], h100, 1) == (4, 8, 105)
    assert emulated.tiles([1, 512, 1, 3, 1, 1], h100, 1) == (1, 64, 105)
    assert emulated.tiles([1, 20, 1, 3, 1, 1], h100, 1) == (1, 32, 105)
    assert emulated.tiles([50, 68, 3, 3, 1, 24], h100, 1) == (0, 0, 0)  # taps too far apart
