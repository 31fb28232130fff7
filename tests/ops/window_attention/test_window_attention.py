"""Window attention: the reference against plain loops, the kernels against the reference, and behaviour in torch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from attn_plugins.ops import backend, explain, reference, window_attention
from attn_plugins.ops.common import library

needs_kernel = pytest.mark.skipif(not library.has_kernel("cpu"), reason="no CPU binary is compiled")
LOGITS = ["content", "position", "both"]


def operands(
    size=(5, 7), kernel=(3, 3), logits="both", *, batch=2, heads=3, d=4, dv=5, stride=(1, 1), dtype=torch.float64,
    device="cpu", grad=True,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    grid = tuple(-(-n // s) for n, s in zip(size, stride))

    def draw(*shape: int) -> Tensor:
        return torch.randn(batch, heads, *shape, dtype=dtype, device=device, requires_grad=grad)

    content = logits in ("content", "both")
    return (
        draw(*grid, d) if content else None,
        draw(*size, d) if content else None,
        draw(*size, dv),
        draw(*grid, math.prod(kernel)) if logits in ("position", "both") else None,
    )


def by_loops(query, key, value, position, kernel, stride, padding, dilation, zero_border, scale) -> Tensor:
    """Compute the definition for every query, tap and channel separately."""
    B, M, H, W, dv = value.shape
    grid = (query if position is None else position).shape[2:4]
    output = value.new_zeros(B, M, *grid, dv)
    for b, m, y, x in itertools.product(range(B), range(M), range(grid[0]), range(grid[1])):
        pairs = []
        for i, j in itertools.product(range(kernel[0]), range(kernel[1])):
            r = y * stride[0] - padding[0] + i * dilation[0]
            c = x * stride[1] - padding[1] + j * dilation[1]
            inside = 0 <= r < H and 0 <= c < W
            if not inside and not zero_border:
                continue
            logit = 0.0 if position is None else position[b, m, y, x, i * kernel[1] + j].item()
            if query is not None and inside:
                logit += scale * sum(
                    query[b, m, y, x, n].item() * key[b, m, r, c, n].item() for n in range(query.shape[-1])
                )
            pairs.append((logit, value[b, m, r, c] if inside else value.new_zeros(dv)))
        total = sum(math.exp(logit) for logit, _ in pairs)
        for logit, v in pairs:
            output[b, m, y, x] += math.exp(logit) / total * v
    return output


GEOMETRIES = [  # kernel, stride, padding, dilation
    ((3, 3), (1, 1), (1, 1), (1, 1)),
    ((1, 5), (1, 2), (0, 2), (1, 1)),
    ((5, 3), (2, 3), (4, 2), (2, 2)),
    ((2, 4), (1, 1), (1, 3), (1, 1)),
    ((3, 3), (2, 2), (0, 0), (1, 3)),
    ((3, 9), (1, 1), (1, 4), (1, 1)),  # wide enough for the CPU's kernel of position logits alone
]


@pytest.mark.parametrize("border", ["exclude", "zero"])
@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("kernel, stride, padding, dilation", GEOMETRIES)
def test_reference_is_the_formula(kernel, stride, padding, dilation, logits, border):
    terms = operands((4, 5), kernel, logits, batch=1, heads=2, stride=stride, grad=False)
    expected = by_loops(*terms, kernel, stride, padding, dilation, border == "zero", 0.7)
    output = reference.window_attention(*terms, kernel, stride, padding, dilation, border, 0.7)
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
    terms = operands((4, 5))
    output = window_attention(*terms, 3, **geometry)
    grads = torch.autograd.grad(output.sum(), terms)
    with backend("reference"):
        expected = window_attention(*terms, 3, **geometry)
    torch.testing.assert_close(output, expected)
    for gradient, other in zip(grads, torch.autograd.grad(expected.sum(), terms)):
        torch.testing.assert_close(gradient, other)
    assert "a row of 5" in explain(window_attention, *terms, 3, **geometry).refusals["cpu"]


@needs_kernel
def test_a_workspace_smaller_than_all_heads():
    """Sixteen heads' weights exceed the workspace of 2^23 elements and four heads' do not; the gradients agree."""
    terms = operands((40, 129), (9, 9), batch=1, heads=4, d=2, dv=3, dtype=torch.float32)
    big = [None if t is None else t.detach().repeat(1, 4, 1, 1, 1).requires_grad_() for t in terms]
    grad = torch.randn(1, 4, 40, 129, 3)
    few = torch.autograd.grad(window_attention(*terms, 9), terms, grad)
    many = torch.autograd.grad(window_attention(*big, 9), big, grad.repeat(1, 4, 1, 1, 1))
    for a, b in zip(few, many):
        torch.testing.assert_close(a.repeat(1, 4, 1, 1, 1), b, rtol=0, atol=0)


def test_sequences_are_maps_of_one_row():
    terms = operands((1, 9), (1, 5))
    flat = [t.squeeze(2) for t in terms]
    torch.testing.assert_close(
        window_attention(*flat, 5, dilation=2, border="zero"),
        window_attention(*terms, (1, 5), dilation=(1, 2), border="zero").squeeze(2),
    )


def test_masked_windows_and_extreme_logits():
    query, key, value, position = operands((3, 4), grad=False)
    position[0, 0, 1, 2] = -math.inf
    position.requires_grad_()
    output = window_attention(query, key, value, position, 3)
    assert not output[0, 0, 1, 2].any()
    output.sum().backward()
    assert position.grad.isfinite().all()
    assert not position.grad[0, 0, 1, 2].any()
    large = torch.full((1, 1, 2, 2, 9), 3e4)
    large[..., 4] = 6e4
    one = torch.randn(1, 1, 2, 2, 3)
    torch.testing.assert_close(window_attention(None, None, one, large, 3), one)
    # A query beyond the map has no keys.
    beyond = window_attention(None, None, one, torch.zeros(1, 1, 2, 6, 9), 3)
    assert beyond[:, :, :, :3].any()
    assert not beyond[:, :, :, 3:].any()


@pytest.mark.parametrize("bad", [math.inf, math.nan], ids=str)
def test_position_logits_outside_the_map_are_not_read(bad):
    terms = operands((5, 7), grad=False)
    outside = torch.ones(5, 7, 9, dtype=torch.bool)
    for tap, (dy, dx) in enumerate(itertools.product((-1, 0, 1), repeat=2)):
        outside[max(0, -dy) : 5 - max(0, dy), max(0, -dx) : 7 - max(0, dx), tap] = False
    results = []
    for logit in (0.0, bad):
        given = [term.clone().requires_grad_() for term in (*terms[:3], terms[3].masked_fill(outside, logit))]
        output = window_attention(*given, 3)
        results.append([output, *torch.autograd.grad(output.square().sum(), given)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


# --- limits of the CUDA kernels -------------------------------------------------------------------------------------
