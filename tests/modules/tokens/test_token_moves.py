"""Rearrangements of tokens: views, and gradients under ``torch.func``."""

from __future__ import annotations

import pytest
import torch

from attn_plugins.modules.tokens.parts.token_moves import grouped_qkv, reorder


def test_grouped_qkv_are_views_of_the_projection():
    projected = torch.randn(5, 4, 3 * 2 * 3)
    for size, kind in zip((3, 2), grouped_qkv(projected, [3, 2], 2), strict=True):
        for tensor in kind:
            assert tensor.shape == (size, 2, 4, 3)
            assert tensor.untyped_storage().data_ptr() == projected.untyped_storage().data_ptr()


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

    jacobian = torch.autograd.functional.jacobian(moved, tokens)
    hessian = torch.autograd.functional.hessian(loss, tokens)
    torch.testing.assert_close(torch.func.jacrev(moved)(tokens), jacobian)
    torch.testing.assert_close(torch.func.hessian(loss)(tokens), hessian)
    torch.testing.assert_close(torch.autograd.functional.jacobian(moved, tokens, vectorize=True), jacobian)
    torch.testing.assert_close(torch.autograd.functional.hessian(loss, tokens, vectorize=True), hessian)
    stack = torch.stack([tokens, tokens.flip(0)])
    expected = torch.stack([torch.func.grad(loss)(x) for x in stack])
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(stack), expected)
