"""Sequence attention within segments: definition, every backend, gradients, errors."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from attn_plugins.ops import backend, reference, sequence_attention
from attn_plugins.ops.sequence_attention.operands import Options
from attn_plugins.ops.sequence_attention.sequence_attention import ATTEND
from tests.helpers.triton_checks import DEVICE, DTYPES, check, needs_triton
from tests.ops.sequence_attention.operands import ALL, TERMS, attend, gradients, operands, padding
from tests.ops.sequence_attention.test_sequence_attention import path  # noqa: F401
from tests.ops.sequence_attention.test_triton import operands as triton_operands
from tests.ops.sequence_attention.test_triton import small_tiles  # noqa: F401


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
@pytest.mark.sampled(24)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal, start", [(False, 0), (False, 2), (True, 0), (True, 1)])
@pytest.mark.parametrize("terms", TERMS)
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


@pytest.mark.parametrize("T, S", [(1, 1), (4, 70), (48, 48), (49, 65), (130, 131)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_around_blocks_and_vectors(dtype, T, S):
    torch.manual_seed(2)
    arguments = operands((True, False, False, True), T=T, S=S, d=16, dv=16, dtype=dtype)
    exact = tuple(None if t is None else t.detach().double().requires_grad_() for t in arguments)
    ids = drawn(2, S, 2).sort(1).values
    output = attend(arguments, segment_ids=ids, start=S - T, scale=0.25)
    with backend("reference"):
        expected = attend(exact, segment_ids=ids, start=S - T, scale=0.25)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    grad = torch.randn_like(output)
    for one, right in zip(gradients(output, arguments, grad), gradients(expected, exact, grad.double())):
        torch.testing.assert_close(one.double(), right, rtol=tolerance, atol=tolerance * (1 + right.abs().max().item()))


@needs_triton
@pytest.mark.parametrize("causal, start", [(False, 9), (True, 17)])
@pytest.mark.parametrize("terms", [ALL, (True, False, False, True), (False, True, False, False)])
def test_triton(terms, causal, start, small_tiles):  # noqa: F811
    shared = (None, 0, 2) if causal else (2, None, 0)
    ids = drawn(2 if causal else 1, 37).to(DEVICE)
    check(ATTEND, triton_operands(terms, shared=shared), Options(None, start, causal, 0.4, ids))


@needs_triton
@DTYPES
def test_triton_in_real_tiles(dtype):
    """As shifted windows, of which every other has other segments."""
    ids = drawn(2, 49, 4).sort(1).values.to(DEVICE)
    terms = triton_operands((True, False, False, True), T=49, S=49, B=4, M=1, d=16, dv=16, dtype=dtype)
    check(ATTEND, terms, Options(None, 0, False, 0.25, ids))


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(segment_ids=torch.zeros(2, 7)), TypeError, r"segment_ids must be an int32 Tensor, got torch.float32"),
        (dict(segment_ids=[0, 1]), TypeError, r"segment_ids must be an int32 Tensor, got list"),
        (dict(segment_ids=drawn(2, 6)), ValueError, r"segment_ids must have shape \(n, 7\).*, got \(2, 6\)"),
        (dict(segment_ids=drawn(4, 7)), ValueError, r"n divides the batch of 2, got \(4, 7\)"),
        (dict(segment_ids=drawn(0, 7)), ValueError, r"n divides the batch of 2, got \(0, 7\)"),
        (dict(segment_ids=drawn(2, 7).to("meta")), ValueError, r"on value's device cpu, got meta"),
        (dict(segment_ids=drawn(2, 7), start=3), ValueError, r"the 5 queries of query from position 3 .* 7 keys"),
    ],
)
def test_errors(change, error, words):
    query, key, value = (torch.zeros(2, 1, n, 4) for n in (5, 7, 7))
    with pytest.raises(error, match=words):
        sequence_attention(query, key, value, **change)
