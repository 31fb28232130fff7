"""Swin's attention in windows: plain loops, timm's blocks of both versions, gradients, odd maps, dtypes, compile."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_plugins import ops
from attn_plugins.modules import WindowSelfAttention
from attn_plugins.modules.grid_terms import GridTerms
from attn_plugins.terms.sine_position import sine_encoding

C, M = 12, 3
CASES = [  # map, window, shift
    ((6, 9), (3, 3), (1, 1)),
    ((5, 7), (3, 4), (1, 2)),
    ((2, 9), (4, 3), (2, 0)),
    ((4, 3), (2, 3), (0, 1)),
    ((3, 2), (4, 4), (0, 0)),
]


def layer(dtype=torch.float64, **options) -> WindowSelfAttention:
    torch.manual_seed(0)
    module = WindowSelfAttention(C, M, dtype=dtype, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.eval()


def tokens(size, dtype=torch.float64, B=2) -> Tensor:
    return torch.randn(B, *size, C, dtype=dtype, generator=torch.Generator().manual_seed(1))


def offset_logit(module: WindowSelfAttention, head: int, query: Tensor, dy: int, dx: int) -> Tensor:
    """The position logit of one query for the key at (dy, dx) = k - q, from the definitions."""
    (Wh, Ww), d = module.window_size, C // M
    if module.position_kind == "none":
        return query.new_zeros(())
    if module.position_kind == "relative":
        heads = slice(head * d, (head + 1) * d)
        logit = query.new_zeros(())
        for table, offset in ((module.row_table, dy), (module.column_table, dx)):
            encoding = sine_encoding(torch.tensor([offset], dtype=query.dtype), C, 10000.0)[0]
            v = module.position[heads] * d**-0.5
            logit = logit + (query + v) @ (table.weight[heads] @ encoding)
        return module.gate[head] * logit
    if module.version == "v1":
        return module.relative_position_bias_table[(Wh - 1 - dy) * (2 * Ww - 1) + Ww - 1 - dx, head]
    x = [8 * -o / max(n - 1, 1) for o, n in zip((dy, dx), module.pretrained_window_size or (Wh, Ww))]
    coordinates = query.new_tensor([math.copysign(math.log2(1 + abs(a)) / 3, a) for a in x])
    return 16 * torch.sigmoid(module.cpb_mlp(coordinates)[head])


def loops(module: WindowSelfAttention, x: Tensor) -> Tensor:
    """Roll, pad, and let every token see those of its window on the same side of the rolled borders."""
    B, H, W, _ = x.shape
    (h, w), (sy, sx), d = module.window_size, module.shift_size, C // M
    Hp, Wp = -(-H // h) * h, -(-W // w) * w
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
                    for ky in range(y // h * h, y // h * h + h):
                        for kx in range(x_ // w * w, x_ // w * w + w):
                            apart = (ky >= Hp - sy) != (y >= Hp - sy) or (kx >= Wp - sx) != (x_ >= Wp - sx)
                            if apart:
                                continue
                            key = k[b, ky, kx, head]
                            key = F.normalize(key, dim=0) if module.version == "v2" else key
                            logits.append(query @ key + offset_logit(module, head, query, ky - y, kx - x_))
                            values.append(v[b, ky, kx, head])
                    weights = torch.stack(logits).softmax(0)
                    output[b, y, x_, head * d : (head + 1) * d] = weights @ torch.stack(values)
    return module.proj(output).roll((sy, sx), (1, 2))


@torch.no_grad()
@pytest.mark.parametrize("position", ["table", "relative", "none"])
@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize(("size", "window", "shift"), CASES)
def test_equals_loops(size, window, shift, version, position):
    module = layer(window_size=window, shift_size=shift, version=version, position=position)
    x = tokens(size, B=1)
    tolerance = dict(rtol=1e-4, atol=1e-5) if module.cpb_mlp is not None else {}  # coordinates are of float32
    torch.testing.assert_close(module(x), loops(module, x), **tolerance)


def timm_block(version: str, size, window, shift) -> nn.Module:
    if version == "v1":
        from timm.models.swin_transformer import SwinTransformerBlock as Block
    else:
        from timm.models.swin_transformer_v2 import SwinTransformerV2Block as Block
    torch.manual_seed(0)
    block = Block(C, size, M, window_size=window, shift_size=shift, always_partition=True).double()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    return block


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize(("size", "window", "shift"), CASES)
def test_timms_blocks_and_their_gradients(size, window, shift, version):
    pytest.importorskip("timm")
    block = timm_block(version, size, window, shift)
    module = WindowSelfAttention(C, M, window, shift, version, dtype=torch.float64)
    module.load_state_dict(block.attn.state_dict(), strict=True)
    assert block.attn.state_dict().keys() == module.state_dict().keys()
    results = {}
    for name, run, weights in (("timm", block._attn, block.attn), ("ours", module, module)):
        x = tokens(size).requires_grad_()
        output = run(x)
        output.square().sum().backward()
        results[name] = [output, x.grad, *(p.grad for _, p in sorted(weights.named_parameters()))]
    for ours, theirs in zip(results["ours"], results["timm"]):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # timm's coordinates are of float32


def test_windows_share_masks(monkeypatch):
    """Four calls for a map of any size, with one (N, N) a head each, whose batch axis is 1."""
    from attn_plugins.modules import windows

    seen = []

    def watched(*args, position_logits, **kwargs):
        seen.append((args[0].shape[0], tuple(position_logits.shape)))
        return ops.sequence_attention(*args, position_logits=position_logits, **kwargs)

    monkeypatch.setattr(windows, "sequence_attention", watched)
    layer(window_size=3, shift_size=1)(tokens((12, 15)))
    assert seen == [(2 * n, (1, M, 9, 9)) for n in (12, 3, 4, 1)]
    seen.clear()
    layer(window_size=3)(tokens((12, 15)))
    assert seen == [(40, (1, M, 9, 9))]


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("position", ["table", "relative", "none"])
def test_gradcheck(position, version):
    module = layer(window_size=(2, 3), shift_size=(1, 1), version=version, position=position)
    names, values = zip(*((n, p.detach().requires_grad_()) for n, p in module.named_parameters() if "cpb" not in n))

    def run(x, *parameters):
        return torch.func.functional_call(module, dict(zip(names, parameters)), (x,))

    x = tokens((3, 4), B=1).requires_grad_()
    assert torch.autograd.gradcheck(run, (x, *values), fast_mode=True)


def test_relative_starts_without_positions_and_loads_what_lacks_them():
    torch.manual_seed(0)
    plain = WindowSelfAttention(C, M, 3, 1, position="none")
    relative = WindowSelfAttention(C, M, 3, 1, position="relative")
    relative.load_state_dict(plain.state_dict(), strict=True)
    x = tokens((6, 6), torch.float32)
    torch.testing.assert_close(relative(x), plain(x))
    relative(x).square().sum().backward()
    assert relative.gate.grad.abs().min() > 0
    assert isinstance(relative, GridTerms)


@pytest.mark.parametrize("position", ["table", "relative"])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_dropout_writes_the_same_weights_out(version, position):
    """Of a share that is all but 0 nothing is dropped."""
    module = layer(window_size=3, shift_size=1, version=version, position=position)
    x = tokens((5, 6))
    expected = module(x)
    module.train().dropout = 1e-12
    torch.testing.assert_close(module(x), expected)
    module.dropout = 0.5
    assert not torch.allclose(module(x), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_half_precision_and_autocast(version, dtype):
    wide = layer(torch.float32, window_size=3, shift_size=1, version=version)
    for parameter in wide.parameters():
        nn.init.normal_(parameter, std=0.2)
    x = tokens((5, 6), torch.float32)
    expected = wide(x)
    with torch.autocast("cpu", dtype):
        cast = wide(x)
    half = layer(dtype, window_size=3, shift_size=1, version=version)
    half.load_state_dict(wide.state_dict())
    found = half(x.to(dtype))
    assert found.dtype == cast.dtype == dtype
    for result in (found, cast):
        torch.testing.assert_close(result.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_compile_and_empty_batches(version):
    module = layer(torch.float32, window_size=3, shift_size=1, version=version)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=False)
    x = tokens((7, 9), torch.float32)
    torch.testing.assert_close(compiled(x), module(x))
    assert module(x[:0]).shape == (0, 7, 9, C)
    shared = x[:, :, ::2]
    torch.testing.assert_close(module(shared), module(shared.contiguous()))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: WindowSelfAttention(8, 3), ValueError, "num_heads must divide embed_dim = 8, got 3"),
        (lambda: WindowSelfAttention(8, 2, 0), ValueError, "window_size must be an int or two ints, each at least 1"),
        (lambda: WindowSelfAttention(8, 2, 4, 4), ValueError, r"shift_size must be less than window_size \(4, 4\)"),
        (
            lambda: WindowSelfAttention(8, 2, 4, -1),
            ValueError,
            "shift_size must be an int or two ints, each at least 0",
        ),
        (lambda: WindowSelfAttention(8, 2, version="v3"), ValueError, "version must be one of v1, v2, got 'v3'"),
        (
            lambda: WindowSelfAttention(8, 2, position="sine"),
            ValueError,
            "position must be one of table, relative, none",
        ),
        (
            lambda: WindowSelfAttention(8, 2, pretrained_window_size=7),
            ValueError,
            "pretrained_window_size must be None",
        ),
        (lambda: WindowSelfAttention(8, 2)(torch.zeros(1, 8, 7, 7)), ValueError, r"x must have shape \(B, H, W, 8\)"),
        (lambda: WindowSelfAttention(8, 2)(torch.zeros(1, 0, 7, 8)), ValueError, "with at least one token"),
        (
            lambda: WindowSelfAttention(8, 2)(torch.zeros(1, 7, 7, 8).double()),
            TypeError,
            "x must have the module's dtype",
        ),
        (lambda: WindowSelfAttention(8, 2)(None), TypeError, "x must be a Tensor, got NoneType"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
