"""Swin's window attention: timm's blocks of both versions, initialisation, attention maps, masks, errors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from attn_plugins import ops
from attn_plugins.modules import WindowSelfAttention, capture_attention
from attn_plugins.modules.common import attention
from attn_plugins.modules.tokens.grid_terms import GridTerms
from tests.helpers.window_self_attention import CASES, C, M, layer, tokens

ALL = [dict(position=p) for p in ("table", "relative", "none", "bilateral", "table+relative")] + [
    dict(position="bilateral", kernel_size=3, outside="-inf", smoothing="sqrt_d")
]


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
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # timm's coordinates are in float32


@pytest.mark.parametrize("window", ["partition", "centred"])
@pytest.mark.parametrize("added", ["table+bilateral", "table+relative"])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_what_is_added_to_the_table_starts_as_nothing(version, added, window):
    torch.manual_seed(0)
    shift = 1 if window == "partition" else 0
    stock = WindowSelfAttention(C, M, 3, shift, version, window=window)
    ours = WindowSelfAttention(C, M, 3, shift, version, added, window=window)
    ours.load_state_dict(stock.state_dict(), strict=True)
    x = tokens((5, 7), torch.float32)
    torch.testing.assert_close(ours(x), stock(x))
    ours(x).square().sum().backward()
    assert ours.gate.grad.abs().min() > 0
    again = WindowSelfAttention(C, M, 3, shift, version, added, window=window)
    again.load_state_dict(ours.state_dict(), strict=True)
    torch.testing.assert_close(again(x), ours(x))


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


@torch.no_grad()
@pytest.mark.parametrize("options", ALL, ids=str)
@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("window", ["partition", "centred"])
def test_attention_maps_give_the_output(window, version, options):
    """If windows fill the map, the maps give the output; otherwise the weight of the padding is missing."""
    shift = (1, 2) if window == "partition" else 0
    module = layer(window_size=(3, 5), shift_size=shift, version=version, window=window, **options)
    for H, W in ((6, 10), (4, 7)):
        x = tokens((H, W))
        maps = module.attention_maps(x)
        assert maps.shape == (2, M, H, W, H, W)
        v = module._project(x).unflatten(3, (3, M, -1))[:, :, :, 2]
        output = module.proj(torch.einsum("bmhwyx,byxmd->bhwmd", maps, v).flatten(3))
        if window == "centred" or (H, W) == (6, 10):
            torch.testing.assert_close(output, module(x))
            torch.testing.assert_close(maps.sum((4, 5)), torch.ones_like(maps[..., 0, 0]))
        else:
            assert (maps.sum((4, 5)) < 1).any()
        queries = torch.tensor([[0, 1], [3, 6]])
        torch.testing.assert_close(module.attention_maps(x, queries), maps[:, :, queries[:, 0], queries[:, 1]])


def test_capture_knows_the_map():
    model = nn.Sequential(layer(torch.float32, window_size=3, shift_size=1), nn.ReLU())
    x = tokens((4, 7), torch.float32)
    with capture_attention(model) as captured:
        model(x)
    assert captured["0"].size == (4, 7)
    assert captured["0"].maps(torch.tensor([[2, 3]])).shape == (2, M, 1, 4, 7)
    with pytest.raises(ValueError, match="queries must lie on the map of 4 rows and 7 columns"):
        captured["0"].maps(torch.tensor([[4, 0]]))


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
    layer(window_size=3, shift_size=1)(tokens((12, 15)))
    assert seen == [(40, (1, M, 9, 9)), (20, 9)]
    seen.clear()
    layer(window_size=3, shift_size=1, position="bilateral")(tokens((12, 15)))
    assert seen == [(2 * n, (2 * n, M, 9, 9)) for n in (12, 3, 4, 1)]
    seen.clear()
    layer(window_size=3)(tokens((12, 15)))
    assert seen == [(40, (1, M, 9, 9))]


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
            "position must be one of table, relative, bilateral, .*, none, got 'sine'",
        ),
        (
            lambda: WindowSelfAttention(8, 2, pretrained_window_size=7),
            ValueError,
            "pretrained_window_size must be None",
        ),
        (
            lambda: WindowSelfAttention(8, 2, window="centered"),
            ValueError,
            "window must be one of partition, centred, got 'centered'",
        ),
        (
            lambda: WindowSelfAttention(8, 2, (7, 8), window="centred"),
            ValueError,
            r"window_size must be odd for window='centred', got \(7, 8\)",
        ),
        (
            lambda: WindowSelfAttention(8, 2, 7, 3, window="centred"),
            ValueError,
            "shift_size must be 0 for window='centred', got 3",
        ),
        (
            lambda: WindowSelfAttention(8, 2, kernel_size=3),
            ValueError,
            "kernel_size must be None except for bilateral logits, got 3",
        ),
        (
            lambda: WindowSelfAttention(8, 2, position="bilateral", kernel_size=4),
            ValueError,
            "kernel_size must be a positive odd int",
        ),
        (
            lambda: WindowSelfAttention(8, 2, position="bilateral", outside="-inf"),
            ValueError,
            "smoothing 'zscore' needs another outside",
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


@pytest.mark.parametrize("window", ["partition", "centred"])
@pytest.mark.parametrize("position", ["table", "relative", "bilateral"])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_dropout_writes_the_same_weights_out(version, position, window):
    """A dropout probability near 0 drops nothing."""
    shift = int(window == "partition")
    module = layer(window_size=3, shift_size=shift, version=version, position=position, window=window)
    x = tokens((5, 6))
    expected = module(x)
    module.train().dropout = 1e-12
    torch.testing.assert_close(module(x), expected)
    module.dropout = 0.5
    assert not torch.allclose(module(x), expected)


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "backend"),
    [
        (dict(shift_size=1), "eager"),
        (dict(version="v2"), "eager"),
        (dict(position="relative"), "eager"),
        (dict(position="bilateral"), "eager"),
        (dict(window="centred", position="table+bilateral"), "eager"),
        (dict(), "aot_eager"),
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
