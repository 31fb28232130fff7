"""CausalDeformableConv1d: plain loops and causality."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from attn_plugins.modules import CausalDeformableConv1d, DeformableConv1d

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": dict(kernel_size=3),
    "dilated": dict(kernel_size=3, dilation=2, modulated=True),
    "grouped": dict(kernel_size=2, groups=2, offset_groups=3, bias=False),
    "pointwise": dict(kernel_size=1, modulated=True),
    "slow": dict(kernel_size=3, offset_scale=0.1),
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def trained(options: dict[str, Any], dtype: torch.dtype = torch.float64) -> CausalDeformableConv1d:
    """Return a layer whose offsets reach several positions to both sides."""
    torch.manual_seed(0)
    module = CausalDeformableConv1d(6, 4, **options).to(dtype)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p), alpha=0.5 / options.get("offset_scale", 1.0) ** 0.5)
    return module


def by_loops(module: CausalDeformableConv1d, x: torch.Tensor) -> torch.Tensor:
    """Compute the definition position by position."""
    B, C, L = x.shape
    (K,), (dilation,), G = module.kernel_size, module.dilation, module.offset_groups
    predictor = module.conv_offset
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
                width = module.weight.shape[1]
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


@every_option
def test_against_loops(options):
    module, x = trained(options), torch.randn(2, 6, 7, dtype=torch.float64)
    offset, _ = module.predict(F.pad(x, (module.reach, 0)))
    assert offset.max() > 1  # beyond the query, so clamped to it
    assert offset.min() < -1
    torch.testing.assert_close(module(x), by_loops(module, x))


@every_option
def test_starts_as_a_causal_convolution(options):
    module, x = CausalDeformableConv1d(6, 4, **{**options, "modulated": False}), torch.randn(2, 6, 9)
    plain = F.conv1d(F.pad(x, (module.reach, 0)), module.weight, module.bias, 1, 0, module.dilation, module.groups)
    torch.testing.assert_close(module(x), plain, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@every_option
def test_not_even_nan_is_read_from_later_positions(options):
    """Not through a factor of 0 either, as with offsets of 0; ``sequences/test_decoding.py`` looks at gradients."""
    for module in (trained(options), CausalDeformableConv1d(6, 4, **options).double()):
        x = torch.randn(2, 6, 9, dtype=torch.float64)
        expected = module(x)[:, :, :5]
        x[:, :, 5:] = torch.nan
        torch.testing.assert_close(module(x)[:, :, :5], expected)


@pytest.mark.parametrize("modulated", [False, True])
def test_every_parameter_gets_a_gradient_at_the_start(modulated):
    module = CausalDeformableConv1d(6, 4, 3, modulated=modulated)
    module(torch.randn(2, 6, 5)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in module.parameters())
    assert module.conv_offset.weight.grad.flatten(1).any(1).all()  # for every tap, including the query's own


def test_weights_are_those_of_the_layer_that_looks_ahead():
    module = trained(OPTIONS["plain"])
    DeformableConv1d(6, 4, 3).load_state_dict(module.state_dict())


@pytest.mark.parametrize("cls", [CausalDeformableConv1d, DeformableConv1d])
def test_offset_scale_is_a_learning_rate_for_adam(cls):
    layers = []
    for scale, rate in ((0.1, 0.01), (1.0, 0.001)):
        torch.manual_seed(0)
        layers.append(cls(6, 4, 3, offset_scale=scale))
        groups = [
            {"params": layers[-1].conv_offset.parameters(), "lr": rate},
            {"params": [layers[-1].weight], "lr": 0.0},
        ]
        optimizer = torch.optim.Adam(groups, eps=1e-20)
        for step in range(5):
            optimizer.zero_grad()
            layers[-1](torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            optimizer.step()
    slow, fast = (layer.conv_offset.weight for layer in layers)
    assert fast.abs().max() > 0.001
    torch.testing.assert_close(slow * 0.1, fast, rtol=1e-3, atol=1e-6)
    assert layers[0].conv_offset(torch.randn(1, 6, 3)).any()
