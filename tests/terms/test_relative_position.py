"""Products of queries with relative positions on both axes of a map."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_plugins.terms import relative_position
from attn_plugins.terms.relative_position import both_axes_logits

SIZES = [((3, 4), (3, 4)), ((1, 5), (2, 5)), ((4, 2), (1, 1)), ((1, 1), (1, 1))]


def operands(queries, keys, heads: int, dtype=torch.float64, batch: int = 2) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    offsets = sum(queries) + sum(keys) - 2
    query = torch.randn(batch, *queries, 3, 4, dtype=dtype).permute(0, 3, 1, 2, 4)
    return query.requires_grad_(), torch.randn(heads, 4, offsets, dtype=dtype, requires_grad=True)


def by_loops(query: Tensor, table: Tensor, keys, scale: float) -> tuple[Tensor, Tensor]:
    table = table.expand(query.shape[1], -1, -1) * scale
    B, M, H, W, _ = query.shape
    rows, columns = query.new_zeros(B, M, H, W, keys[0]), query.new_zeros(B, M, H, W, keys[1])
    for h in range(H):
        for w in range(W):
            for k in range(keys[0]):
                rows[:, :, h, w, k] = (query[:, :, h, w] * table[:, :, H - 1 + k - h]).sum(-1)
            for k in range(keys[1]):
                columns[:, :, h, w, k] = (query[:, :, h, w] * table[:, :, H + keys[0] - 1 + W - 1 + k - w]).sum(-1)
    return rows, columns


@pytest.mark.parametrize("few", [True, False], ids=["one product", "two"])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("queries, keys, batch", [(*sizes, 2) for sizes in SIZES] + [(*SIZES[0], 0)])
def test_equals_the_definition(queries, keys, batch, heads, few, monkeypatch):
    monkeypatch.setattr(relative_position, "_FEW_LINES", 128 if few else 0)
    query, table = operands(queries, keys, heads, batch=batch)
    ours, expected = both_axes_logits(query, table, keys, 0.5), by_loops(query, table, keys, 0.5)
    torch.testing.assert_close(ours, expected)
    grads = [torch.randn_like(logits) for logits in expected]
    for n in (slice(0, 1), slice(1, 2), slice(0, 2)):  # gradients of either axis alone
        first, second = (
            torch.autograd.grad(r[n], (query, table), grads[n], retain_graph=True) for r in (ours, expected)
        )
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize("heads", [1, 3])
def test_derivatives(heads):
    query, table = operands((2, 3), (2, 2), heads)
    call = lambda *terms: both_axes_logits(*terms, (2, 2), 0.5)  # noqa: E731
    assert torch.autograd.gradcheck(call, (query, table), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, (query, table))


def test_transforms_and_half_precision():
    query, table = operands((2, 3), (2, 3), 1)
    expected = both_axes_logits(query, table, (2, 3))
    mapped = torch.func.vmap(lambda q: both_axes_logits(q.unsqueeze(0), table, (2, 3)))(query)
    torch.testing.assert_close([logits.squeeze(1) for logits in mapped], list(expected))
    rows, _ = both_axes_logits(query.bfloat16(), table.float(), (2, 3))  # autocast's queries, a parameter's table
    assert rows.dtype == torch.bfloat16
    table.grad = None
    rows.float().sum().backward()
    torch.testing.assert_close(table.grad, torch.autograd.grad(expected[0].sum(), table)[0], rtol=0.02, atol=0.1)
