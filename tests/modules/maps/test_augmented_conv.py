"""Attention-augmented convolution: the paper's equations in plain loops, sizes and arithmetic."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from attn_plugins.core.strides import memory_format
from attn_plugins.modules import AAConv2d
from attn_plugins.modules.maps.augmented_conv import widths
from attn_plugins.modules.maps.parts import memory_format as formats
from attn_plugins.terms.relative_table import resize_table
from tests.helpers.memory_format_checks import FORMATS, has_format
from tests.modules.loops import encode, softmax


def make(dk=24, dv=8, heads=4, channels=16, out=32, size=(5, 7), kernel_size=3, **options) -> AAConv2d:
    torch.manual_seed(0)
    options = dict(input_size=size, dtype=torch.float64) | options
    return AAConv2d(channels, out, kernel_size, dk, dv, heads, **options)


# --- the paper's equations, one query, key and head at a time ---------------------------------------------------------


@torch.no_grad()
def by_loops(layer: AAConv2d, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute Eq. 2 to 4 for a map (C, H, W): attended features (d_v, H, W) and weights (M, H, W, H, W)."""
    _, H, W = x.shape
    M, dk, dv = layer.num_heads, layer.dk // layer.num_heads, layer.dv // layer.num_heads
    projected = np.einsum("oc,chw->ohw", layer.qkv.weight.flatten(1).numpy(), x.numpy())
    q, k, v = np.split(projected, (layer.dk, 2 * layer.dk))
    attended, weights = np.zeros((layer.dv, H, W)), np.zeros((M, H, W, H, W))
    pixels = list(itertools.product(range(H), range(W)))
    for m, (y, z) in itertools.product(range(M), pixels):
        query, logits = q[m * dk : (m + 1) * dk, y, z], []
        for r, c in pixels:
            key = k[m * dk : (m + 1) * dk, r, c]
            if layer.position == "relative":
                key = key + layer.height_rel[r - y + H - 1].numpy() + layer.width_rel[c - z + W - 1].numpy()
            logits.append(query @ key / math.sqrt(dk))
        weights[m, y, z] = softmax(logits).reshape(H, W)
        heads = slice(m * dv, (m + 1) * dv)
        attended[heads, y, z] = sum(weights[m, y, z, r, c] * v[heads, r, c] for r, c in pixels)
    output = np.einsum("oc,chw->ohw", layer.proj.weight.flatten(1).numpy(), attended)
    return torch.from_numpy(output), torch.from_numpy(weights)


@pytest.mark.parametrize(
    ("position", "size"),
    [("relative", (5, 7)), ("relative", (1, 4)), ("relative", (3, 1)), ("none", (5, 7)), ("none", (1, 1))],
)
def test_equals_the_formula(size, position):
    layer, x = make(size=size, position=position), torch.randn(2, 16, *size, dtype=torch.float64)
    attended, weights = map(torch.stack, zip(*(by_loops(layer, image) for image in x)))
    torch.testing.assert_close(layer(x), torch.cat((layer.conv(x), attended), 1))
    torch.testing.assert_close(layer.attention_maps(x), weights)


@pytest.mark.parametrize("size", [(3, 4), (1, 3), (4, 1), (1, 1)])
@pytest.mark.parametrize("position", ["coordconv", "sine"])
def test_positions_enter_with_the_input(size, position):
    """Section 4.5 uses (x, y, r), both axes from -1 to 1 and the distance from the centre, or sines as are added."""
    (H, W), x = size, torch.randn(16, *size, dtype=torch.float64)
    coordinates, sines = torch.zeros(3, H, W, dtype=torch.float64), torch.zeros_like(x)
    for i, j in itertools.product(range(H), range(W)):
        across, down = (2 * place / (n - 1) - 1 if n > 1 else 0.0 for place, n in ((j, W), (i, H)))
        coordinates[:, i, j] = torch.tensor([across, down, math.hypot(across, down)])
        sines[:, i, j] = torch.from_numpy(np.concatenate((encode(i, 8), encode(j, 8))))
    layer = make(position=position, size=size)
    attended, _ = by_loops(layer, torch.cat((x, coordinates)) if position == "coordconv" else x + sines)
    torch.testing.assert_close(layer(x[None])[0, 24:], attended, rtol=1e-6, atol=1e-6)  # positions are in float32


