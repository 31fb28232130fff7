"""Criss-cross attention, with and without relative positions: plain loops and mmcv's module."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from attn_plugins.modules import BilateralCrissCross2d, CrissCrossAttention2d
from attn_plugins.terms.relative_table import resize_table
from tests.helpers.module_inputs import drawn

POSITIONS = ["none", "relative"]


def build(position="relative", *, size=(4, 5), dtype=torch.float64, **options) -> CrissCrossAttention2d:
    torch.manual_seed(0)
    module = CrissCrossAttention2d(6, **{"reduction": 2, "position": position, "input_size": size, **options})
    return drawn(module).to(dtype)


@torch.no_grad()
def by_loops(module: CrissCrossAttention2d, image: torch.Tensor) -> torch.Tensor:
    """Compute the definition for every query and key separately."""
    _, _, H, W = image.shape
    q, k, v = (layer(image)[0].numpy() for layer in (module.query_conv, module.key_conv, module.value_conv))
    output = np.zeros(v.shape)
    for y, x in itertools.product(range(H), range(W)):
        keys = [(y, c) for c in range(W)] + [(r, x) for r in range(H) if r != y]
        logits = []
        for r, c in keys:
            key = k[:, r, c]
            if module.position == "relative":
                relative = module.width_rel[c - x + W - 1] if r == y else module.height_rel[r - y + H - 1]
                key = key + relative.numpy()
            logits.append(module.scale * (q[:, y, x] @ key))
        weights = np.exp(np.array(logits) - max(logits))
        weights /= weights.sum()
        output[:, y, x] = sum(w * v[:, r, c] for w, (r, c) in zip(weights, keys))
    return image + module.gamma.scale * torch.from_numpy(output)[None]


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("size", [(4, 5), (6, 3), (1, 4), (4, 1), (1, 1)])
def test_equals_the_formula(position, size, scale):
    module = build(position, size=size, scale=scale)
    assert module.scale == scale
    image = torch.randn(1, 6, *size, dtype=torch.float64)
    torch.testing.assert_close(module(image), by_loops(module, image))


def test_parameters():
    module = CrissCrossAttention2d(16, position="relative", input_size=(5, 7), dtype=torch.float64)
    assert module.height_rel.shape == (9, 2)
    assert module.width_rel.shape == (13, 2)
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    assert CrissCrossAttention2d(4).width == 1
    plain = CrissCrossAttention2d(16)
    assert sum(p.numel() for p in plain.parameters()) == 2 * (16 * 2 + 2) + 16 * 16 + 16 + 1
    assert "reduction=8, position='relative', scale=1, input_size=(5, 7)" in repr(module)


@pytest.mark.parametrize("layer", [CrissCrossAttention2d, BilateralCrissCross2d])
def test_initial_gate(layer):
    module = layer(16, gate_init=0.5)
    assert layer(16).gamma.scale == 0
    assert module.gamma.scale == 0.5
    torch.nn.init.ones_(module.gamma.scale)
    module.gamma.reset_parameters()
    assert module.gamma.scale == 0.5


def test_a_map_of_another_size_interpolates_the_tables():
    module, exact = build(size=(4, 5)), build(size=(7, 3))
    exact.load_state_dict(module.state_dict())
    torch.testing.assert_close(exact.height_rel, resize_table(module.height_rel, 7))
    torch.testing.assert_close(exact.width_rel, resize_table(module.width_rel, 3))
    x = torch.randn(2, 6, 7, 3, dtype=torch.float64)
    torch.testing.assert_close(module(x), exact(x))
    torch.testing.assert_close(module(x[:1]), by_loops(exact, x[:1]))

    fixed = build(size=(4, 5), resize_tables=False)
    assert fixed(x.new_zeros(1, 6, 4, 5)).shape == (1, 6, 4, 5)
    with pytest.raises(ValueError, match=r"attends on a \(7, 3\) map, but the relative tables are made for \(4, 5\)"):
        fixed(x)
    with pytest.raises(RuntimeError, match="size mismatch for height_rel"):
        fixed.load_state_dict(exact.state_dict())


@pytest.mark.parametrize("channels", [16, 24])
def test_equals_mmcv(channels):
    """Compare results, gradients and state_dict."""
    stock = pytest.importorskip("mmcv.ops.cc_attention", reason="mmcv is not installed").CrissCrossAttention
    assert stock.__module__ == "mmcv.ops.cc_attention"  # mmcv's layer, not our drop-in
    theirs, ours = stock(channels).double(), CrissCrossAttention2d(channels, dtype=torch.float64)
    drawn(theirs, 0.3)
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = torch.randn(2, channels, 6, 9, dtype=torch.float64)
    for module in (ours, theirs):
        module(x).square().sum().backward()
    torch.testing.assert_close(ours(x), theirs(x))
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, msg=name)
