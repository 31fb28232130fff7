"""Deformable convolutions: their operator, and the causal one in plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_plugins.modules import CausalDeformableConv1d, DeformableConv1d, DeformableConv2d
from attn_plugins.ops import deform_conv1d, deform_conv2d

OPTIONS: list[dict[str, Any]] = [
    dict(kernel_size=3, padding=1),
    dict(kernel_size=3, stride=2, padding=2, dilation=2),
    dict(kernel_size=1, groups=2, offset_groups=3, bias=False),
    dict(kernel_size=2, offset_groups=2),
]
CAUSAL: list[dict[str, Any]] = [
    dict(kernel_size=3),
    dict(kernel_size=3, dilation=2, modulated=True),
    dict(kernel_size=2, groups=2, offset_groups=3, bias=False),
    dict(kernel_size=1, modulated=True),
    dict(kernel_size=3, offset_scale=0.1),
]


def trained(layer: nn.Module, alpha: float = 0.3) -> nn.Module:
    """Return the layer with random offsets, as if it had been trained."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=alpha)
    return layer


def causal(options: dict[str, Any]) -> CausalDeformableConv1d:
    """Return a layer whose offsets reach several positions to both sides."""
    torch.manual_seed(0)
    module = CausalDeformableConv1d(6, 4, **options, dtype=torch.float64)
    return trained(module, 0.5 / options.get("offset_scale", 1.0) ** 0.5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("modulated", [True, False])
@pytest.mark.parametrize("axes", [1, 2])
def test_is_its_operator_on_what_it_predicts(axes, modulated, options):
    cls, operator = {1: (DeformableConv1d, deform_conv1d), 2: (DeformableConv2d, deform_conv2d)}[axes]
    module, x = trained(cls(6, 4, **options, modulated=modulated)), torch.randn(2, 6, *(5, 8)[:axes])
    names = {"weight", "bias", "conv_offset.weight", "conv_offset.bias"}
    assert set(module.state_dict()) == (names if module.bias is not None else names - {"bias"})
    predicted, taps = module.conv_offset(x), module.offset_groups * options["kernel_size"] ** axes
    offset, mask = predicted[:, : axes * taps], predicted[:, axes * taps :].sigmoid() if modulated else None
    geometry = [options.get(name, default) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))]
    assert predicted.abs().max() > 0.5
    torch.testing.assert_close(module(x), operator(x, offset, module.weight, module.bias, *geometry, mask))


@pytest.mark.parametrize("options", CAUSAL, ids=str)
def test_the_causal_start_learns_the_offset_of_every_tap(options):
    """Also of the query's own, where samples are clamped."""
    module = CausalDeformableConv1d(6, 4, **options)
    module(torch.randn(2, 6, 9)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in module.parameters())
    assert module.conv_offset.weight.grad.flatten(1).any(1).all()


def by_loops(module: CausalDeformableConv1d, x: Tensor) -> Tensor:
    """Compute the causal layer's definition position by position."""
    B, C, L = x.shape
    (K,), (dilation,), G = module.kernel_size, module.dilation, module.offset_groups
    predictor, width = module.conv_offset, module.weight.shape[1]
    output = x.new_zeros(B, module.out_channels, L)

    def read(b: int, c: int, place: float) -> float:
        low = math.floor(place)
        values = [x[b, c, i].item() if 0 <= i < L else 0.0 for i in (low, low + 1)]
        return values[0] + (place - low) * (values[1] - values[0])

    for b in range(B):
        for q in range(L):
            taps = [q + (m - K + 1) * dilation for m in range(K)]
            seen = torch.stack([x[b, :, t] if t >= 0 else x.new_zeros(C) for t in taps], 1)
            predicted = (predictor.weight * seen).sum((1, 2)) + predictor.bias
            for o in range(module.out_channels):
                total = 0.0 if module.bias is None else module.bias[o].item()
                for j in range(width):
                    c = o // (module.out_channels // module.groups) * width + j
                    group = c // (C // G)
                    for m, tap in enumerate(taps):
                        place = min(tap + module.offset_scale * predicted[group * K + m].item(), q)
                        weight = module.weight[o, j, m].item()
                        if module.modulated:
                            weight *= predicted[G * K + group * K + m].sigmoid().item()
                        total += weight * read(b, c, place)
                output[b, o, q] = total
    return output


@torch.no_grad()
@pytest.mark.parametrize("options", CAUSAL, ids=str)
def test_the_causal_layer_equals_loops_and_reads_no_later_position(options):
    """Not even NaN is read, not through a factor of 0 either, as with offsets of 0."""
    module, x = causal(options), 2 * torch.randn(2, 6, 7, dtype=torch.float64)
    offset, _ = module.predict(F.pad(x, (module.reach, 0)))
    assert offset.max() > 1  # beyond the query, so clamped to it
    assert offset.min() < -1
    torch.testing.assert_close(module(x), by_loops(module, x))
    for layer in (module, CausalDeformableConv1d(6, 4, **options, dtype=torch.float64)):
        expected, later = layer(x)[:, :, :5], x.clone()
        later[:, :, 5:] = torch.nan
        torch.testing.assert_close(layer(later)[:, :, :5], expected)


def test_at_offsets_of_zero_the_causal_layer_is_the_padded_one_with_its_weights():
    module, padded, x = CausalDeformableConv1d(6, 4, 3), DeformableConv1d(6, 4, 3, padding=2), torch.randn(2, 6, 9)
    padded.load_state_dict(module.state_dict())
    torch.testing.assert_close(padded(x)[..., :9], module(x))


@pytest.mark.parametrize("cls", [CausalDeformableConv1d, DeformableConv1d])
def test_offset_scale_is_a_learning_rate_for_adam(cls):
    layers = []
    for scale, rate in ((0.1, 0.01), (1.0, 0.001)):
        torch.manual_seed(0)
        layers.append(cls(6, 4, 3, offset_scale=scale))
        optimizer = torch.optim.Adam(layers[-1].conv_offset.parameters(), rate, eps=1e-20)
        for step in range(5):
            optimizer.zero_grad()
            layers[-1](torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            optimizer.step()
    slow, fast = (layer.conv_offset.weight for layer in layers)
    assert fast.abs().max() > 0.001
    torch.testing.assert_close(slow * 0.1, fast, rtol=1e-3, atol=1e-6)
