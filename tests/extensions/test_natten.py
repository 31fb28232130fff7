"""The names that NATTEN dropped, against plain loops over its definition, and who gets them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from attn_plugins.extensions import natten, natten_functional
from attn_plugins.extensions.natten_functional import (
    na1d,
    na1d_av,
    na1d_qk,
    na2d,
    na2d_av,
    na2d_qk,
    natten1dav,
    natten1dqk,
    natten1dqkrpb,
    natten2dav,
    natten2dqk,
    natten2dqkrpb,
)

GEOMETRIES = [(3, 3, 1, 3), (7, 9, 1, 5), (7, 8, 2, 3), (6, 10, 3, 2)]  # H, W, dilation, kernel
EVERY = pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)


def neighbors(index: int, size: int, kernel: int, dilation: int) -> list[int]:
    own = list(range(index % dilation, size, dilation))
    first = max(0, min(own.index(index) - kernel // 2, len(own) - kernel))
    return own[first : first + kernel]


def windows(H: int, W: int, dilation: int, kernel: int):
    """Yield each query and its taps' keys."""
    for y, x in itertools.product(range(H), range(W)):
        rows, columns = neighbors(y, H, kernel, dilation), neighbors(x, W, kernel, dilation)
        yield y, x, list(itertools.product(rows, columns))


def pixels(tensor: Tensor) -> list[tuple[Tensor, ...]]:
    """Return rows of what each pixel of a (B, M, H, W, ...) has, which autograd follows faster than an index."""
    return [row.unbind(2) for row in tensor.unbind(2)]


