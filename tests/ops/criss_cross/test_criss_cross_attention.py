"""Criss-cross attention: the reference against plain loops, the implementation by products against the reference."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from attn_plugins.ops import criss_cross_attention, global_attention, reference
from attn_plugins.ops.criss_cross import products
from tests.helpers.operator_checks import DEVICES, given
from tests.ops.criss_cross.operands import LOGITS, operands

SIZES = [(5, 7), (7, 5), (8, 8), (1, 6), (6, 1), (1, 1), (17, 3)]


def by_loops(query, key, value, position, scale) -> Tensor:
    """Compute the definition for every query, key and channel; the query's own position counts once, in its row."""
    B, M, H, W, _ = value.shape
    output = torch.zeros_like(value)
    for b, m, h, w in itertools.product(range(B), range(M), range(H), range(W)):
        keys = {(i, w): i for i in range(H) if i != h} | {(h, j): H + j for j in range(W)}
        assert len(keys) == H + W - 1
        weights = {}
        for (i, j), entry in keys.items():
            logit = 0.0 if position is None else position[b, m, h, w, entry].item()
            if query is not None:
                logit += scale * sum(
                    query[b, m, h, w, n].item() * key[b, m, i, j, n].item() for n in range(query.shape[-1])
                )
            weights[i, j] = math.exp(logit)
        for (i, j), weight in weights.items():
            output[b, m, h, w] += weight / sum(weights.values()) * value[b, m, i, j]
    return output


@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("size", [(3, 4), (4, 2), (1, 3), (3, 1), (1, 1)])
def test_reference_is_the_formula(size, logits):
    terms = operands(size, logits, batch=1, heads=2, grad=False)
    torch.testing.assert_close(reference.criss_cross_attention(*terms, 0.7), by_loops(*terms, 0.7))


@pytest.mark.sampled(24)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("batch, heads", [(1, 1), (2, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("size", SIZES)
def test_products_equal_the_reference(size, batch, heads, logits, dtype, device):
    torch.manual_seed(0)
    terms = operands(size, logits, batch=batch, heads=heads, d=19, dv=18, dtype=dtype, device=device)
    expected = reference.criss_cross_attention(*terms, 0.3)
    found = criss_cross_attention(*terms, scale=0.3)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, given(*terms), grad)
    for gradient, other in zip(torch.autograd.grad(found, given(*terms), grad), wanted):
        torch.testing.assert_close(gradient, other, rtol=1e-4 if dtype == torch.float32 else 1e-9, atol=1e-5)


@pytest.mark.parametrize("logits", LOGITS)
def test_a_scale_of_0(logits):
    """Results do not depend on uninitialised memory, which deterministic mode fills with NaN."""
    terms = operands((5, 7), logits, batch=2, heads=2)
    expected = reference.criss_cross_attention(*terms, 0.0)
    wanted = torch.autograd.grad(expected.square().sum(), given(*terms))
    torch.use_deterministic_algorithms(True)
    try:
        found = criss_cross_attention(*terms, scale=0.0)
        gradients = torch.autograd.grad(found.square().sum(), given(*terms))
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients, wanted)


def test_mmcv_agrees():
    """mmcv's module around our operator: the query's own position counts in its row, and logits are not scaled."""
    module = pytest.importorskip("mmcv.ops.cc_attention").CrissCrossAttention(16).double()
    torch.nn.init.ones_(module.gamma.scale)
    x = torch.randn(2, 16, 6, 5, dtype=torch.float64)
    query, key, value = (
        conv(x).unsqueeze(1).permute(0, 1, 3, 4, 2) for conv in (module.query_conv, module.key_conv, module.value_conv)
    )
    output = criss_cross_attention(query, key, value).squeeze(1).permute(0, 3, 1, 2)
    torch.testing.assert_close(x + output, module(x))


def test_a_map_of_one_row_or_column_is_global_attention():
    for size in ((1, 9), (9, 1)):
        query, key, value, _ = operands(size, grad=False)
        torch.testing.assert_close(
            criss_cross_attention(query, key, value, scale=0.5), global_attention(query, key, value, scale=0.5)
        )


def test_two_rounds_reach_every_position():
    """After one round a value reaches its cross, after two it reaches every position: the purpose of recurrence."""
    query, key, value, _ = operands((4, 5), batch=1, heads=1, grad=False)
    changed = value.clone()
    changed[:, :, 1, 2] += 1
    once, again = criss_cross_attention(query, key, value), criss_cross_attention(query, key, changed)
    cross = torch.zeros(4, 5, dtype=torch.bool)
    cross[1], cross[:, 2] = True, True
    assert torch.equal((once != again).any(-1)[0, 0], cross)
    assert (criss_cross_attention(query, key, once) != criss_cross_attention(query, key, again)).any(-1).all()


def test_probabilities_are_the_weights():
    terms = operands(grad=False)
    H, W = terms[2].shape[2:4]
    found = reference.criss_cross_probabilities(*terms, 0.3)
    weights = torch.ops.attn_plugins.criss_cross_attention(*terms, 0.3, False)[1]
    torch.testing.assert_close(found.sum(-1), torch.ones_like(found[..., 0]))
    torch.testing.assert_close(weights[..., :H], found[..., :H])
    torch.testing.assert_close(weights[..., products.aligned(H) :][..., :W], found[..., H:])
    assert not found[..., :H].diagonal(dim1=2, dim2=4).any()


@pytest.mark.parametrize("shape", [(1, 3), (2, 1), (1, 1)])
def test_shared_position_logits(shape):
    query, key, value, position = operands()
    shared = position[: shape[0], : shape[1]].detach().requires_grad_()
    spread = shared.detach().expand_as(position).clone().requires_grad_()
    one, other = criss_cross_attention(query, key, value, shared), criss_cross_attention(query, key, value, spread)
    torch.testing.assert_close(one, other)
    grad = torch.randn_like(one)
    one.backward(grad)
    other.backward(grad)
    torch.testing.assert_close(shared.grad, spread.grad.sum_to_size(shared.shape))


@pytest.mark.parametrize("device", DEVICES)
def test_masked_positions_and_extreme_logits(device):
    query, key, value, position = operands((3, 4), device=device, grad=False)
    position[0, 0, 1, 2] = -math.inf
    position[1, :, :, :, 5] = -math.inf
    leaves = [t.requires_grad_() for t in (query, key, value, position)]
    output = criss_cross_attention(*leaves)
    torch.testing.assert_close(output, reference.criss_cross_attention(*leaves, 1.0))
    assert not output[0, 0, 1, 2].any()
    gradients = torch.autograd.grad(output.square().sum(), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[3][0, 0, 1, 2].any()
    assert not gradients[3][1, :, :, :, 5].any()
    large = torch.full((1, 1, 2, 2, 4), 3e4, device=device)
    large[..., 2] = 6e4  # column 0 of the own row
    one = torch.randn(1, 1, 2, 2, 3, device=device)
    expected = one[:, :, :, :1].expand_as(one)
    torch.testing.assert_close(criss_cross_attention(None, None, one, large), expected)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 7.0])
def test_the_own_entry_of_the_column_is_not_read(number):
    query, key, value, position = operands((3, 4))
    expected = criss_cross_attention(query, key, value, position)
    other = position.detach().clone()
    other[..., :3].diagonal(dim1=2, dim2=4).fill_(number)
    other.requires_grad_()
    found = criss_cross_attention(query, key, value, other)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    gradient = torch.autograd.grad(found.square().sum(), other)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.square().sum(), position)[0])
    assert not gradient[..., :3].diagonal(dim1=2, dim2=4).any()
