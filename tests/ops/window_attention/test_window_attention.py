"""Window attention: the reference against plain loops, the kernels against the reference, and behavior in torch."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from attn_plugins.core import library
from attn_plugins.ops import backend, explain, reference, window_attention
from tests.ops.contract_examples import EXAMPLES
from tests.ops.test_contract import example
from tests.ops.test_contract_extents import GEOMETRIES

needs_kernel = pytest.mark.skipif(not library.has_kernel("cpu"), reason="no CPU binary is compiled")
NAMES = [n for n in EXAMPLES if n.startswith("window_attention") and "inside" not in n]
BOTH, DOUBLE = NAMES[0], torch.float64


def by_loops(
    value, kernel, stride, padding, dilation, zero_border, query=None, key=None, position_logits=None
) -> Tensor:
    """Compute the definition for every query and tap separately, in NumPy, which is faster at single numbers."""
    B, M, H, W, dv = value.shape
    position = None if position_logits is None else position_logits.expand(B, M, *position_logits.shape[2:])
    query, key, value, position = (None if t is None else t.numpy() for t in (query, key, value, position))
    grid = (query if position is None else position).shape[2:4]
    output = np.zeros((B, M, *grid, dv))
    for b, m, y, x in itertools.product(range(B), range(M), range(grid[0]), range(grid[1])):
        pairs = []
        for i, j in itertools.product(range(kernel[0]), range(kernel[1])):
            r = y * stride[0] - padding[0] + i * dilation[0]
            c = x * stride[1] - padding[1] + j * dilation[1]
            inside = 0 <= r < H and 0 <= c < W
            if not inside and not zero_border:
                continue
            logit = 0.0 if position is None else position[b, m, y, x, i * kernel[1] + j]
            if query is not None and inside:
                logit += 0.7 * query[b, m, y, x] @ key[b, m, r, c]
            pairs.append((logit, value[b, m, r, c] if inside else 0.0))
        total = sum(math.exp(logit) for logit, _ in pairs)
        for logit, v in pairs:
            output[b, m, y, x] += math.exp(logit) / total * v
    return torch.from_numpy(output)


@pytest.mark.parametrize("border", ["exclude", "zero"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("extents", [{}, *GEOMETRIES], ids=str)
def test_reference_is_the_formula(extents, name, border):
    extents = dict(kernel=(3, 3), stride=(1, 1), options={}) | extents
    kernel, stride, options = (extents[n] for n in ("kernel", "stride", "options"))
    dilation = options.get("dilation", (1, 1))
    padding = options.get("padding", tuple(n // 2 * step for n, step in zip(kernel, dilation)))
    some = example(name, "tiny", dtype=DOUBLE, **{**extents, "options": {**options, "border": border}})
    with backend("reference"):
        output = some.call(**some.tensors)
    expected = by_loops(**some.tensors, kernel=kernel, stride=stride, padding=padding, dilation=dilation,
                        zero_border=border == "zero")  # fmt: skip
    torch.testing.assert_close(output, expected)


@needs_kernel
@pytest.mark.parametrize("dv", [7, 8, 16, 48])
@pytest.mark.parametrize("border", ["exclude", "zero"])
@pytest.mark.parametrize("kernel, padding", [((1, 7), (0, 6)), ((2, 8), (1, 4)), ((1, 31), (0, 15))])
def test_position_logits_alone_over_strided_heads(kernel, padding, border, dv):
    """Interleaved heads, logits of one sequence for all, a masked tap. An infinite value affects only its windows."""
    K = math.prod(kernel)
    value = torch.randn(21, 2, 3, dv).permute(1, 2, 0, 3).unsqueeze(2)
    logits = torch.randn(21, 3, K).permute(1, 0, 2)[None, :, None].expand(2, -1, -1, -1, -1).clone()
    logits[..., 2] = -math.inf
    value[0, 1, 0, 9] = math.inf
    arguments = (None, None, value, logits[:1] if border == "zero" else logits)
    size = 21 + 2 * padding[1] - kernel[1] + 1, 1 + 2 * padding[0] - kernel[0] + 1
    if size != (21, 1):  # as many queries as the geometry has
        arguments = (None, None, value, torch.randn(2, 3, size[1], size[0], K))
    expected = reference.window_attention(*arguments, kernel, (1, 1), padding, (1, 1), border, 1.0)
    output = window_attention(*arguments, kernel, padding=padding, border=border)
    assert 0 < output.isfinite().sum() < output.numel()
    torch.testing.assert_close(output, expected, equal_nan=True)


@pytest.mark.parametrize("geometry", [dict(dilation=10**9), dict(stride=10**9), dict(padding=2 * 10**9)])
def test_windows_far_beyond_the_map(geometry):
    """The kernel's packed rows would be as long as the windows reach."""
    terms = example(BOTH, "tiny", map=(4, 5)).tensors.values()
    call = partial(window_attention, *terms, 3, **geometry)
    leaves = [t.requires_grad_() for t in terms]
    actual = call(), *torch.autograd.grad(call().sum(), leaves)
    with backend("reference"):
        expected = call(), *torch.autograd.grad(call().sum(), leaves)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert "a row of 5" in explain(window_attention, *terms, 3, **geometry).refusals["cpu"]


