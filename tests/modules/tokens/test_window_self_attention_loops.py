"""Swin's window attention, in shifted and in centred windows, against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attn_plugins.modules import WindowSelfAttention
from attn_plugins.terms.sine_position import sine_encoding
from tests.helpers.window_self_attention import CASES, C, M, layer, tokens

BILATERAL = [
    dict(position="bilateral"),
    dict(position="table+bilateral", kernel_size=1, smoothing="sqrt_d"),
    dict(position="bilateral", kernel_size=5, outside="zero"),
    dict(position="bilateral", kernel_size=3, outside="-inf", smoothing="sqrt_d"),
    dict(position="table+bilateral", kernel_size=3, outside="min"),
    dict(position="table+relative"),
]


def offset_logit(module: WindowSelfAttention, head: int, query: Tensor, dy: int, dx: int) -> Tensor:
    """Compute one query's logit, from the table and relative terms, for the key at (dy, dx) = k - q."""
    (Wh, Ww), d, kinds = module.window_size, C // M, module.position_kind.split("+")
    logit = query.new_zeros(())
    if "relative" in kinds:
        heads = slice(head * d, (head + 1) * d)
        for table, offset in ((module.row_table, dy), (module.column_table, dx)):
            encoding = sine_encoding(torch.tensor([offset], dtype=query.dtype), C, 10000.0)[0]
            v = module.position[heads] * d**-0.5
            logit = logit + (query + v) @ (table.weight[heads] @ encoding)
        logit = module.gate[head] * logit
    if "table" not in kinds:
        return logit
    if module.version == "v1":
        return logit + module.relative_position_bias_table[(Wh - 1 - dy) * (2 * Ww - 1) + Ww - 1 - dx, head]
    x = [8 * -o / max(n - 1, 1) for o, n in zip((dy, dx), module.pretrained_window_size or (Wh, Ww))]
    coordinates = query.new_tensor([math.copysign(math.log2(1 + abs(a)) / 3, a) for a in x])
    return logit + 16 * torch.sigmoid(module.cpb_mlp(coordinates)[head])


def bilateral_logits(module: WindowSelfAttention, head: int, token: Tensor, offsets: list) -> Tensor:
    """Compute a query's logits for keys at ``offsets`` (thesis, Eq. 3.11 and 3.12): predicted nearby, then smoothed."""
    k, d = module.kernel_size, C // M
    values = module.predictor(token).view(M, -1)[head]
    window, r = values[: k * k].view(k, k), k // 2
    outside = {
        "learned": values[-1],
        "zero": torch.zeros(()).to(values),
        "-inf": torch.tensor(-math.inf).to(values),
        "min": window.min(),
        "mean": window.mean(),
    }[module.outside]
    logits = torch.stack([window[r + dy, r + dx] if abs(dy) <= r and abs(dx) <= r else outside for dy, dx in offsets])
    if module.smoothing == "sqrt_d":
        smooth = logits / d**0.5
        return torch.where(smooth.isinf(), smooth, smooth * module.gate[head])
    return module.gate[head] * (logits - logits.mean()) / (logits.var(correction=0) + 1e-6).sqrt()