def logits_by_loops(query: Tensor, key: Tensor, rpb: Tensor | None, dilation: int, kernel: int) -> Tensor:
    queries, keys, logits = pixels(query), pixels(key), []
    for y, x, taps in windows(*query.shape[2:4], dilation, kernel):
        for r, c in taps:
            logits.append((queries[y][x] * keys[r][c]).sum(-1))
            if rpb is not None:
                logits[-1] = logits[-1] + rpb[:, (r - y) // dilation + kernel - 1, (c - x) // dilation + kernel - 1]
    return torch.stack(logits, 2).view(*query.shape[:4], kernel**2)


def sums_by_loops(attn: Tensor, value: Tensor, dilation: int, kernel: int) -> Tensor:
    weights, values = pixels(attn[..., None]), pixels(value)
    output = [
        sum(weights[y][x][:, :, t] * values[r][c] for t, (r, c) in enumerate(taps))
        for y, x, taps in windows(*value.shape[2:4], dilation, kernel)
    ]
    return torch.stack(output, 2).view_as(value)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@EVERY
def test_maps_equal_loops(geometry):
    H, W, dilation, K = geometry
    torch.manual_seed(0)
    query, key, value = (drawn(2, 3, H, W, 4) for _ in range(3))
    rpb, attn = drawn(3, 2 * K - 1, 2 * K - 1), drawn(2, 3, H, W, K * K)
    given = query, key, rpb
    for actual, expected, leaves in (
        (natten2dqk(query, key, K, dilation), logits_by_loops(query, key, None, dilation, K), (query, key)),
        (natten2dqkrpb(*given, K, dilation), logits_by_loops(*given, dilation, K), given),
        (natten2dav(attn, value, K, dilation), sums_by_loops(attn, value, dilation, K), (attn, value)),
    ):
        torch.testing.assert_close(actual, expected)
        grad = torch.randn_like(actual)
        for a, b in zip(torch.autograd.grad(actual, leaves, grad), torch.autograd.grad(expected, leaves, grad)):
            torch.testing.assert_close(a, b)


def test_sequences_equal_loops():
    torch.manual_seed(0)
    query, key, value = (drawn(2, 3, 11, 4) for _ in range(3))
    rpb, attn = drawn(3, 5), drawn(2, 3, 11, 3)
    logits, output = query.new_zeros(2, 3, 11, 3), torch.zeros_like(value)
    for x in range(11):
        for t, c in enumerate(neighbors(x, 11, 3, 2)):
            logits[:, :, x, t] = (query[:, :, x] * key[:, :, c]).sum(-1) + rpb[:, (c - x) // 2 + 2]
            output[:, :, x] += attn[:, :, x, t, None] * value[:, :, c]
    torch.testing.assert_close(natten1dqkrpb(query, key, rpb, 3, 2), logits)
    torch.testing.assert_close(natten1dav(attn, value, 3, 2), output)
    torch.testing.assert_close(natten1dqk(query, key, 3, 2), natten1dqkrpb(query, key, 0 * rpb, 3, 2))


def test_gradients_of_both_orders():
    query, key = drawn(1, 1, 3, 5, 2), drawn(1, 1, 3, 5, 2)
    rpb, attn = drawn(1, 5, 5), drawn(1, 1, 3, 5, 9)
    for function, leaves in (
        (lambda *terms: natten2dqkrpb(*terms, 3), (query, key, rpb)),
        (lambda *terms: natten2dav(*terms, 3), (attn, query)),
    ):
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@EVERY
def test_fused_attention_is_that_of_the_steps(geometry):
    H, W, dilation, K = geometry
    query, key, value = (drawn(2, 3, H, W, 4) for _ in range(3))
    rpb = drawn(3, 2 * K - 1, 2 * K - 1)
    logits = natten2dqkrpb(query * 0.3, key, rpb, K, dilation)
    expected = natten2dav(logits.softmax(-1), value, K, dilation).movedim(1, 3)
    steps = na2d_qk(query * 0.3, key, K, dilation, rpb=rpb).softmax(-1)
    assert torch.equal(na2d_av(steps, value, kernel_size=K, dilation=dilation).movedim(1, 3), expected)
    heads_last = [t.movedim(1, 3) for t in (query, key, value)]
    torch.testing.assert_close(na2d(*heads_last, K, dilation=dilation, rpb=rpb, scale=0.3), expected)
    row = [t[:, 0] for t in heads_last]
    if K * dilation <= W:
        expected = na2d(*(t[:, None] for t in row), (1, K), dilation=(1, dilation), rpb=rpb[:, K - 1 : K])[:, 0]
        torch.testing.assert_close(na1d(*row, K, dilation=dilation, rpb=rpb[:, K - 1]), expected)
        q, k, v = (t.movedim(2, 1) for t in row)
        steps = na1d_qk(q * 0.5, k, kernel_size=K, dilation=dilation, rpb=rpb[:, K - 1]).softmax(-1)
        torch.testing.assert_close(na1d_av(steps, v, K, dilation).movedim(1, 2), expected)
        torch.testing.assert_close(na1d(*row, (K,), dilation=(dilation,), rpb=rpb[:, K - 1], stride=1), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_added_up_in_float32(dtype):
    query, key, value = (torch.randn(1, 2, 6, 7, 64).to(dtype) for _ in range(3))
    logits = natten2dqk(query, key, 5)
    assert logits.dtype == dtype
    torch.testing.assert_close(logits, natten2dqk(query.double(), key.double(), 5).to(dtype))
    weights = logits.float().softmax(-1)  # as under autocast
    output = natten2dav(weights, value, 5)
    assert output.dtype == dtype
    torch.testing.assert_close(output, natten2dav(weights.double(), value.double(), 5).to(dtype))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [(7, 9), (4, 5)], ids=["on the map", "padded"])
def test_the_module_of_maps_equals_loops(size, bias):
    torch.manual_seed(0)
    options = dict(rel_pos_bias=True) if bias else {}
    layer = natten.NeighborhoodAttention2D(12, 3, kernel_size=3, dilation=2, **options).double()
    x = torch.randn(2, *size, 12, dtype=torch.float64)
    padded = torch.nn.functional.pad(x, (0, 0, 0, max(0, 6 - size[1]), 0, max(0, 6 - size[0])))
    query, key, value = layer.qkv(padded).unflatten(3, (3, 3, 4)).permute(3, 0, 4, 1, 2, 5)
    weights = logits_by_loops(query * 0.5, key, layer.rpb, 2, 3).softmax(-1)
    output = sums_by_loops(weights, value, 2, 3)[:, :, : size[0], : size[1]]
    torch.testing.assert_close(layer(x), layer.proj(output.permute(0, 2, 3, 1, 4).flatten(3)))
    assert set(layer.state_dict()) == {"qkv.weight", "qkv.bias", "proj.weight", "proj.bias", *(["rpb"] if bias else [])}


def test_module_of_sequences_and_dropout():
    torch.manual_seed(0)
    layer = natten.NeighborhoodAttention1D(8, 2, 5, bias=True, attn_drop=1e-9).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    assert layer.rpb.shape == (2, 9)
    query, key, value = layer.qkv(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    weights = natten1dqkrpb(query * 0.5, key, layer.rpb, 5).softmax(-1)
    expected = layer.proj(natten1dav(weights, value, 5).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected)  # weights written out
    torch.testing.assert_close(layer.eval()(x), expected)
    layer.attn_drop.p = 0.5
    assert not torch.allclose(layer.train()(x), expected)


def test_bad_arguments_raise():
    x, narrow = torch.zeros(1, 2, 4, 5, 3), torch.zeros(1, 2, 4, 4, 3)
    for call, words in (
        (lambda: natten2dqk(x, narrow, 3), r"key must have query's shape \(1, 2, 4, 5, 3\), got"),
        (lambda: natten2dqk(x, x, 5), r"query must have at least kernel_size \* dilation positions .* \(4, 5\)"),
        (lambda: natten2dqk(x[0], x[0], 3), r"query must have shape \(B, M, H, W, d\)"),
        (lambda: natten2dqkrpb(x, x, x.new_zeros(2, 3, 5), 3), r"rpb must have shape \(2, 5, 5\), .*, got \(2, 3, 5\)"),
        (lambda: natten2dav(x, x, 3), r"attn must have shape \(1, 2, 4, 5, 9\), .*, got"),
        (lambda: natten.NeighborhoodAttention2D(8, 3, 3), "num_heads must divide embed_dim = 8, got 3"),
        (lambda: natten.NeighborhoodAttention2D(8, 2, 3)(x), r"x must have shape \(B, H, W, C\)"),
        (lambda: natten.NeighborhoodAttention1D(8, 2, 3)(x), r"x must have shape \(B, L, C\)"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    for call in (
        lambda: natten.NeighborhoodAttention2D(8, 2, 3, is_causal=True),
        lambda: na2d(x, x, x, 3, stride=2),
        lambda: na2d(x, x, x, 3, is_causal=(True, False)),
        lambda: na2d(x, x, x, 3, additional_keys=x),
        lambda: na2d_qk(x, x, 3, is_causal=True),
        lambda: na2d_av(x, x, 3, additional_values=x),
        lambda: na1d_qk(x[0], x[0], 3, is_causal=True),
        lambda: na1d_av(x[0], x[0], 3, stride=2),
    ):
        with pytest.raises(NotImplementedError, match="stands in for natten, and has no"):
            call()


NAMES = (
    "na1d_av, na1d_qk, na2d_av, na2d_qk, natten1dav, natten1dqk, natten1dqkrpb, natten2dav, natten2dqk, natten2dqkrpb"
)
NEWER = {"natten/__init__.py": "from . import functional", "natten/functional.py": "def na2d(): return 'compiled'"}


def test_offered_where_none_is_installed(python):
    code = f"""
import torch, importlib.util
assert importlib.util.find_spec("natten").origin == "attn_plugins.extensions.natten"
import natten
from natten import NeighborhoodAttention1D, NeighborhoodAttention2D, has_fused_na
assert has_fused_na()
from natten.functional import {NAMES}
assert natten.functional.natten2dav is natten2dav
try:
    from natten.functional import na3d
except ImportError as error:
    print(error)
"""
    assert "cannot import name 'na3d'" in python(code).stdout


@pytest.mark.slow
def test_an_installed_one_takes_precedence(python):
    code = "import torch, natten; print(natten.functional.na2d(), hasattr(natten.functional, 'natten2dav'))"
    assert python(code, packages=NEWER).stdout.split() == ["compiled", "False"]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["natten.functional", "attn_plugins.extensions.natten"])
def test_an_import_adds_what_an_installed_one_lacks(python, first):
    code = f"""
import torch, {first}, attn_plugins.extensions.natten
from natten.functional import na2d, {NAMES}
print(na2d(), natten2dav.__module__)
"""
    assert python(code, packages=NEWER).stdout.split() == ["compiled", natten_functional.__name__]
