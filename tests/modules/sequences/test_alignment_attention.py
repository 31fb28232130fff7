"""Attention by alignment scores: the lecture's formulas in plain loops, masks and edge cases."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from attn_plugins.modules import AlignmentAttention
from attn_plugins.modules.sequences.alignment_attention import CosineScore

SCORES = ["cosine", "additive", "general", "dot", "scaled-dot"]


def layer(score: str) -> AlignmentAttention:
    torch.manual_seed(0)
    options = dict(source_channels=5) if score in ("general", "additive") else {}
    if score == "additive":
        options["hidden_channels"] = 7
    module = AlignmentAttention(score, 6, **options).double()
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return module


def score_of_a_pair(module: AlignmentAttention, s: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Compute one pair's score by the formulas of the lecture's table."""
    dot = sum(a * b for a, b in zip(s, h))
    if module.score_name == "dot":
        return dot
    if module.score_name == "scaled-dot":
        return dot / math.sqrt(len(s))
    if module.score_name == "cosine":
        return dot / (s.norm() * h.norm())
    if module.score_name == "general":
        return s @ module.score.weight @ h
    concatenated = torch.cat([module.score.query.weight, module.score.source.weight], 1)
    return module.score.vector @ torch.tanh(concatenated @ torch.cat([s, h]) + module.score.query.bias)


@torch.no_grad()
def by_loops(module, query, source, mask):
    (B, T, _), S = query.shape, source.shape[1]
    context, alignment = torch.zeros(B, T, source.shape[2]).double(), torch.zeros(B, T, S).double()
    for b in range(B):
        kept = [i for i in range(S) if not mask[b, i]]
        for t in range(T):
            exponentials = [torch.exp(score_of_a_pair(module, query[b, t], source[b, i])) for i in kept]
            for i, e in zip(kept, exponentials):
                alignment[b, t, i] = e / sum(exponentials)
                context[b, t] += alignment[b, t, i] * source[b, i]
    return context, alignment


@pytest.mark.parametrize("score", SCORES)
def test_equals_the_formula_and_padding_is_never_read(score):
    module = layer(score)
    query, source = torch.randn(4, 4, 6).double(), torch.randn(4, 5, module.source_channels).double()
    mask = torch.tensor([[False] * 5, [False, True, False, False, True], [False] + [True] * 4, [True] * 5])
    expected = by_loops(module, query, source, mask)
    torch.testing.assert_close(module(query, source, mask), expected)
    torch.testing.assert_close([part[0] for part in module(query, source)], [part[0] for part in expected])
    again = module(query, source, mask, keys=module.project_keys(source))
    torch.testing.assert_close(again, module(query, source, mask), rtol=0, atol=0)
    changed = source.masked_fill(mask.unsqueeze(2), 1e6)
    for got, expected in zip(module(query, changed, mask), module(query, source, mask)):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    leaves = [source.requires_grad_(), query.requires_grad_(), *module.parameters()]
    context, alignment = module(query, source, mask)
    grad, *others = torch.autograd.grad((context.square().sum() + alignment.square().sum()), leaves)
    assert all(other.isfinite().all() for other in others)  # beside a source of padding alone
    assert not grad[mask].any()
    assert grad[~mask].any()
    assert not alignment.transpose(1, 2)[mask].any()


def test_half_cosine_of_long_vectors_does_not_overflow():
    x = torch.full((1, 2, 16), 300.0, dtype=torch.float16)  # its square exceeds float16's 65504
    score = CosineScore(16, 16)
    scores = score(x, score.project_keys(-x))
    torch.testing.assert_close(scores, torch.full((1, 2, 2), -1.0, dtype=torch.float16), rtol=2e-3, atol=0)
    assert not score(torch.zeros(1, 2, 16), score.project_keys(x.float())).any()


def test_both_layers_of_the_additive_score_are_drawn_as_one():
    score = AlignmentAttention("additive", 90, 60, 50).score
    bound = math.sqrt(6 / (90 + 60 + 50))
    for layer in (score.query, score.source):
        assert 0.99 * bound < layer.weight.abs().max() <= bound
