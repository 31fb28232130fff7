"""Attention-augmented convolution: the paper's algorithm, sizes and arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from attn_plugins.modules import AAConv2d
from attn_plugins.modules.maps.augmented_conv import widths
from attn_plugins.terms.relative_table import resize_table


def make(dk=24, dv=8, heads=4, channels=16, out=32, size=(5, 7), kernel_size=3, **options) -> AAConv2d:
    torch.manual_seed(0)
    options = dict(input_size=size, dtype=torch.float64) | options
    return AAConv2d(channels, out, kernel_size, dk, dv, heads, **options)


def numpy_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


# --- the algorithm of the paper's Figures 7 and 8, in NumPy, channels last ---------------------------------------


def relative_to_absolute(x):
    """Turn (B, M, L, 2L - 1) over offsets into (B, M, L, L) over keys by padding, flattening and slicing."""
    B, M, L, _ = x.shape
    x = np.concatenate((x, np.zeros((B, M, L, 1))), 3).reshape(B, M, 2 * L * L)
    x = np.concatenate((x, np.zeros((B, M, L - 1))), 2)
    return x.reshape(B, M, L + 1, 2 * L - 1)[:, :, :L, L - 1 :]


def one_axis(q, table, transpose):
    """Compute logits along the axis after the first map axis of q (B, M, H, W, d), tiled over the other axis."""
    B, M, H, W, _ = q.shape
    logits = np.einsum("bhxyd,md->bhxym", q, table).reshape(B, M * H, W, 2 * W - 1)
    logits = relative_to_absolute(logits).reshape(B, M, H, W, W)
    logits = np.tile(logits[:, :, :, None], (1, 1, 1, H, 1, 1))
    return logits.transpose(transpose).reshape(B, M, H * W, H * W)


def paper_attention(x, layer):
    """Compute self_attention_2d of Figure 8 with the layer's weights: x (B, H, W, F) -> (B, H, W, d_v)."""
    B, H, W, _ = x.shape
    M, dk, dv = layer.num_heads, layer.dk, layer.dv
    projected = x @ numpy_of(layer.qkv.weight)[:, :, 0, 0].T
    q, k, v = np.split(projected, (dk, 2 * dk), axis=3)

    def heads(t):
        return t.reshape(B, H, W, M, -1).transpose(0, 3, 1, 2, 4)

    q, k, v = heads(q * (dk // M) ** -0.5), heads(k), heads(v)
    flat = [t.reshape(B, M, H * W, -1) for t in (q, k, v)]
    logits = flat[0] @ flat[1].transpose(0, 1, 3, 2)
    if layer.position == "relative":
        logits = logits + one_axis(q, numpy_of(layer.width_rel), (0, 1, 2, 4, 3, 5))
        logits = logits + one_axis(q.transpose(0, 1, 3, 2, 4), numpy_of(layer.height_rel), (0, 1, 4, 2, 5, 3))
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    out = (weights @ flat[2]).reshape(B, M, H, W, -1).transpose(0, 2, 3, 1, 4).reshape(B, H, W, dv)
    return out @ numpy_of(layer.proj.weight)[:, :, 0, 0].T, weights


@pytest.mark.parametrize(
    ("position", "size"),
    [("relative", (5, 7)), ("relative", (1, 4)), ("relative", (3, 1)), ("none", (5, 7)), ("none", (1, 1))],
)
def test_it_is_the_papers_algorithm(size, position):
    layer = make(size=size, position=position)
    x = torch.randn(2, 16, *size, dtype=torch.float64)
    attended, weights = paper_attention(numpy_of(x.permute(0, 2, 3, 1)), layer)
    expected = torch.cat((layer.conv(x), torch.from_numpy(attended).permute(0, 3, 1, 2)), 1)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.attention_maps(x).flatten(4).flatten(2, 3), torch.from_numpy(weights))


@pytest.mark.parametrize("size", [(3, 4), (1, 3), (4, 1), (1, 1)])
def test_three_coordinates_enter(size):
    """Section 4.5 uses (x, y, r): both axes from -1 to 1, and the distance from the centre; a single one is at 0."""
    H, W = size
    x = torch.randn(2, 16, H, W, dtype=torch.float64)
    coordinates = torch.zeros(2, 3, H, W, dtype=torch.float64)
    for i in range(H):
        for j in range(W):
            across = 2 * j / (W - 1) - 1 if W > 1 else 0.0
            down = 2 * i / (H - 1) - 1 if H > 1 else 0.0
            coordinates[:, :, i, j] = torch.tensor([across, down, math.sqrt(across**2 + down**2)])
    layer = make(position="coordconv", size=size)
    assert layer.qkv.in_channels == 16 + 3
    attended, _ = paper_attention(numpy_of(torch.cat((x, coordinates), 1).permute(0, 2, 3, 1)), layer)
    torch.testing.assert_close(layer(x)[:, 24:], torch.from_numpy(attended).permute(0, 3, 1, 2), rtol=1e-6, atol=1e-6)


def test_sines_are_added():
    x = torch.randn(1, 16, 3, 4, dtype=torch.float64)
    layer = make(position="sine")
    encoded = x.clone()
    for i in range(3):
        for j in range(4):
            for n in range(4):
                for c, position in ((0, i), (8, j)):
                    angle = position / 10000 ** (2 * n / 8)
                    encoded[0, c + n, i, j] += math.sin(angle)
                    encoded[0, c + 4 + n, i, j] += math.cos(angle)
    attended, _ = paper_attention(numpy_of(encoded.permute(0, 2, 3, 1)), layer)
    expected = torch.from_numpy(attended).permute(0, 3, 1, 2)
    torch.testing.assert_close(layer(x)[:, 24:], expected, rtol=1e-6, atol=1e-6)  # sines are in float32


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


def test_the_extremes_are_a_convolution_and_attention_alone():
    plain = make(dv=0, dk=0)
    x = torch.randn(2, 16, 5, 7, dtype=torch.float64)
    assert set(plain.state_dict()) == {"conv.weight"}
    torch.testing.assert_close(plain(x), F.conv2d(x, plain.conv.weight, padding=1))
    attentional = make(dv=32)
    assert set(attentional.state_dict()) == {"qkv.weight", "proj.weight", "height_rel", "width_rel"}
    assert attentional(x).shape == (2, 32, 5, 7)
    with pytest.raises(ValueError, match="dv is 0: a plain convolution has no attention"):
        plain.attention_maps(x)


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
