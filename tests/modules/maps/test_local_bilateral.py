"""Local bilateral attention: the thesis' formulas in plain loops."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from attn_plugins.modules import LocalBilateralConv2d

KINDS = [
    dict(geometric=False),
    dict(content=False),
    dict(),
    dict(geometric=False, iterations=3),
    dict(iterations=3),
    dict(shared=True),
    dict(shared=True, iterations=3),
    dict(content=False, shared=True),
    dict(activation="relu"),
    dict(activation="relu", shared=True, iterations=3),
]


def layer(in_channels=6, out_channels=8, kernel_size=3, *, dtype=torch.float64, **options) -> LocalBilateralConv2d:
    torch.manual_seed(0)
    made = LocalBilateralConv2d(in_channels, out_channels, kernel_size, **{"num_heads": 2, **options}).to(dtype).eval()
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.2)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
    return made


def linear(module: LocalBilateralConv2d, name: str, x: np.ndarray) -> np.ndarray:
    """Project the vector of one position: W x + b, BatchNorm and ReLU, each if present."""
    convolution, *rest = getattr(module, name)
    y = convolution.weight.detach().numpy()[:, :, 0, 0] @ x
    if module.shared and name in ("position", "output"):
        assert convolution.bias is None
        assert not rest
        return y
    norm = rest[0]
    y = (y + convolution.bias.detach().numpy() - norm.running_mean.numpy()) / np.sqrt(
        norm.running_var.numpy() + norm.eps
    )
    y = y * norm.weight.detach().numpy() + norm.bias.detach().numpy()
    return np.maximum(y, 0) if module.activation == "relu" and name != "position" else y


def by_loops(module: LocalBilateralConv2d, image: torch.Tensor) -> torch.Tensor:
    """Compute Equation 4.9 and Algorithm 1, position by position and head by head."""
    x = image.numpy()
    _, _, H, W = x.shape
    (ky, kx), (sy, sx), (py, px), (dy, dx) = module.kernel_size, module.stride, module.padding, module.dilation
    Hq, Wq = module.attention_size((H, W))
    M, d = module.num_heads, module.out_channels // module.num_heads
    output = np.zeros((1, module.out_channels, Hq, Wq))
    for y, z in itertools.product(range(Hq), range(Wq)):
        centre = x[0, :, y * sy - py + ky // 2 * dy, z * sx - px + kx // 2 * dx]
        v = linear(module, "query", centre)
        gamma = linear(module, "position", v).reshape(M, ky * kx) if module.geometric else None
        attended = np.zeros(module.out_channels)
        for m in range(M):
            head = slice(m * d, (m + 1) * d)
            places = [
                (i * kx + j, y * sy - py + i * dy, z * sx - px + j * dx)
                for i, j in itertools.product(range(ky), range(kx))
                if 0 <= y * sy - py + i * dy < H and 0 <= z * sx - px + j * dx < W
            ]
            values = [linear(module, "query" if module.shared else "value", x[0, :, r, c])[head] for _, r, c in places]
            logits = np.zeros(len(places))
            if module.content:
                keys = [linear(module, "query" if module.shared else "key", x[0, :, r, c])[head] for _, r, c in places]
                logits = np.array([v[head] @ key for key in keys])  # c_j
                for _ in range(module.iterations - 1):
                    a = np.exp(logits) / np.exp(logits).sum()
                    updated = sum(weight * key for weight, key in zip(a, keys))
                    square = updated @ updated
                    u = square / (1 + square) * updated / (math.sqrt(square) or 1)
                    logits = logits + np.array([u @ key for key in keys])
            if gamma is not None:
                logits = logits + gamma[m, [tap for tap, _, _ in places]]
            weights = np.exp(logits) / np.exp(logits).sum()
            attended[head] = sum(weight * value for weight, value in zip(weights, values))
        output[0, :, y, z] = linear(module, "output", attended)
    return torch.from_numpy(output)


GEOMETRIES: list[dict[str, Any]] = [
    dict(), dict(stride=2), dict(dilation=2), dict(kernel_size=(1, 5)), dict(padding=0, stride=(1, 2)),
    dict(kernel_size=1), dict(dilation=3, kernel_size=5),
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(
    ("geometry", "options"), [(GEOMETRIES[(n + more) % 7], kind) for n, kind in enumerate(KINDS) for more in (0, 3)]
)
def test_equals_the_formula(geometry, options):
    module, image = layer(**geometry, **options), torch.randn(1, 6, 5, 7, dtype=torch.float64)
    torch.testing.assert_close(module(image), by_loops(module, image), rtol=1e-4, atol=1e-5)  # eps of squash
    kernel_size, padding, dilation = module.kernel_size, module.padding, module.dilation
    convolution = nn.Conv2d(6, 8, kernel_size, module.stride, padding, dilation, device="meta")
    assert module(image).shape == convolution(torch.empty(1, 6, 5, 7, device="meta")).shape
    if "padding" not in geometry:
        assert padding == tuple(k // 2 * d for k, d in zip(kernel_size, dilation))


def test_a_map_smaller_than_the_window():
    with pytest.raises(ValueError, match=r"x is too small: \(2, 4\) .* has no room for a kernel of \(3, 3\)"):
        layer(dtype=torch.float32, padding=0)(torch.randn(1, 6, 2, 4))
