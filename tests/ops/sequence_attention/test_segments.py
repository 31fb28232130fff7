"""Sequence attention within segments: definition, every backend, gradients, errors."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from attn_plugins.ops import reference, sequence_attention
from tests.ops.sequence_attention.operands import TERMS, attend, gradients, operands, padding
from tests.ops.sequence_attention.test_sequence_attention import path  # noqa: F401


def drawn(n: int, S: int, segments: int = 3, seed: int = 0) -> Tensor:
    """Return ids (n, S) in no order."""
    return torch.randint(segments, (n, S), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def by_pairs(arguments, ids: Tensor, mask, start: int, causal: bool, scale: float) -> Tensor:
    """Attend with a position logit of -inf for each pair of a query and a key of different segments."""
    query, key, value, band, outside, position = arguments
    B, M, S, _ = value.shape
    T = max(t.shape[2] for t in (query, band, outside, position) if t is not None)
    logits = torch.zeros(B, M, T, S, dtype=value.dtype) if position is None else position.expand(B, M, T, S).clone()
    for b, t, s in itertools.product(range(B), range(T), range(S)):
        if ids[b % len(ids), start + t] != ids[b % len(ids), s]:
            logits[b, :, t, s] = float("-inf")
    return reference.sequence_attention(query, key, value, band, outside, logits, mask, start, causal, scale)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    "terms, causal, start, masked",
    [(terms, n % 2 == 1, (0, 2, 1, 1)[n % 4], n % 3 == 0) for n, terms in enumerate([*TERMS, *TERMS[1::2]])],
    ids=str,
)
def test_every_path_is_the_formula(terms, causal, start, masked):
    torch.manual_seed(1)
    arguments = operands(terms, T=5, S=7, B=4, K=3, shared=True)
    mask = padding(4, 7) if masked else None
    for ids in (drawn(4, 7), drawn(2, 7, 4, seed=1), drawn(1, 7, 1)):
        expected = by_pairs(arguments, ids, mask, start, causal, 0.7)
        output = attend(arguments, mask, start=start, causal=causal, scale=0.7, segment_ids=ids)
        torch.testing.assert_close(output, expected)
        grad = torch.randn_like(expected)
        for one, right in zip(gradients(output, arguments, grad), gradients(expected, arguments, grad)):
            torch.testing.assert_close(one, right)


@pytest.mark.usefixtures("path")
def test_a_range_within_segments():
    arguments = operands((True, True, False, False), T=6, S=40, B=2, grad=False)
    outside = torch.full((1, 1, 1), float("-inf"), dtype=torch.float64)
    ids = drawn(2, 40, 2)
    query, key, value, band, _, _ = arguments
    expected = by_pairs((query, key, value, band, outside, None), ids, None, 1, False, 0.7)
    output = sequence_attention(
        query, key, value, band_logits=band, outside_logits=float("-inf"), scale=0.7, start=1, segment_ids=ids
    )
    torch.testing.assert_close(output, expected)
