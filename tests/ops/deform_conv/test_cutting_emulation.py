"""Partitioning of the CUDA convolution into chunks of images, blocks of pixels and teams, on several device sizes."""

from __future__ import annotations

import random

import pytest
import torch

from attn_plugins.ops import reference
from tests.helpers.emulation import NEEDS, error
from tests.ops.deform_conv.test_emulation import expected_gradients, problem

pytestmark = [*NEEDS, pytest.mark.slow]
DEVICES = {"one multiprocessor": (1, 4 << 20), "A100": (108, 40 << 20), "H200": (132, 60 << 20)}


@pytest.fixture
def one_wave(device, monkeypatch):
    """Emulate a quarter of the device, since a block has four waves: a few images are cut like the largest batches."""
    monkeypatch.setenv("EMULATOR_MULTIPROCESSORS", str(-(-device[0] // 4)))


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """Emulate a device with these multiprocessors and bytes of L2 cache."""
    multiprocessors, cache = DEVICES[request.param]
    monkeypatch.delenv("ATTN_PLUGINS_BLOCK_PIXELS", raising=False)
    monkeypatch.setenv("EMULATOR_MULTIPROCESSORS", str(multiprocessors))
    monkeypatch.setenv("EMULATOR_L2", str(cache))
    return multiprocessors, cache


# With 2048 output channels, a block has 256, 432 or 528 pixels.
@pytest.mark.parametrize("case", [dict(B=6, H=12, W=11), dict(B=1, H=31, W=29)], ids=["chunks", "blocks"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 4e-6), (torch.float16, 3e-3)], ids=str)
def test_equals_reference_however_it_is_cut(emulated, one_wave, case, dtype, tolerance):
    tensors, parameters = problem(C=4, out=2048, kernel=2, padding=0, bias=False, **case)
    B, out, (Ho, Wo) = tensors[0].shape[0], tensors[2].shape[0], tensors[1].shape[2:]
    images, pixels = emulated.cut([*tensors[0].shape, Ho, Wo, 2, 2, out], dtype.itemsize)
    assert images < B or images * Ho * Wo > pixels  # otherwise the case would not test what it claims
    grad_output = torch.randn(B, out, Ho, Wo, generator=torch.Generator().manual_seed(1)).bfloat16().double()
    expected, gradients = expected_gradients(tensors, parameters, grad_output)
    input, offset, weight, mask = (tensors[i].to(dtype) for i in (0, 1, 2, 4))
    # Channels-last, so that moving 2048 channels does not dominate the time.
    input, grad = (t.to(dtype, memory_format=torch.channels_last) for t in (input, grad_output))
    output = emulated.deform_conv2d(input, offset, weight, None, mask, *parameters)
    assert error(output, expected) < tolerance
    results = emulated.deform_conv2d_backward(grad, input, offset, weight, mask, *parameters, True, True, True)
    for name, result, gradient in zip(("input", "offset", "weight", "mask"), results, gradients):
        assert error(result, gradient) < tolerance, name


@pytest.mark.parametrize("B, size", [(3, 33), (5, 17)], ids=["blocks of an image", "images of a block"])
def test_planes_however_they_are_cut(emulated, one_wave, B, size):
    """Contiguous maps of 1024 and of 256 pixels: products write the result directly."""
    tensors, parameters = problem(B=B, C=4, H=size, W=size, out=2048, kernel=2, padding=0, bias=False)
    expected = reference.deform_conv2d(*tensors, *map(tuple, parameters[:3]))
    output = emulated.deform_conv2d(*(None if t is None else t.float() for t in tensors), *parameters)
    assert error(output, expected) < 4e-6


def test_cuts_of_random_problems(emulated, device):
    multiprocessors, cache = device
    chosen = random.Random(0)
    for _ in range(500):
        N, C, out = chosen.randint(1, 64), 2 ** chosen.randint(0, 11), 2 ** chosen.randint(0, 11)
        Ho, Wo, kernel = chosen.randint(1, 300), chosen.randint(1, 300), chosen.choice([1, 3, 5, 7])
        bytes = chosen.choice([2, 4, 8])
        images, pixels = emulated.cut([N, C, Ho, Wo, Ho, Wo, kernel, kernel, out], bytes)
        case = (N, C, out, Ho, Wo, kernel, bytes, images, pixels)
        assert 1 <= images <= N, case
        assert pixels % 128 == 0, case
        waves, most = 4 * multiprocessors * 128 * 64 // out, cache * 3 // (kernel**2 * C * bytes)
        target = max(256, min(waves, most))
        assert images == 1 or (images - 1) * Ho * Wo < 1.5 * target, case  # no more images than make a block
        assert pixels <= 1.5 * target + 127, case
        blocks = -(-images * Ho * Wo // pixels)
        assert blocks * pixels < images * Ho * Wo + blocks * 128, case  # equal up to whole tiles


def test_the_documented_cut(emulated, monkeypatch):
    """Check what ``cuda.cuh`` documents for 16 images of 64 x 64 pixels and 256 channels."""
    monkeypatch.setenv("EMULATOR_MULTIPROCESSORS", "132")
    monkeypatch.setenv("EMULATOR_L2", str(50 << 20))
    for bytes in (2, 4):
        assert emulated.cut([16, 256, 64, 64, 64, 64, 3, 3, 256], bytes) == (4, 16384)
