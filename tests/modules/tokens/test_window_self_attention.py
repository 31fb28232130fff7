"""Swin's window attention, in shifted and in centred windows: plain loops, timm's blocks, attention maps, masks."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import cycle

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from attn_plugins import ops
from attn_plugins.modules import WindowSelfAttention
from attn_plugins.modules.common import attention
from attn_plugins.terms.sine_position import sine_encoding
from tests.helpers.module_inputs import drawn
from tests.modules.loops import predicted_logits

C, M = 12, 3
CASES = [  # map, window, shift
    ((6, 9), (3, 3), (1, 1)),
    ((5, 7), (3, 4), (1, 2)),
    ((2, 9), (4, 3), (2, 0)),
    ((4, 3), (2, 3), (0, 1)),
    ((3, 2), (4, 4), (0, 0)),
]


def layer(dtype=torch.float64, **options) -> WindowSelfAttention:
    return drawn(WindowSelfAttention(C, M, dtype=dtype, **options), 0.5).eval()


def tokens(size, dtype=torch.float64, B=2) -> Tensor:
    return torch.randn(B, *size, C, dtype=dtype, generator=torch.Generator().manual_seed(1))


BILATERAL = [
    dict(position="bilateral"),
    dict(position="table+bilateral", kernel_size=1, smoothing="sqrt_d"),
    dict(position="bilateral", kernel_size=5, outside="zero"),
    dict(position="bilateral", kernel_size=3, outside="-inf", smoothing="sqrt_d"),
    dict(position="table+bilateral", kernel_size=3, outside="min"),
    dict(position="table+relative"),
]


@lru_cache
def encoded(offset: int) -> Tensor:
    return sine_encoding(torch.tensor([offset], dtype=torch.float64), C, 10000.0)[0]


@lru_cache
def table_logits(module: WindowSelfAttention, dy: int, dx: int) -> Tensor:
    """Compute each head's logit of an offset, from the table."""
    Wh, Ww = module.window_size
    if module.version == "v1":
        return module.relative_position_bias_table[(Wh - 1 - dy) * (2 * Ww - 1) + Ww - 1 - dx]
    x = [8 * -o / max(n - 1, 1) for o, n in zip((dy, dx), module.pretrained_window_size or (Wh, Ww))]
    coordinates = torch.tensor([math.copysign(math.log2(1 + abs(a)) / 3, a) for a in x], dtype=torch.float64)
    return 16 * torch.sigmoid(module.cpb_mlp(coordinates))


def offset_logit(module: WindowSelfAttention, head: int, query: Tensor, dy: int, dx: int) -> Tensor:
    """Compute one query's logit, from the table and relative terms, for the key at (dy, dx) = k - q."""
    d, kinds = C // M, module.position_kind.split("+")
    logit = query.new_zeros(())
    if "relative" in kinds:
        heads = slice(head * d, (head + 1) * d)
        for table, offset in ((module.row_table, dy), (module.column_table, dx)):
            v = module.position[heads] * d**-0.5
            logit = logit + (query + v) @ (table.weight[heads] @ encoded(offset))
        logit = module.gate[head] * logit
    return logit + table_logits(module, dy, dx)[head] if "table" in kinds else logit


def bilateral_logits(module: WindowSelfAttention, head: int, token: Tensor, offsets: list) -> Tensor:
    """Compute a query's predicted logits for keys at ``offsets``."""
    k, r = module.kernel_size, module.kernel_size // 2
    taps = [(r + dy) * k + r + dx if abs(dy) <= r and abs(dx) <= r else None for dy, dx in offsets]
    values = module.predictor(token).view(M, -1)[head].numpy()
    logits = torch.from_numpy(predicted_logits(values, taps, module.outside, module.smoothing, C // M))
    return torch.where(logits.isinf(), logits, logits * module.gate[head])


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


POSITIONS = [*(dict(position=kind) for kind in ("table", "relative", "none")), *BILATERAL]
# Of each kind of position a shifted window with padding, whole windows, and centred ones, also on a smaller map.
PLACES = [
    *((options, *case) for case, options in zip(cycle(CASES), [*POSITIONS, *POSITIONS[:6]])),
    *((options, (5, 4), (3, 3), None) for options in POSITIONS[::2]),
    *((options, (2, 6), (5, 3), None) for options in POSITIONS[1::2]),
]


@torch.no_grad()
@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize(("options", "size", "window", "shift"), PLACES, ids=str)
def test_equals_loops(options, size, window, shift, version):
    kind = dict(window="centred") if shift is None else dict(shift_size=shift)
    module, x = layer(window_size=window, version=version, **kind, **options), tokens(size, B=1)
    tolerance = dict(rtol=1e-4, atol=1e-5) if module.cpb_mlp is not None else {}  # coordinates are in float32
    torch.testing.assert_close(module(x), loops(module, x), **tolerance)


def test_windows_share_masks(monkeypatch):
    """One call covers a map of any size, with a number for each token of a map's windows.

    Where logits differ between windows, four calls do; each has one (N, N) mask with a batch axis of 1.
    """
    seen = []

    def watched(*args, position_logits, **kwargs):
        seen.append((args[0].shape[0], tuple(position_logits.shape)))
        seen.extend(tuple(ids.shape) for ids in [kwargs.get("segment_ids")] if ids is not None)
        return ops.sequence_attention(*args, position_logits=position_logits, **kwargs)

    monkeypatch.setattr(attention, "sequence_attention", watched)
    for options, expected in (
        (dict(shift_size=1), [(40, (1, M, 9, 9)), (20, 9)]),
        (dict(shift_size=1, position="bilateral"), [(2 * n, (2 * n, M, 9, 9)) for n in (12, 3, 4, 1)]),
        ({}, [(40, (1, M, 9, 9))]),
    ):
        seen.clear()
        layer(window_size=3, **options)(tokens((12, 15)))
        assert seen == expected


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "backend"),
    [
        (dict(shift_size=1), "eager"),
        (dict(version="v2", position="relative"), "aot_eager"),
        (dict(window="centred", position="table+bilateral"), "eager"),
    ],
    ids=str,
)
def test_compile_with_symbolic_sizes(options, backend):
    """One graph serves all maps that are split and padded alike."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    module = layer(torch.float32, window_size=3, **options)
    compiled = torch.compile(module, fullgraph=True, backend=counter, dynamic=True)
    frames = []
    for size in ((7, 11), (8, 8), (13, 17)):
        x = tokens(size, torch.float32)
        torch.testing.assert_close(compiled(x), module(x))
        frames.append(counter.frame_count)
    assert frames[0] == frames[-1]
