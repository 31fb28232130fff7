"""Partitioning of the CUDA convolution into chunks of images, blocks of pixels and teams, on several device sizes."""

from __future__ import annotations

import random

import pytest
import torch

from tests.helpers.emulation import NEEDS
from tests.ops.emulated_backend import NAME as EMULATED
from tests.ops.test_contract import example
from tests.ops.test_contract_backends import check

pytestmark = NEEDS
slow = pytest.mark.slow
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


by = pytest.mark.parametrize("name, backend", [("deform_conv2d", EMULATED)])
WIDE = dict(C=4, out=2048, kernel=(2, 2), padding=(0, 0), groups=1, D=1)  # a block has 256, 432 or 528 pixels


@slow
@by
@pytest.mark.parametrize("case", [dict(B=6, map=(12, 11)), dict(B=1, map=(31, 29))], ids=["chunks", "blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_equals_reference_however_it_is_cut(name, backend, emulated, one_wave, case, dtype):
    some = example(name, dtype=dtype, **WIDE, **case)
    B, C, H, W = some.tensors["input"].shape
    images, pixels = emulated.cut([B, C, H, W, H - 1, W - 1, 2, 2, WIDE["out"]], dtype.itemsize)
    assert images < B or images * (H - 1) * (W - 1) > pixels  # otherwise the case would not test what it claims
    some.tensors["input"] = some.tensors["input"].to(memory_format=torch.channels_last)
    check(some, backend, dtype)


@slow
@by
@pytest.mark.parametrize("B, size", [(3, 33), (5, 17)], ids=["blocks of an image", "images of a block"])
def test_planes_however_they_are_cut(name, backend, one_wave, B, size):
    """Contiguous maps of 1024 and of 256 pixels: products write the result directly."""
    check(example(name, **WIDE, B=B, map=(size, size)), backend, torch.float32)


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
    monkeypatch.setenv("ATTN_PLUGINS_BLOCK_PIXELS", "2000")
    assert emulated.cut([16, 256, 64, 64, 64, 64, 3, 3, 256], 4) == (1, 2048)
