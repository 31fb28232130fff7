"""Rearrangements of tokens and their gradients, in both orders."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from attn_plugins.modules.tokens.token_moves import grouped_qkv, inverse, reorder


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


def test_grouped_qkv_are_views_of_the_projection():
    torch.manual_seed(0)
    n, N, M, d = 5, 4, 2, 3
    projected = torch.randn(n, N, 3 * M * d, dtype=torch.float64, requires_grad=True)
    kinds = grouped_qkv(projected, [3, 2], M)
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
        return torch.cat([t.flatten() * (i + 1) for i, t in enumerate(sum(grouped_qkv(tensor, [3, 2], M), ()))])

    assert gradcheck(flat, (projected,))
    assert gradgradcheck(flat, (projected,))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["reorder", "grouped_qkv", "one part"])
def test_torch_func_and_batched_gradients(name):
    torch.manual_seed(0)
    tokens = torch.randn(3, 4, 6, dtype=torch.float64)

    def moved(x):
        if name == "reorder":
            return reorder(x.flatten(1).square(), torch.tensor([2, 0, 1]))
        parts = grouped_qkv(x.square(), [2, 1], 1)
        return parts[0][1] if name == "one part" else torch.cat([t.flatten() for t in sum(parts, ())])

    def loss(x):
        return moved(x).pow(3).sum()

    jacobian, hessian = (
        torch.autograd.functional.jacobian(moved, tokens),
        torch.autograd.functional.hessian(loss, tokens),
    )
    torch.testing.assert_close(torch.func.jacrev(moved)(tokens), jacobian)
    torch.testing.assert_close(torch.func.hessian(loss)(tokens), hessian)
    torch.testing.assert_close(torch.autograd.functional.jacobian(moved, tokens, vectorize=True), jacobian)
    torch.testing.assert_close(torch.autograd.functional.hessian(loss, tokens, vectorize=True), hessian)
    stack = torch.stack([tokens, tokens.flip(0)])
    expected = torch.stack([torch.func.grad(loss)(x) for x in stack])
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(stack), expected)
