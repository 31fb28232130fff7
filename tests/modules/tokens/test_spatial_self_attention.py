"""Attention over tokens on a grid: the terms of Zhu et al. (2019) in plain loops, and torch's own layer."""

from __future__ import annotations

from functools import cache
from itertools import cycle, product

import pytest
import torch
from torch import Tensor, nn

from attn_plugins.modules import SpatialSelfAttention
from tests.helpers.module_inputs import OUTSIDE
from tests.modules.loops import encode, predicted_logits, zhu_logit

GRID = (3, 4)
N, C, M = 12, 8, 2
TYPES = ["".join(bits) for bits in product("01", repeat=4)]


def module(attention_type="1111", gate=True, **options) -> SpatialSelfAttention:
    torch.manual_seed(0)
    made = SpatialSelfAttention(C, M, attention_type, **{"dtype": torch.float64, **options})
    for name, parameter in made.named_parameters():
        if gate or name != "gate":
            nn.init.normal_(parameter, std=0.4)
    return made.eval()


def tokens(count=3) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, N, C, dtype=torch.float64) for _ in range(count)]


def nonlocal_logits(layer, x, m, i, seen) -> list[float]:
    """Compute δ / σ of head m for query i of tokens x (N, C); ``seen`` keys enter the statistics."""
    k, (_, W) = layer.kernel_size, GRID
    places = [(j // W - i // W + k // 2, j % W - i % W + k // 2) for j in range(N)]
    taps = [dy * k + dx if 0 <= dy < k and 0 <= dx < k else None for dy, dx in places]
    values = layer.predictor(x[i]).view(M, -1)[m].numpy()
    return predicted_logits(values, taps, layer.outside, layer.smoothing, C // M, seen).tolist()


def by_loops(layer, query, key, value, padding=None, reach=None, prefix=0) -> Tensor:
    """Compute Eq. 2 key by key and head by head. The first ``prefix`` tokens have no position."""
    bits, d, scale = layer.attention_type, C // M, (C // M) ** -0.5
    q, k, v = (
        x @ w.T + b for x, w, b in zip((query, key, value), layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3))
    )

    @cache
    def relative(dy: int, dx: int) -> Tensor:
        rows, columns = (torch.from_numpy(encode(offset, C)) for offset in (dy, dx))
        return layer.row_table.weight @ rows + layer.column_table.weight @ columns

    output = torch.empty_like(query)
    for b in range(2):
        for i in range(prefix + N):
            heads = []
            for m in range(M):
                part = slice(m * d, m * d + d)
                logits, near = [], []
                for j in range(prefix + N):
                    placed = min(i, j) >= prefix
                    y, x = i - prefix, j - prefix
                    dy, dx = x // GRID[1] - y // GRID[1], x % GRID[1] - y % GRID[1]
                    near.append(reach is None or not placed or max(abs(dy), abs(dx)) <= reach)
                    R = torch.zeros(d, dtype=torch.float64)  # without a position of its own
                    if placed and (bits[1] == "1" or bits[3] == "1"):
                        R = relative(dy, dx)[part]
                    u, v_ = (None if t is None else t[part] for t in (layer.saliency, layer.position))
                    given = q[b, i, part], k[b, j, part], u, v_, R
                    added = layer.gate[m] * zhu_logit("0" + bits[1:], *given) if "1" in bits[1:] else 0
                    logit = scale * (zhu_logit(bits[0], *given) + added)
                    logits.append(torch.as_tensor(logit, dtype=torch.float64))
                seen = [near[j] and (padding is None or not padding[b, j]) for j in range(prefix + N)]
                if layer.kernel_size is not None:
                    more = [0.0] * (prefix + N)
                    if i >= prefix:
                        more[prefix:] = nonlocal_logits(layer, query[b, prefix:], m, i - prefix, seen[prefix:])
                    logits = [
                        logit + (delta if delta == -torch.inf else layer.gate[m] * delta)
                        for logit, delta in zip(logits, more)
                    ]
                logits = [logit if seen[j] else logit - torch.inf for j, logit in enumerate(logits)]
                heads.append(torch.stack(logits).softmax(0) @ v[b, :, part])
            output[b, i] = layer.out_proj(torch.cat(heads))
    return output


WINDOWS = [dict(), dict(spatial_range=3), dict(kernel_size=3), dict(kernel_size=3, spatial_range=3)]
CASES = [(bits, WINDOWS[(n + n // 4) % 4], (0, 1, 3)[n % 3]) for n, bits in enumerate(TYPES)] + [
    (bits, dict(spatial_range=reach, kernel_size=3, outside=outside, smoothing=smoothing), 0)
    for bits, reach, (outside, smoothing) in zip(cycle(["1000", "1111", "0010", "0000"]), cycle([-1, 3, 5]), OUTSIDE)
]


@torch.no_grad()
@pytest.mark.parametrize(("attention_type", "options", "prefix"), CASES, ids=str)
def test_equals_loops(attention_type, options, prefix):
    """The weights are the same if dropout or a mask makes the layer materialise them."""
    layer = module(attention_type, **options)
    torch.manual_seed(2)
    given = [torch.randn(2, prefix + N, C, dtype=torch.float64) for _ in range(3)]
    padding = torch.zeros(2, prefix + N, dtype=torch.bool)
    padding[1, [0, prefix + 3, prefix + 7]] = True
    expected = by_loops(layer, *given, padding, {-1: None, 3: 1, 5: 2}[layer.spatial_range], prefix)
    torch.testing.assert_close(layer(*given, GRID, padding, prefix_tokens=prefix), expected)
    nothing = torch.zeros(prefix + N, prefix + N, dtype=torch.bool)
    torch.testing.assert_close(layer(*given, GRID, padding, nothing, prefix), expected)
    torch.testing.assert_close(layer(*given, GRID, prefix_tokens=prefix)[0], expected[0])


@pytest.mark.parametrize("options", WINDOWS[1:])
@pytest.mark.parametrize("written_out", [False, True])
def test_a_query_without_keys_gets_zeros_and_spoils_no_gradient(options, written_out):
    """A query in the padded corner has no key in its range. Nothing becomes NaN, and the output there is its bias."""
    layer, given = module(**options), [t.requires_grad_() for t in tokens()]
    padding = torch.zeros(2, N, dtype=torch.bool)
    padding[0, 4:] = True  # the second and third row of three
    mask = torch.zeros(N, N, dtype=torch.bool) if written_out else None
    output = layer(*given, GRID, padding, mask)
    output.square().sum().backward()
    assert output.isfinite().all()
    assert all(t.grad.isfinite().all() for t in (*given, *layer.parameters()))
    if "spatial_range" in options:
        torch.testing.assert_close(output[0, 8:], layer.out_proj.bias.expand(4, C))


def stock_of(layer: SpatialSelfAttention) -> nn.MultiheadAttention:
    stock = nn.MultiheadAttention(
        C, M, bias=layer.in_proj_bias is not None, batch_first=True, dtype=torch.float64
    ).eval()
    stock.load_state_dict({key: layer.state_dict()[key] for key in stock.state_dict()}, strict=True)
    return stock


@pytest.mark.parametrize("kind", ["padding", "bool", "added", "by head"])
def test_the_start_and_its_masks_are_torchs(kind):
    layer, given = module(gate=False, bias=kind != "added"), tokens()
    mask = torch.rand(2 * M, N, N) < 0.3 if kind == "by head" else torch.rand(N, N) < 0.3
    if kind == "added":
        mask = torch.randn(N, N, dtype=torch.float64)
    masks = dict(attn_mask=mask) if kind != "padding" else dict(key_padding_mask=torch.arange(2 * N).view(2, N) > 16)
    expected = stock_of(layer)(*given, **masks, need_weights=False)[0]
    torch.testing.assert_close(layer(*given, GRID, **masks), expected)
    layer = module()
    everything = torch.zeros(N, N, dtype=torch.bool)
    torch.testing.assert_close(layer(*given, GRID, attn_mask=everything), layer(*given, GRID))


def test_cross_attention_with_a_closed_gate_equals_the_stock_layer():
    layer = module("1010")
    query, key = torch.randn(2, 5, C, dtype=torch.float64), torch.randn(2, 9, C, dtype=torch.float64)
    gate = layer.gate.detach().clone()
    with torch.no_grad():
        layer.gate.zero_()
        torch.testing.assert_close(layer(query, key), stock_of(layer)(query, key, key)[0])
        layer.gate.copy_(gate)
        assert not torch.allclose(layer(query, key), stock_of(layer)(query, key, key)[0])
    torch.testing.assert_close(layer(query, key, prefix_tokens=1), layer(query, key))  # no term needs positions


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(prefix_tokens=-1), "prefix_tokens must be an int from 0 to query's 12, got -1"),
        (dict(prefix_tokens=2), r"grid must hold the 10 tokens behind the prefix of 2, got \(3, 4\)"),
        (dict(grid=None), r"grid must be \(H, W\) for attention_type '1111', got None"),
        (dict(grid=(3, 5)), r"grid must hold the 12 tokens behind the prefix of 0, got \(3, 5\)"),
        (
            dict(key=torch.zeros(2, 5, 8).double(), value=torch.zeros(2, 5, 8).double()),
            r"key must be the 12 tokens of query for .* got 5",
        ),
        (dict(value=torch.zeros(2, 5, 8).double()), "value must have as many tokens as key, 12, got 5"),
        (dict(key=torch.zeros(3, N, 8).double()), "key must have query's batch size 2, got 3"),
        (dict(key_padding_mask=torch.zeros(2, 5, dtype=torch.bool)), r"key_padding_mask must have shape \(2, 12\)"),
        (
            dict(attn_mask=torch.zeros(5, N)),
            r"attn_mask must have shape \(12, 12\) or \(B \* M, N, S\) = \(4, 12, 12\), got \(5, 12\)",
        ),
        (dict(attn_mask=torch.zeros(2, N, N)), r"attn_mask must have shape .* got \(2, 12, 12\)"),
        (dict(attn_mask=torch.zeros(N, N, dtype=torch.long)), "attn_mask must be bool or floating-point, got torch"),
    ],
)
def test_bad_input_is_one_clear_error(change, words):
    query, key, value = tokens()
    given = dict(query=query, key=key, value=value, grid=GRID)
    with pytest.raises((ValueError, TypeError), match=words):
        module()(**{**given, **change})


def test_a_gate_that_starts_open():
    """Without the content term, a closed gate gives all keys the same weight: all outputs are alike."""
    torch.manual_seed(0)
    x = torch.randn(2, 12, 16)
    layers = [SpatialSelfAttention(16, 2, "0110", gate_init=start) for start in (0.0, 1.0)]
    assert [float(layer.gate.detach().mean()) for layer in layers] == [0, 1]
    closed, opened = (layer(x, grid=(3, 4)).std(1).max() for layer in layers)
    assert closed < 1e-6 < 1e-3 < opened
