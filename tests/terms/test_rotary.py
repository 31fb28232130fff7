"""Rotary embedding: complex numbers, its relative property, and timm's classes."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from attn_plugins.terms.rotary import (
    axial_angles,
    axis_frequencies,
    centred_frequencies,
    centred_positions,
    draw_mixed_frequencies,
    index_positions,
    mixed_angles,
    period_frequencies,
    pixel_frequencies,
    pixel_positions,
    rotate,
    rotation,
)

SIZES = [(3, 5), (6, 4), (1, 7), (4, 4)]


def turned_by_loops(x, angles, halves):
    """Multiply every pair of channels, as a complex number, by e^(i angle)."""
    out = torch.empty_like(x)
    half = x.shape[-1] // 2
    for position in range(x.shape[0]):
        for n in range(half):
            one, two = (n, n + half) if halves else (2 * n, 2 * n + 1)
            z = complex(x[position, one], x[position, two]) * cmath.exp(1j * float(angles[position, n]))
            out[position, one], out[position, two] = z.real, z.imag
    return out


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_it_is_a_product_of_complex_numbers(size, halves):
    torch.manual_seed(0)
    H, W = size
    angles = torch.randn(H * W, 4, dtype=torch.float64)
    x = torch.randn(2, 3, H * W, 8, dtype=torch.float64)
    out = rotate(x, rotation(angles), halves=halves)
    for batch in range(2):
        for head in range(3):
            torch.testing.assert_close(out[batch, head], turned_by_loops(x[batch, head], angles, halves))


@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_axial_angles(size, columns_first):
    H, W = size
    frequencies = axis_frequencies(12, 100.0)
    angles = axial_angles(index_positions(size, offset=0.5), frequencies, columns_first=columns_first)
    assert angles.shape == (H * W, 6)
    for i in range(H):
        for j in range(W):
            for n in range(3):
                by_row, by_column = ((p + 0.5) * 100 ** (-4 * n / 12) for p in (i, j))
                first, second = (by_column, by_row) if columns_first else (by_row, by_column)
                assert float(angles[i * W + j, n]) == pytest.approx(first, rel=1e-6)
                assert float(angles[i * W + j, 3 + n]) == pytest.approx(second, rel=1e-6)


@pytest.mark.parametrize("columns_first", [False, True])
def test_mixed_angles(columns_first):
    H, W = 3, 5
    frequencies = torch.randn(2, 4, 6, dtype=torch.float64)
    angles = mixed_angles(index_positions((H, W)), frequencies, columns_first=columns_first)
    assert angles.shape == (4, H * W, 6)
    x, y = (0, 1) if columns_first else (1, 0)
    for head in range(4):
        for i in range(H):
            for j in range(W):
                expected = j * frequencies[x, head] + i * frequencies[y, head]
                torch.testing.assert_close(angles[head, i * W + j], expected)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("kind", ["axial", "mixed"])
def test_products_depend_on_relative_positions_alone(kind, halves):
    torch.manual_seed(0)
    H, W = 5, 7
    positions = index_positions((H, W))
    if kind == "axial":
        angles = axial_angles(positions, axis_frequencies(16).double())
    else:
        angles = mixed_angles(positions, draw_mixed_frequencies(16, 1).double())[0]
    q, k = torch.randn(2, 16, dtype=torch.float64)
    turned_q, turned_k = (rotate(t.expand(H * W, 16), rotation(angles), halves=halves) for t in (q, k))
    products = (turned_q @ turned_k.t()).view(H, W, H, W)
    for dy in range(-2, 3):
        for dx in range(-2, 3):
            same = [
                products[i, j, i + dy, j + dx]
                for i in range(H)
                for j in range(W)
                if 0 <= i + dy < H and 0 <= j + dx < W
            ]
            torch.testing.assert_close(torch.stack(same), same[0].expand(len(same)))
    torch.testing.assert_close(products[0, 0, 0, 0], q @ k)
    assert not torch.allclose(products[0, 0, 0, 3], products[0, 0, 3, 0])


def test_prefix_tokens_are_left_alone():
    torch.manual_seed(0)
    turned = rotation(torch.randn(12, 4))
    x = torch.randn(2, 3, 5 + 12, 8)
    out = rotate(x, turned, prefix_tokens=5)
    assert torch.equal(out[:, :, :5], x[:, :, :5])
    assert torch.equal(out[:, :, 5:], rotate(x[:, :, 5:], turned))


def test_a_map_is_rotated_like_its_tokens():
    torch.manual_seed(0)
    turned = rotation(torch.randn(3 * 5, 4))
    x = torch.randn(2, 3, 3, 5, 8)
    on_map = rotate(x, type(turned)(*(t.view(3, 5, 4) for t in turned)))
    assert torch.equal(on_map.flatten(2, 3), rotate(x.flatten(2, 3), turned))


@pytest.mark.parametrize("halves", [False, True])
def test_gradients(halves):
    torch.manual_seed(0)
    x = torch.randn(1, 2, 1 + 6, 8, dtype=torch.float64, requires_grad=True)
    frequencies = torch.randn(2, 2, 4, dtype=torch.float64, requires_grad=True)

    def run(x, frequencies):
        angles = mixed_angles(index_positions((2, 3)), frequencies)
        return rotate(x, rotation(angles), halves=halves, prefix_tokens=1)

    assert torch.autograd.gradcheck(run, (x, frequencies))
    assert torch.autograd.gradgradcheck(run, (x, frequencies))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_the_result_alone(dtype):
    torch.manual_seed(0)
    angles = axial_angles(index_positions((40, 60)), axis_frequencies(16))
    x = torch.randn(1, 2, 2400, 16).to(dtype)
    out = rotate(x, rotation(angles))
    assert out.dtype == dtype
    assert torch.equal(out, rotate(x.float(), rotation(angles)).to(dtype))
    assert mixed_angles(index_positions((2, 3)), torch.randn(2, 2, 8, dtype=dtype)).dtype == torch.float32


@pytest.mark.parametrize("halves", [False, True])
def test_it_compiles(halves):
    torch.manual_seed(0)

    def run(x, frequencies):
        angles = mixed_angles(index_positions((3, x.shape[2] // 3)), frequencies)
        return rotate(x, rotation(angles), halves=halves)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for columns in (5, 4):
        x, frequencies = torch.randn(2, 2, 3 * columns, 8), torch.randn(2, 2, 4)
        torch.testing.assert_close(compiled(x, frequencies), run(x, frequencies))


def test_the_draw_is_axial_frequencies_turned():
    """The two axes of a head keep their lengths and stay perpendicular."""
    frequencies = draw_mixed_frequencies(16, 3, generator=torch.Generator().manual_seed(0))
    assert frequencies.shape == (2, 3, 8)
    assert torch.equal(frequencies, draw_mixed_frequencies(16, 3, generator=torch.Generator().manual_seed(0)))
    assert not torch.allclose(frequencies[:, 0], frequencies[:, 1])
    lengths = axis_frequencies(16, 10.0)
    torch.testing.assert_close(frequencies.norm(dim=0), lengths.repeat(3, 2))
    one, two = frequencies.chunk(2, -1)
    torch.testing.assert_close((one * two).sum(0), torch.zeros(3, 4), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: axis_frequencies(6), "width must be a positive multiple of 4.*got 6"),
        (lambda: pixel_frequencies(8, 1), "resolution must be at least 2 pixels, got 1"),
        (lambda: period_frequencies(8, 0, 3), "shortest and longest must be positive periods, got 0 and 3"),
        (lambda: index_positions((3, 0)), r"size must be two ints, rows and columns.*got \(3, 0\)"),
        (lambda: index_positions((3, 3), reference=(2,)), r"reference must be two ints.*got \(2,\)"),
        (lambda: centred_positions((3, 3), normalise="mean"), "normalise must be one of .*, got 'mean'"),
        (lambda: mixed_angles(index_positions((2, 2)), torch.zeros(3, 4)), r"frequencies .*\(2, ..., d/2\).*\(3, 4\)"),
        (lambda: rotate(torch.zeros(7, 8), rotation(torch.zeros(6, 4))), r"x must have shape.*got \(7, 8\)"),
        (lambda: rotate(torch.zeros(6, 6), rotation(torch.zeros(6, 4))), r"x must have shape.*got \(6, 6\)"),
        (lambda: rotate(torch.zeros(6, 8), rotation(torch.zeros(6, 4)), prefix_tokens=1), "1 \\+ 6, 8"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- timm ---------------------------------------------------------------------------------------------------------


def check_against(stock, angles, size, halves=False):
    """Check for the same rotation of random tokens, up to float32's rounding of the largest angle."""
    timm = pytest.importorskip("timm.layers.pos_embed_sincos")
    atol = 2e-6 + 5e-7 * float(angles.abs().max())
    embedded = stock.get_embed(list(size))
    x = torch.randn(2, 3, size[0] * size[1], 2 * angles.shape[-1])
    expected = timm.apply_rot_embed_cat(x, embedded, half=halves)
    torch.testing.assert_close(rotate(x, rotation(angles), halves=halves), expected, atol=atol, rtol=1e-5)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("indexing", ["ij", "xy"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "stock, of_positions",
    [
        (dict(), dict()),
        (dict(temperature=100.0), dict()),
        (dict(ref_feat_shape=[16, 14]), dict(reference=(16, 14))),
        (dict(ref_feat_shape=[2, 3], grid_offset=0.5), dict(reference=(2, 3), offset=0.5)),
    ],
)
def test_cat_is_timms(size, indexing, halves, stock, of_positions):
    timm = pytest.importorskip("timm.layers.pos_embed_sincos")
    module = timm.RotaryEmbeddingCat(24, in_pixels=False, grid_indexing=indexing, rotate_half=halves, **stock)
    frequencies = axis_frequencies(24, stock.get("temperature", 10000.0))
    positions = index_positions(size, **of_positions)
    check_against(module, axial_angles(positions, frequencies, columns_first=indexing == "xy"), size, halves)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("reference", [None, (7, 9)])
@pytest.mark.parametrize("size", SIZES)
def test_cat_in_pixels_is_timms(size, reference, linear):
    timm = pytest.importorskip("timm.layers.pos_embed_sincos")
    module = timm.RotaryEmbeddingCat(
        24, max_res=96, in_pixels=True, linear_bands=linear, ref_feat_shape=list(reference) if reference else None
    )
    positions = pixel_positions(size, reference=reference)
    check_against(module, axial_angles(positions, pixel_frequencies(24, 96, linear)), size)


@pytest.mark.parametrize("indexing", ["ij", "xy"])
@pytest.mark.parametrize("size", SIZES)
def test_mixed_is_timms(size, indexing):
    timm = pytest.importorskip("timm.layers.pos_embed_sincos")
    torch.manual_seed(0)
    stock = timm.RotaryEmbeddingMixed(3 * 24, depth=2, num_heads=3, grid_indexing=indexing)
    positions = index_positions(size)
    angles = mixed_angles(positions, stock.freqs, columns_first=indexing == "xy")
    expected = stock.get_embed(list(size))
    x = torch.randn(2, 3, size[0] * size[1], 24)
    for depth in range(2):
        torch.testing.assert_close(
            rotate(x, rotation(angles[depth])), timm.apply_rot_embed_cat(x, expected[depth]), atol=1e-5, rtol=1e-5
        )


def test_the_draw_is_timms():
    timm = pytest.importorskip("timm.layers.pos_embed_sincos")
    torch.manual_seed(0)
    expected = timm.init_random_2d_freqs(24, 1, 3, temperature=10.0)[:, 0]
    torch.manual_seed(0)
    torch.testing.assert_close(draw_mixed_frequencies(24, 3), expected)


@pytest.mark.parametrize("normalise", ["separate", "min", "max"])
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("indexing", ["ij", "xy"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "options", [dict(), dict(temperature=10.0, grid_offset=0.25), dict(min_period=0.3, max_period=9.0)]
)
def test_dinov3_is_timms(size, indexing, halves, normalise, options):
    timm = pytest.importorskip("timm.layers.pos_embed_sincos")
    module = timm.RotaryEmbeddingDinoV3(
        24, normalize_coords=normalise, grid_indexing=indexing, rotate_half=halves, **options
    )
    positions = centred_positions(size, offset=options.get("grid_offset", 0.0), normalise=normalise)
    if "min_period" in options:
        frequencies = period_frequencies(24, options["min_period"], options["max_period"])
    else:
        frequencies = centred_frequencies(24, options.get("temperature", 100.0))
    check_against(module, axial_angles(positions, frequencies, columns_first=indexing == "xy"), size, halves)


def test_a_whole_attention_of_timms_eva():
    """Combine our rotation with the weights of EVA-02's attention layer, which has a cls token."""
    eva = pytest.importorskip("timm.models.eva")
    timm = pytest.importorskip("timm.layers.pos_embed_sincos")
    torch.manual_seed(0)
    H, W, heads = 4, 6, 3
    layer = eva.EvaAttention(48, num_heads=heads, qkv_fused=True, num_prefix_tokens=1, scale_norm=False).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    embedded = timm.RotaryEmbeddingCat(16, in_pixels=False, ref_feat_shape=[16, 16]).get_embed([H, W])
    x = torch.randn(2, 1 + H * W, 48)
    bias = torch.cat((layer.q_bias, layer.k_bias, layer.v_bias)) if layer.q_bias is not None else layer.qkv.bias
    q, k, v = torch.nn.functional.linear(x, layer.qkv.weight, bias).view(2, -1, 3, heads, 16).permute(2, 0, 3, 1, 4)
    turned = rotation(axial_angles(index_positions((H, W), reference=(16, 16)), axis_frequencies(16)))
    q, k = (rotate(t, turned, prefix_tokens=1) for t in (q, k))
    weights = (q @ k.transpose(2, 3) / math.sqrt(16)).softmax(-1)
    ours = layer.proj((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(ours, layer(x, rope=embedded), atol=1e-5, rtol=1e-4)
