"""Criss-cross attention: the reference against plain loops, and what is special to the implementation by products."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from attn_plugins.ops import backend, criss_cross_attention, reference
from attn_plugins.ops.criss_cross_attention import eager
from tests.helpers.operator_checks import DEVICES
from tests.ops.contract_examples import EXAMPLES
from tests.ops.test_contract import example

NAMES = [n for n in EXAMPLES if n.startswith("criss_cross")]


def by_loops(value, query=None, key=None, position_logits=None) -> Tensor:
    """Compute the definition for every query, key and channel; the query's own position counts once, in its row."""
    B, M, H, W, _ = value.shape
    output = torch.zeros_like(value)
    for b, m, h, w in itertools.product(range(B), range(M), range(H), range(W)):
        keys = {(i, w): i for i in range(H) if i != h} | {(h, j): H + j for j in range(W)}
        assert len(keys) == H + W - 1
        weights = {}
        for (i, j), entry in keys.items():
            logit = 0.0 if position_logits is None else position_logits[b, m, h, w, entry].item()
            if query is not None:
                pairs = zip(query[b, m, h, w].tolist(), key[b, m, i, j].tolist())
                logit += 0.7 * sum(one * other for one, other in pairs)
            weights[i, j] = math.exp(logit)
        for (i, j), weight in weights.items():
            output[b, m, h, w] += weight / sum(weights.values()) * value[b, m, i, j]
    return output


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(3, 4), (4, 2), (1, 3), (3, 1), (1, 1)])
def test_reference_is_the_formula(size, name):
    some = example(name, dtype=torch.float64, B=1, map=size)
    with backend("reference"):
        torch.testing.assert_close(some.call(**some.tensors), by_loops(**some.tensors))


def test_probabilities_are_the_weights():
    terms = list(example(NAMES[0], dtype=torch.float64).tensors.values())
    H, W = terms[2].shape[2:4]
    probabilities = reference.criss_cross_probabilities(*terms, 0.3)
    weights = torch.ops.attn_plugins.criss_cross_attention(*terms, 0.3, False)[1]
    torch.testing.assert_close(probabilities.sum(-1), torch.ones_like(probabilities[..., 0]))
    torch.testing.assert_close(weights[..., :H], probabilities[..., :H])
    torch.testing.assert_close(weights[..., eager.aligned(H) :][..., :W], probabilities[..., H:])
    assert not probabilities[..., :H].diagonal(dim1=2, dim2=4).any()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 7.0])
def test_the_own_entry_of_the_column_is_not_read(number):
    *terms, position = example(NAMES[0], dtype=torch.float64, map=(3, 4)).leaves().values()
    expected = criss_cross_attention(*terms, position)
    other = position.detach().clone()
    other[..., :3].diagonal(dim1=2, dim2=4).fill_(number)
    other.requires_grad_()
    output = criss_cross_attention(*terms, other)
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    gradient = torch.autograd.grad(output.square().sum(), other)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.square().sum(), position)[0])
    assert not gradient[..., :3].diagonal(dim1=2, dim2=4).any()


@pytest.mark.parametrize("recompute", [False, True])
def test_the_forward_keeps_weights_or_log_sum_exps(recompute):
    """The weights or the log-sum-exps; the contract's opcheck is of calls that keep weights."""
    terms = None, None, *example(NAMES[2], B=1, map=(4, 9)).leaves().values()
    operator = torch.ops.attn_plugins.criss_cross_attention
    output, *kept = operator(*terms, 0.5, recompute)
    assert [t.numel() > 0 for t in kept] == [not recompute, recompute]
    if recompute:
        torch.library.opcheck(operator, (*terms, 0.5, True))
        detached = [None if t is None else t.detach() for t in (*terms, output, *kept)]
        needs = [t is not None for t in terms]
        backward = torch.ops.attn_plugins.criss_cross_attention_backward
        torch.library.opcheck(backward, (torch.randn_like(output), *detached, 0.5, True, needs))


@pytest.mark.parametrize("device", DEVICES)
def test_logits_of_half_precision_are_not_rounded(device):
    """Two keys have logits that differ by 1 in 2000, which half precision could not represent."""
    query = torch.zeros(1, 1, 1, 2, 2, dtype=torch.bfloat16, device=device)
    key, value = torch.zeros_like(query), torch.zeros_like(query)
    query[..., :] = torch.tensor([44.0, 1.0])
    key[..., 0, :], key[..., 1, :] = torch.tensor([44.0, 0.0]), torch.tensor([44.0, 1.0])
    value[..., 1, :] = 1
    output = criss_cross_attention(query, key, value)
    expected = torch.full_like(output, 1 / (1 + math.exp(-1)))
    torch.testing.assert_close(output, expected)


def test_projections_are_read_in_few_products():
    """Channels-last heads need no copy: one product per head for rows, one per image for columns."""
    B, M, H, W, d = 2, 3, 5, 6, 4
    query, key = (torch.randn(B, H, W, M, d).permute(0, 3, 1, 2, 4) for _ in range(2))
    logits = torch.empty(B, H, W, M, 16).permute(0, 3, 1, 2, 4)
    column, row = logits[..., :H].transpose(2, 3), logits[..., 8 : 8 + W]
    batches = list(eager._batches(row, query, key.mT))
    assert len(batches) == M
    assert all(view.data_ptr() < query.data_ptr() + query.nbytes for _, view, _ in batches)
    assert len(list(eager._batches(column, query.transpose(2, 3), key.transpose(2, 3).mT))) == B
