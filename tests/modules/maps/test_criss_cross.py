"""Criss-cross attention in plain loops and as mmcv's; tables of relative positions for maps of another size."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from attn_plugins.modules import AAConv2d, BilateralCrissCross2d, CrissCrossAttention2d, NonLocal2d
from attn_plugins.terms.relative_table import resize_table
from tests.helpers.module_inputs import drawn
from tests.modules.loops import softmax


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
        output[:, y, x] = sum(w * v[:, r, c] for w, (r, c) in zip(softmax(logits), keys))
    return image + module.gamma.scale * torch.from_numpy(output)[None]


@pytest.mark.parametrize("position", ["none", "relative"])
@pytest.mark.parametrize(("size", "scale"), [((4, 5), 1.0), ((6, 3), 0.3), ((1, 4), 0.3), ((4, 1), 1.0), ((1, 1), 0.3)])
def test_equals_the_formula(position, size, scale):
    module = drawn(CrissCrossAttention2d(6, 2, position, size, scale=scale, dtype=torch.float64))
    image = torch.randn(1, 6, *size, dtype=torch.float64)
    torch.testing.assert_close(module(image), by_loops(module, image))


@pytest.mark.parametrize("layer", [CrissCrossAttention2d, BilateralCrissCross2d])
def test_initial_gate(layer):
    module = layer(16, gate_init=0.5)
    assert layer(16).gamma.scale == 0
    assert module.gamma.scale == 0.5
    torch.nn.init.ones_(module.gamma.scale)
    module.gamma.reset_parameters()
    assert module.gamma.scale == 0.5


RELATIVE = {
    "AAConv2d": lambda size, **options: AAConv2d(6, 8, 3, 8, 4, 2, input_size=size, **options),
    "CrissCrossAttention2d": lambda size, **options: CrissCrossAttention2d(6, 2, "relative", size, **options),
    "NonLocal2d": lambda size, **options: NonLocal2d(6, position="relative", input_size=size, **options),
}


@pytest.mark.parametrize("kind", RELATIVE)
def test_a_map_of_another_size_interpolates_the_tables(kind):
    module, exact, fixed = (
        RELATIVE[kind](size, resize_tables=resizes, dtype=torch.float64).eval()
        for size, resizes in (((4, 5), True), ((7, 3), True), ((4, 5), False))
    )
    exact.load_state_dict(drawn(module).state_dict())
    torch.testing.assert_close(exact.height_rel, resize_table(module.height_rel, 7))
    torch.testing.assert_close(exact.width_rel, resize_table(module.width_rel, 3))
    x = torch.randn(2, 6, 7, 3, dtype=torch.float64)
    torch.testing.assert_close(module(x), exact(x))
    assert fixed(x.new_zeros(1, 6, 4, 5)).shape[2:] == (4, 5)
    with pytest.raises(ValueError, match=r"attends on a \(7, 3\) map, but the relative tables are made for \(4, 5\)"):
        fixed(x)
    with pytest.raises(RuntimeError, match="size mismatch for height_rel"):
        fixed.load_state_dict(exact.state_dict())


def test_tables_of_another_size():
    table = torch.randn(9, 3, dtype=torch.float64)
    assert resize_table(table, 5) is table
    longer = resize_table(table, 9)
    assert longer.shape == (17, 3)
    torch.testing.assert_close(longer[::2], table)  # twice as many offsets: every second one is unchanged
    torch.testing.assert_close(longer[1::2], (table[1:] + table[:-1]) / 2)
    torch.testing.assert_close(resize_table(table, 3), table[::2])
    torch.testing.assert_close(resize_table(table, 1), table[4:5])
    assert resize_table(table[:1], 3).shape == (5, 3)