# --- strides, pooling, sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stride", "pool", "size"),
    [
        (1, True, (8, 11)),
        (2, False, (7, 4)),
        (2, True, (8, 11)),
        (3, True, (7, 4)),
        (3, False, (8, 11)),
        (2, True, (1, 5)),
    ],
)
def test_strides_and_pooling(stride, pool, size):
    layer = make(stride=stride, pool=pool, size=(8, 11))
    x = torch.randn(2, 16, *size, dtype=torch.float64)

    def averaged(t, step):
        """Average windows of 2 * step - 1 pixels around every step-th pixel, ignoring pixels outside the map."""
        r, (rows, columns) = step - 1, (range(0, n, step) for n in t.shape[2:])
        means = [t[:, :, max(0, i - r) : i + r + 1, max(0, j - r) : j + r + 1].mean((2, 3))
                 for i in rows for j in columns]  # fmt: skip
        return torch.stack(means, -1).unflatten(2, (len(rows), len(columns)))

    source = averaged(x, stride)
    output = tuple(source.shape[2:])
    if pool:
        source = averaged(source, 2)
    result = layer(x)
    assert tuple(result.shape) == (2, 32, *(-(-n // stride) for n in size))
    plain = make(size=tuple(source.shape[2:]))
    plain.load_state_dict(layer.state_dict() | {n: t for n, t in plain.state_dict().items() if "_rel" in n})
    plain.height_rel.data = resize_table(layer.height_rel.data, source.shape[2])
    plain.width_rel.data = resize_table(layer.width_rel.data, source.shape[3])
    attended = plain(source)[:, 24:]
    if pool:
        attended = F.interpolate(attended, output, mode="bilinear", align_corners=False)
    torch.testing.assert_close(result[:, 24:], attended)
    torch.testing.assert_close(result[:, :24], layer.conv(x))


def test_without_value_channels_it_is_a_convolution_and_with_all_attention():
    plain, x = make(dv=0, dk=0), torch.randn(2, 16, 5, 7, dtype=torch.float64)
    assert set(plain.state_dict()) == {"conv.weight"}
    torch.testing.assert_close(plain(x), F.conv2d(x, plain.conv.weight, padding=1))
    assert set(make(dv=32).state_dict()) == {"qkv.weight", "proj.weight", "height_rel", "width_rel"}


# --- the paper's arithmetic -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kappa", "nu", "k"), [(0.25, 0.25, 3), (0.5, 0.25, 1), (1.0, 1.0, 3)])
def test_parameters_change_by_equation_5(kappa, nu, k):
    F_in, F_out = 48, 64
    layer = AAConv2d.from_ratios(F_in, F_out, k, kappa, nu, 8, 0, position="none")
    change = sum(p.numel() for p in layer.parameters()) - F_in * F_out * k * k
    assert change == F_in * F_out * (2 * kappa + (1 - k * k) * nu + F_out / F_in * nu**2)


def test_ratios():
    assert widths(128, 0.2, 0.1) == (160, 8)
    assert widths(512, 0.2, 0.1) == (160, 48)
    assert widths(512, 0.5, 0.5) == (256, 256)
    assert widths(100, 0.29, 0.29, 1, 0) == (29, 29)
    assert widths(64, 0.2, 0.0) == (0, 0)
    assert widths(72, 0.1, 0.05, 4, 1, 1) == (4, 4)


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("dv", [8, 32])
def test_the_format_of_the_input_is_asked_for_once(monkeypatch, dv, layout):
    asked = []
    monkeypatch.setattr(formats, "memory_format", lambda x: asked.append(x) or memory_format(x))
    layer = make(dv=dv, dtype=torch.float32)
    x = torch.randn(2, 16, 5, 7).contiguous(memory_format=FORMATS[layout])
    with torch.no_grad():
        assert has_format(layer(x), layout)
    assert sum(other is x for other in asked) == 1


def test_no_map_of_all_pairs_is_stored():
    """Storing all pairs would take 1 GiB: 2 * 8 * 64^4 floats."""
    layer = make(dk=160, dv=8, heads=8, out=8, size=(64, 64), dtype=torch.float32)
    x = torch.randn(1, 16, 64, 64, requires_grad=True)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        layer(x).sum().backward()
    largest = max(e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")
    assert largest < 64 * 2**20


# --- bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((64, -0.1, 0.1), "kappa must be at least 0, got -0.1"),
        ((64, 0.1, 1.5), "nu must be from 0 to 1, got 1.5"),
        ((64, 0.1, 0.1, 8), "nu = 0.1 of 64 channels is less than one value channel of 8 heads"),
        ((64, 0.05, 0.5, 8, 0), "kappa = 0.05 of 64 channels is less than one key channel of 8 heads"),
    ],
)
def test_bad_ratios(arguments, message):
    with pytest.raises(ValueError, match=message):
        widths(*arguments)
