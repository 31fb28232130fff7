"""CUDA kernels on tensors of more than 2^31 elements, of which few are touched, to test 64-bit indexing.

The memory is reserved but not used: pages that are never written read as zeros.
"""

from __future__ import annotations

import pytest
import torch

from tests.helpers.emulation import NEEDS, reserved

pytestmark = NEEDS


@pytest.fixture(autouse=True)
def untraced(monkeypatch):
    """Tracing every access would take a multiple of the memory."""
    monkeypatch.setenv("EMULATOR_RACES", "0")


def test_deform_conv_reads_far_pixels(emulated):
    C, size, step = 512, 2100, 2098
    images = reserved(1, size, size, C, dtype=torch.float16)  # 2.2 * 10^9 elements
    corners = torch.tensor([0, 1, step, step + 1])
    images[0, corners[:, None], corners] = torch.randn(4, 4, C, generator=torch.Generator().manual_seed(0)).half()
    weight = torch.eye(8, C).half().view(8, C, 1, 1)
    offset = torch.full((1, 2, 2, 2), 0.5).half()
    input = images.permute(0, 3, 1, 2)
    output = emulated.deform_conv2d(input, offset, weight, None, None, [step, step], [0, 0], [1, 1], 1, 1)
    pixels = images[0, corners[:, None], corners, :8].double().view(2, 2, 2, 2, 8).mean((1, 3)).permute(2, 0, 1)
    torch.testing.assert_close(output[0].double(), pixels, rtol=2e-3, atol=2e-3)


def test_deformable_attention_reads_far_pixels(emulated):
    H, W, M, d = 1, 2**21, 16, 72
    value = reserved(1, H * W, M, d, dtype=torch.float16)  # 2.4 * 10^9 elements
    value[0, -2:] = torch.randn(2, M, d, generator=torch.Generator().manual_seed(0)).half()
    x = (torch.tensor([W - 1.5, W - 1.0, W - 0.5]) / W).double()
    locations = torch.stack((x, torch.full_like(x, 0.5)), -1).float().view(1, 3, 1, 1, 2).expand(1, 3, M, 1, 2)
    output = emulated.deformable_attention(value, locations, torch.ones(1, 3, M, 1), [H, W], [1], False)
    last, end = value[0, -2].flatten().double(), value[0, -1].flatten().double()
    for pixel, expected in zip(output[0].double(), (last, (last + end) / 2, end)):
        torch.testing.assert_close(pixel, expected, rtol=2e-3, atol=2e-3)
