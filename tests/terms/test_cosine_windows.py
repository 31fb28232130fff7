"""Sines of positions; Swin V2's log-spaced positions and scaled cosine attention: loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from attn_plugins.terms.cosine_scale import cosine_operands, cosine_scale
from attn_plugins.terms.log_positions import log_coordinates
from attn_plugins.terms.sine_position import sine_encoding


@pytest.mark.parametrize("size, pretrained", [((3, 5), None), ((4, 6), (3, 5)), ((1, 3), None), ((2, 3), (1, 1))])
def test_coordinates(size, pretrained):
    H, W = size
    ours = log_coordinates(size, pretrained)
    assert ours.shape == (2 * H - 1, 2 * W - 1, 2)
    scales = [max(s - 1, 1) for s in pretrained or size]
    for i, j in itertools.product(range(2 * H - 1), range(2 * W - 1)):
        for axis, offset in enumerate((i - H + 1, j - W + 1)):
            x = 8 * offset / scales[axis]
            expected = math.copysign(math.log2(1 + abs(x)) / 3, x)
            assert float(ours[i, j, axis]) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_products_are_scaled_cosines():
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 3, 5, 4, dtype=torch.float64).unbind(0)
    k[0, 0, 0] = 0
    log_scale = torch.tensor([0.0, math.log(10), 9.0], dtype=torch.float64)
    ours, theirs = cosine_operands(q, k, log_scale)
    products = ours @ theirs.transpose(2, 3)
    for b in range(2):
        for head, scale in enumerate((1.0, 10.0, 100.0)):
            for i in range(5):
                for j in range(5):
                    lengths = q[b, head, i].norm() * k[b, head, j].norm()
                    expected = scale * (q[b, head, i] @ k[b, head, j]) / lengths if lengths > 0 else lengths
                    torch.testing.assert_close(products[b, head, i, j], expected)


def test_nothing_learns_beyond_the_clamp():
    log_scale = torch.tensor([1.0, 4.0, 5.0, 9.0], requires_grad=True)
    scale = cosine_scale(log_scale)
    torch.testing.assert_close(scale, torch.tensor([math.e, math.e**4, 100.0, 100.0]))
    scale.sum().backward()
    torch.testing.assert_close(log_scale.grad, torch.tensor([math.e, math.e**4, 0.0, 0.0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_within_bound(dtype):
    """Squares of these queries overflow in float16."""
    torch.manual_seed(0)
    q, k = (300 * torch.randn(2, 1, 2, 5, 8)).to(dtype).unbind(0)
    ours = cosine_operands(q, k, torch.tensor([2.0, 9.0]).to(dtype))
    wide = cosine_operands(q.float(), k.float(), torch.tensor([2.0, 9.0]))
    for half, expected in zip(ours, wide):
        assert half.dtype == dtype
        torch.testing.assert_close(half.float(), expected, rtol=2e-2, atol=1e-3)


def test_sines():
    offsets, width, wavelength = torch.tensor([-3, 0, 2]), 6, 100.0
    encoding = sine_encoding(offsets, width, wavelength)
    for n, offset in enumerate((-3, 0, 2)):
        for i in range(width // 2):
            angle = offset / wavelength ** (2 * i / width)
            assert encoding[n, i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert encoding[n, width // 2 + i].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_bad_arguments_raise():
    heads = torch.zeros(1, 2, 3, 4)
    for call, message in (
        (lambda: log_coordinates((0, 3)), "size must be two ints"),
        (lambda: log_coordinates((3, 3), (3, 0)), "pretrained must be two ints"),
        (lambda: cosine_scale(torch.zeros(2), 0), "largest must be a positive scale, got 0"),
        (lambda: cosine_operands(heads, heads, torch.zeros(3)), r"logit_scale must have 2 elements, .* got \(3,\)"),
        (lambda: sine_encoding(torch.arange(3), 0, 10.0), "width must be a positive even number .*got 0"),
        (lambda: sine_encoding(torch.arange(3), 3, 10.0), "width must be a positive even number .*got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