@needs_kernel
def test_a_workspace_smaller_than_all_heads():
    """Sixteen heads' weights exceed the workspace of 2^23 elements and four heads' do not; the gradients agree."""
    sizes = dict(B=1, M=4, map=(44, 129), kernel=(9, 9), d=2, dv=3)
    terms = [t.expand(1, 4, -1, -1, -1).requires_grad_() for t in example(BOTH, **sizes).tensors.values()]
    big = [None if t is None else t.detach().repeat(1, 4, 1, 1, 1).requires_grad_() for t in terms]
    grad = torch.randn(1, 4, 44, 129, 3)
    few = torch.autograd.grad(window_attention(*terms, 9), terms, grad)
    many = torch.autograd.grad(window_attention(*big, 9), big, grad.repeat(1, 4, 1, 1, 1))
    for a, b in zip(few, many):
        torch.testing.assert_close(a.repeat(1, 4, 1, 1, 1), b, rtol=0, atol=0)


def test_sequences_are_maps_of_one_row():
    terms = example(BOTH, map=(1, 9), kernel=(1, 5)).tensors.values()
    flat = [t.squeeze(2) for t in terms]
    torch.testing.assert_close(
        window_attention(*flat, 5, dilation=2, border="zero"),
        window_attention(*terms, (1, 5), dilation=(1, 2), border="zero").squeeze(2),
    )


def test_queries_beyond_the_map_have_no_keys():
    output = window_attention(None, None, torch.randn(1, 1, 2, 2, 3), torch.zeros(1, 1, 2, 6, 9), 3)
    assert output[:, :, :, :3].any()
    assert not output[:, :, :, 3:].any()


@pytest.mark.parametrize("bad", [math.inf, math.nan], ids=str)
def test_position_logits_outside_the_map_are_not_read(bad):
    terms = list(example(BOTH).tensors.values())
    outside = torch.ones(5, 7, 9, dtype=torch.bool)
    for tap, (dy, dx) in enumerate(itertools.product((-1, 0, 1), repeat=2)):
        outside[max(0, -dy) : 5 - max(0, dy), max(0, -dx) : 7 - max(0, dx), tap] = False
    results = []
    for logit in (0.0, bad):
        given = [term.clone().requires_grad_() for term in (*terms[:3], terms[3].masked_fill(outside, logit))]
        output = window_attention(*given, 3)
        results.append([output, *torch.autograd.grad(output.square().sum(), given)])
    torch.testing.assert_close(*results, rtol=0, atol=0)
