"""Swin's window attention in torch: gradients, dropout, dtypes, compilation."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.helpers.window_self_attention import C, layer, tokens


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize(
    "options",
    [
        *(dict(position=p, window_size=(2, 3), shift_size=(1, 1)) for p in ("table", "relative", "bilateral", "none")),
        *(dict(position=p, window_size=3, window="centred") for p in ("table", "relative", "bilateral")),
    ],
    ids=str,
)
def test_gradcheck(options, version):
    module = layer(version=version, **options)
    names, values = zip(*((n, p.detach().requires_grad_()) for n, p in module.named_parameters() if "cpb" not in n))

    def run(x, *parameters):
        return torch.func.functional_call(module, dict(zip(names, parameters)), (x,))

    x = tokens((3, 4), B=1).requires_grad_()
    assert torch.autograd.gradcheck(run, (x, *values), fast_mode=True)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        dict(version="v1", shift_size=1),
        dict(version="v2", shift_size=1),
        dict(position="bilateral", shift_size=1),
        dict(position="table+bilateral", window="centred"),
    ],
    ids=str,
)
def test_half_precision_and_autocast(options, dtype):
    wide = layer(torch.float32, window_size=3, **options)
    for parameter in wide.parameters():
        nn.init.normal_(parameter, std=0.2)
    x = tokens((5, 6), torch.float32)
    expected = wide(x)
    with torch.autocast("cpu", dtype):
        cast = wide(x)
    half = layer(dtype, window_size=3, **options)
    half.load_state_dict(wide.state_dict())
    found = half(x.to(dtype))
    assert found.dtype == cast.dtype == dtype
    for result in (found, cast):
        torch.testing.assert_close(result.float(), expected, rtol=0.05, atol=0.05)


def test_compile_and_empty_batches():
    module = layer(torch.float32, window_size=3, shift_size=1, version="v2")
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=False)
    x = tokens((7, 9), torch.float32)
    torch.testing.assert_close(compiled(x), module(x))
    assert module(x[:0]).shape == (0, 7, 9, C)
    shared = x[:, :, ::2]
    torch.testing.assert_close(module(shared), module(shared.contiguous()))


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
