"""Rearrangements of tokens and their gradients, in both orders."""

from __future__ import annotations

import torch
from torch.autograd import gradcheck, gradgradcheck

from attn_plugins.modules.tokens.token_moves import inverse, reorder, split_heads


def test_reordered_tokens_are_where_the_order_says():
    torch.manual_seed(0)
    tokens, order = torch.randn(7, 3, dtype=torch.float64, requires_grad=True), torch.randperm(7)
    moved = reorder(tokens, order)
    for place, source in enumerate(order.tolist()):
        assert torch.equal(moved[place], tokens[source])
    assert torch.equal(reorder(moved, inverse(order)), tokens)
    with torch.no_grad():
        assert torch.equal(reorder(tokens, order), moved)
    assert gradcheck(reorder, (tokens, order))
    assert gradgradcheck(reorder, (tokens, order))


def test_split_heads_are_views_of_the_projection():
    torch.manual_seed(0)
    n, N, M, d = 5, 4, 2, 3
    projected = torch.randn(n, N, 3 * M * d, dtype=torch.float64, requires_grad=True)
    kinds = split_heads(projected, [3, 2], M)
    first = 0
    for size, kind in zip((3, 2), kinds):
        for part, tensor in enumerate(kind):
            assert tensor.shape == (size, M, N, d)
            assert tensor.untyped_storage().data_ptr() == projected.untyped_storage().data_ptr()
            for i in range(size):
                for m in range(M):
                    start = (part * M + m) * d
                    assert torch.equal(tensor[i, m], projected[first + i, :, start : start + d])
        first += size

    def flat(tensor):
        return torch.cat([t.flatten() * (i + 1) for i, t in enumerate(sum(split_heads(tensor, [3, 2], M), ()))])

    assert gradcheck(flat, (projected,))
    assert gradgradcheck(flat, (projected,))


def test_a_part_without_a_gradient_has_zeros():
    projected = torch.randn(2, 4, 6, requires_grad=True)
    (query, _, value), _ = split_heads(projected, [1, 1], 1)
    (query.sum() + 2 * value.sum()).backward()
    expected = torch.zeros(2, 4, 6)
    expected[0, :, :2], expected[0, :, 4:] = 1, 2
    assert torch.equal(projected.grad, expected)