def seen_keys(module: WindowSelfAttention, y: int, x: int, size, padded):
    """Return the keys visible to a query of the rolled map."""
    (h, w), (sy, sx), (H, W), (Hp, Wp) = module.window_size, module.shift_size, size, padded
    if module.window == "centred":
        return [(ky, kx) for ky in range(H) for kx in range(W) if abs(ky - y) <= h // 2 and abs(kx - x) <= w // 2]
    return [
        (ky, kx)
        for ky in range(y // h * h, y // h * h + h)
        for kx in range(x // w * w, x // w * w + w)
        if (ky >= Hp - sy) == (y >= Hp - sy) and (kx >= Wp - sx) == (x >= Wp - sx)
    ]


def loops(module: WindowSelfAttention, x: Tensor) -> Tensor:
    """Roll and pad; let every token attend to those of its window on the same side of the rolled borders."""
    B, H, W, _ = x.shape
    (h, w), (sy, sx), d = module.window_size, module.shift_size, C // M
    Hp, Wp = (H, W) if module.window == "centred" else (-(-H // h) * h, -(-W // w) * w)
    padded = F.pad(x.roll((-sy, -sx), (1, 2)), (0, 0, 0, Wp - W, 0, Hp - H))
    bias = module.qkv.bias
    if module.q_bias is not None:
        bias = torch.cat((module.q_bias, torch.zeros_like(module.q_bias), module.v_bias))
    q, k, v = F.linear(padded, module.qkv.weight, bias).view(B, Hp, Wp, 3, M, d).unbind(3)
    output = torch.zeros(B, H, W, C, dtype=x.dtype)
    for b in range(B):
        for y in range(H):
            for x_ in range(W):
                for head in range(M):
                    query = q[b, y, x_, head]
                    if module.version == "v2":
                        query = F.normalize(query, dim=0) * module.logit_scale[head, 0, 0].exp().clamp(max=100)
                    else:
                        query = query * d**-0.5
                    logits, values = [], []
                    seen = seen_keys(module, y, x_, (H, W), (Hp, Wp))
                    for ky, kx in seen:
                        key = k[b, ky, kx, head]
                        key = F.normalize(key, dim=0) if module.version == "v2" else key
                        logits.append(query @ key + offset_logit(module, head, query, ky - y, kx - x_))
                        values.append(v[b, ky, kx, head])
                    total = torch.stack(logits)
                    if module.predictor is not None:
                        offsets = [(ky - y, kx - x_) for ky, kx in seen]
                        total = total + bilateral_logits(module, head, padded[b, y, x_], offsets)
                    output[b, y, x_, head * d : (head + 1) * d] = total.softmax(0) @ torch.stack(values)
    return module.proj(output).roll((sy, sx), (1, 2))


@torch.no_grad()
@pytest.mark.parametrize("position", ["table", "relative", "none"])
@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize(("size", "window", "shift"), CASES)
def test_equals_loops(size, window, shift, version, position):
    module = layer(window_size=window, shift_size=shift, version=version, position=position)
    x = tokens(size, B=1)
    tolerance = dict(rtol=1e-4, atol=1e-5) if module.cpb_mlp is not None else {}  # coordinates are in float32
    torch.testing.assert_close(module(x), loops(module, x), **tolerance)


@torch.no_grad()
@pytest.mark.parametrize("options", BILATERAL, ids=str)
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_bilateral_and_sums_equal_loops(version, options):
    tolerance = dict(rtol=1e-4, atol=1e-5) if version == "v2" else {}
    for size, window, shift in (CASES[0], CASES[1], CASES[4]):
        module = layer(window_size=window, shift_size=shift, version=version, **options)
        x = tokens(size, B=1)
        torch.testing.assert_close(module(x), loops(module, x), **tolerance)


@torch.no_grad()
@pytest.mark.parametrize("options", [*(dict(position=p) for p in ("table", "relative", "none")), *BILATERAL], ids=str)
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_centred_windows_equal_loops(version, options):
    """Includes maps smaller than the window."""
    tolerance = dict(rtol=1e-4, atol=1e-5) if version == "v2" else {}
    for size, window in (((5, 4), (3, 3)), ((2, 6), (5, 3))):
        module = layer(window_size=window, version=version, window="centred", **options)
        x = tokens(size, B=1)
        torch.testing.assert_close(module(x), loops(module, x), **tolerance)


@torch.no_grad()
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_where_centred_windows_are_a_partitions(version):
    """The query in the middle of a window has the same keys and logits in both."""
    stock = layer(window_size=(3, 5), version=version)
    centred = layer(window_size=(3, 5), version=version, window="centred")
    centred.load_state_dict(stock.state_dict(), strict=True)
    assert stock.state_dict().keys() == centred.state_dict().keys()
    x = tokens((6, 10))
    expected, found = stock(x), centred(x)
    torch.testing.assert_close(found[:, 1::3, 2::5], expected[:, 1::3, 2::5])
    assert not torch.isclose(found[:, ::3, ::5], expected[:, ::3, ::5]).any()
