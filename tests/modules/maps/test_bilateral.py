"""Bilateral non-local and criss-cross attention: the thesis' Eq. 3.9 to 3.12 in plain loops."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from attn_plugins.modules import BilateralCrissCross2d, BilateralNonLocal2d
from attn_plugins.modules.maps import bilateral as bilateral_module
from tests.helpers.module_inputs import OUTSIDE, drawn
from tests.modules.loops import predicted_logits, softmax


def build(kind, **options) -> nn.Module:
    return drawn(kind(6, dtype=torch.float64, **{"reduction": 2, "kernel_size": 3, **options}))


@torch.no_grad()
def by_loops(module: nn.Module, image: torch.Tensor) -> torch.Tensor:
    """Compute the definition for every query and key separately."""
    _, C, H, W = image.shape
    cross = isinstance(module, BilateralCrissCross2d)
    (ky, kx), d = module.kernel_size, module.width
    layers = (module.query_conv, module.key_conv, module.value_conv) if cross else (module.theta, module.phi, module.g)
    q, k, v, f = (layer(image)[0].numpy() for layer in (*layers, module.position))
    output = np.zeros((v.shape[0], H, W))
    for y, x in itertools.product(range(H), range(W)):
        keys = [(r, c) for r, c in itertools.product(range(H), range(W)) if not cross or r == y or c == x]
        taps: list[int | None] = []
        for r, c in keys:
            i, j = r - y + ky // 2, c - x + kx // 2
            if not cross:
                taps.append(i * kx + j if 0 <= i < ky and 0 <= j < kx else None)
            elif c == x:  # the query's column, including the query
                taps.append(i if 0 <= i < ky else None)
            else:  # the query's row, whose centre is not predicted a second time
                taps.append(ky + j - (j > kx // 2) if 0 <= j < kx else None)
        position = predicted_logits(f[:, y, x], taps, module.outside, module.smoothing, d)
        scale = module.scale if cross else 1 / math.sqrt(d)
        logits = np.array([scale * (q[:, y, x] @ k[:, r, c]) for r, c in keys]) + position
        output[:, y, x] = sum(w * v[:, r, c] for w, (r, c) in zip(softmax(logits), keys))
    attended = torch.from_numpy(output)[None]
    return image + (module.gamma.scale * attended if cross else module.conv_out(attended))


@pytest.mark.parametrize(("outside", "smoothing"), OUTSIDE)
@pytest.mark.parametrize(
    ("kind", "kernel_size"),
    [(BilateralNonLocal2d, 3), (BilateralNonLocal2d, (5, 1)), (BilateralCrissCross2d, 3), (BilateralCrissCross2d, 15)],
)
def test_equals_the_formula(kind, outside, smoothing, kernel_size):
    module = build(kind, outside=outside, smoothing=smoothing, kernel_size=kernel_size)
    image = torch.randn(1, 6, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(module(image), by_loops(module, image))


@pytest.mark.parametrize("rows", [1, 3])
def test_chunks_change_nothing(rows, monkeypatch):
    module, x = build(BilateralNonLocal2d), torch.randn(2, 6, 7, 4, dtype=torch.float64, requires_grad=True)
    results = []
    for chunk in (1 << 26, 2 * 4 * 28 * rows):
        monkeypatch.setattr(bilateral_module, "CHUNK", chunk)
        output = module(x)
        results.append([output, *torch.autograd.grad(output.square().sum(), [x, *module.parameters()])])
    for whole, parts in zip(*results):
        torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("cross", [False, True])
def test_a_checkpoint_of_mmcv_gives_its_results(cross):
    """Without position logits, the layers are criss-cross and non-local attention."""
    options = dict(outside="zero", smoothing="sqrt_d")
    if cross:
        theirs = pytest.importorskip("mmcv.ops", reason="mmcv is not installed").CrissCrossAttention(16)
        ours = BilateralCrissCross2d(16, content_scale=1.0, **options)
    else:
        theirs = pytest.importorskip("mmcv.cnn", reason="mmcv is not installed").NonLocal2d(16)
        ours = BilateralNonLocal2d(16, **options)
    weights = {key.replace(".conv.", "."): value for key, value in drawn(theirs, 0.3).state_dict().items()}
    missing, unexpected = ours.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all(key.startswith("position.") for key in missing)
    for parameter in ours.position.parameters():
        nn.init.zeros_(parameter)
    x = torch.randn(2, 16, 6, 9)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
