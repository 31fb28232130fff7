"""Sines and cosines of positions."""

from __future__ import annotations

import math

import pytest
import torch

from attn_plugins.terms.sine_position import sine_encoding


def test_definition():
    offsets, width, wavelength = torch.tensor([-3, 0, 2]), 6, 100.0
    encoding = sine_encoding(offsets, width, wavelength)
    for n, offset in enumerate((-3, 0, 2)):
        for i in range(width // 2):
            angle = offset / wavelength ** (2 * i / width)
            assert encoding[n, i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert encoding[n, width // 2 + i].item() == pytest.approx(math.cos(angle), abs=1e-6)


@pytest.mark.parametrize("width", [0, 1, 3])
def test_odd_and_empty_widths_are_refused(width):
    with pytest.raises(ValueError, match=f"width must be a positive even number .*got {width}"):
        sine_encoding(torch.arange(3), width, 10.0)
