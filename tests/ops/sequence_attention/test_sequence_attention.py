"""Sequence attention: the reference against plain loops, and every path against the reference."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from attn_plugins.ops import reference, sequence_attention
from attn_plugins.ops.common import chunks
from attn_plugins.ops.sequence_attention import cpu
from tests.helpers.operator_checks import given
from tests.ops.sequence_attention.operands import TERMS, attend, gradients, operands, padding, taking


def define(operands, mask=None, *, start=0, causal=False, scale=1.0, segment_ids=None) -> Tensor:
    return reference.sequence_attention(*operands, mask, start, causal, scale, segment_ids)


def by_loops(operands, mask, start, causal, scale, ids) -> Tensor:
    """Compute the definition for every query and key separately."""
    query, key, value, band, outside, position = operands
    B, M, S, dv = value.shape
    T = max(t.shape[2] for t in (query, band, outside, position) if t is not None)
    output = torch.zeros(B, M, T, dv, dtype=torch.float64)

    def at(tensor, b, m, t):
        return tensor[tuple(min(i, n - 1) for i, n in zip((b, m, t), tensor.shape))]

    for b, m, t in itertools.product(range(B), range(M), range(T)):
        weights = {}
        for s in range(S):
            offset = s - (start + t)
            if (causal and offset > 0) or (mask is not None and mask[b, s]):
                continue
            if ids is not None and ids[b % len(ids), start + t] != ids[b % len(ids), s]:
                continue
            logit = 0.0
            if query is not None:
                logit += scale * float(query[b, m, t] @ key[b, m, s])
            if band is not None:
                K = band.shape[3]
                tap = offset + (K - 1 if causal else (K - 1) // 2)
                if 0 <= tap < K:
                    logit += float(at(band, b, m, t)[tap])
                elif outside is not None:
                    logit += float(at(outside, b, m, t))
            if position is not None:
                logit += float(at(position, b, m, t)[s])
            weights[s] = math.exp(logit)
        total = sum(weights.values())
        for s, weight in weights.items():
            if weight:
                output[b, m, t] += weight / total * value[b, m, s]
    return output


@pytest.fixture(params=["compiled", "plain", "plain, one query a chunk"])
def path(request, monkeypatch):
    """Run the test with the compiled kernel, and with its substitute on machines without the kernel."""
    if request.param == "plain, one query a chunk":
        monkeypatch.setitem(chunks.WORKSPACE, "cpu", 1)
    with taking(request.param):
        yield request.param


# Terms; causal and start; whether logits are shared, and keys masked: each meets each at least once. Rows of segments.
PLACES = [(False, 0), (False, 3), (True, 0), (True, 2), (True, 9)]
CASES = [
    *((terms, *PLACES[(n + k) % 5], (n + k) % 2 == 0, (n + k // 2) % 2 == 0, 0)
      for n, terms in enumerate(TERMS) for k in (0, 2, 3)),
    *((terms, n % 2 == 1, (0, 2, 1, 1)[n % 4], True, n % 3 == 0, (4, 2, 1)[n % 3])
      for n, terms in enumerate([*TERMS, *TERMS[1::2], *TERMS[::2]])),
]  # fmt: skip
every_case = pytest.mark.parametrize("terms, causal, start, shared, masked, segments", CASES, ids=str)


def identifiers(rows: int, S: int) -> Tensor | None:
    """Return ids (rows, S) of segments, in no order."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(1 + rows, (rows, S), generator=generator, dtype=torch.int32) if rows else None


@every_case
def test_reference_is_the_formula(terms, causal, start, shared, masked, segments):
    torch.manual_seed(0)
    arguments = operands(terms, T=4, S=6, B=4, M=2, K=3, grad=False, shared=shared)
    mask, ids = padding(4, 6) if masked else None, identifiers(segments, 6)
    expected = by_loops(arguments, mask, start, causal, 0.7, ids)
    output = define(arguments, mask, start=start, causal=causal, scale=0.7, segment_ids=ids)
    torch.testing.assert_close(output, expected)


def check(arguments, mask=None, tolerance=None, start=None, **options) -> None:
    """Compare output and gradients with the reference."""
    expected = define(arguments, mask, start=start or 0, **options)
    output = attend(arguments, mask, start=start or 0, **options)
    torch.testing.assert_close(output, expected, **(tolerance or {}))
    grad = torch.randn_like(expected)
    wanted = gradients(expected, arguments, grad)
    for gradient, other in zip(gradients(output, arguments, grad), wanted):
        torch.testing.assert_close(gradient, other, **(tolerance or {}))


@every_case
def test_every_path_equals_the_reference(terms, causal, start, shared, masked, segments, path):
    torch.manual_seed(1)
    mask, options = padding(4, 7) if masked else None, dict(start=start, causal=causal, scale=0.7)
    for K in (1, 5, 17) if terms[1] else (1,):
        arguments = operands(terms, T=5, S=7, B=4, K=K, shared=shared)
        check(arguments, mask, segment_ids=identifiers(segments, 7), **options)


@pytest.mark.parametrize(
    "B, M, T, which", [(37, 3, 7, (0, 1, 2)), (5, 1, 9, (0,)), (5, 1, 9, (1,)), (37, 3, 7, (2,)), (3, 2, 400, (0, 2))]
)
def test_a_batch_shares_logits(B, M, T, which, path):
    """Their gradients are sums over the batch, computed in parts that do not divide it evenly."""
    if path == "plain, one query a chunk" and T > 50:
        pytest.skip("a loop of many queries")
    torch.manual_seed(4)
    query, key, value, *logits = operands(T=T, S=11, B=B, M=M, K=5)
    logits = [t.detach()[:1].requires_grad_() if n in which else t for n, t in enumerate(logits)]
    check((query, key, value, *logits), padding(B, 11), scale=0.5)


@pytest.mark.parametrize("number", [0, 0.0, -1.5, 2])
def test_outside_logits_may_be_a_number(number, path):
    arguments = operands((True, True, True, False), S=9, K=5)
    query, key, value, band, _, _ = arguments
    constant = torch.full((1, 1, 1), float(number), dtype=torch.float64)
    output = sequence_attention(query, key, value, band_logits=band, outside_logits=number)
    torch.testing.assert_close(output, define((query, key, value, band, constant, None)))
    if number == 0:
        assert torch.equal(output, sequence_attention(query, key, value, band_logits=band))


@pytest.mark.parametrize("causal, start", [(False, 0), (False, 7), (False, 14), (True, 0), (True, 7), (True, 16)])
@pytest.mark.parametrize(
    "K, position, shared",
    [(3, False, True), (3, True, False), (5, False, False)],  # K: a window, and too many keys
)
def test_minus_infinity_outside_limits_the_range(causal, start, shared, position, K, path):
    torch.manual_seed(4)
    arguments = operands((True, True, False, position), B=3, S=12, T=6, K=K, shared=shared)
    query, key, value, band, _, logits = arguments
    mask = padding(3, 12)
    nothing = torch.full((1, 1, 1), -math.inf, dtype=torch.float64)
    expected = define(
        (query, key, value, band, nothing, logits), mask, start=start, causal=causal, scale=0.7
    )  # fmt: skip
    output = sequence_attention(
        query, key, value, band_logits=band, outside_logits=-math.inf, position_logits=logits, causal=causal,
        key_padding_mask=mask, scale=0.7, start=start,
    )  # fmt: skip
    torch.testing.assert_close(output, expected)
    if not output.requires_grad:  # no query has a key
        assert not output.any()
        return
    grad = torch.randn_like(expected)
    for one, other in zip(gradients(output, arguments, grad), gradients(expected, arguments, grad)):
        torch.testing.assert_close(one, other)


def test_a_range_within_segments(path):
    query, key, value, band, *_ = operands((True, True, False, False), T=6, S=40, B=2, grad=False)
    nothing, ids = torch.full((1, 1, 1), -math.inf, dtype=torch.float64), identifiers(2, 40)
    expected = define((query, key, value, band, nothing, None), start=1, segment_ids=ids)
    output = sequence_attention(
        query, key, value, band_logits=band, outside_logits=-math.inf, start=1, segment_ids=ids
    )  # fmt: skip
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_never_changes_the_other_tokens(causal, path):
    """Values in the padding do not matter either, even infinite ones as an uninitialised buffer may hold."""
    arguments = operands(T=12, S=12, K=5, grad=False)
    query, key, value, band, outside, position = arguments
    short = sequence_attention(
        query[:, :, :8], key[:, :, :8], value[:, :, :8], band_logits=band[:, :, :8],
        outside_logits=outside[:, :, :8], position_logits=position[:, :, :8, :8], causal=causal,
    )  # fmt: skip
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[:, 8:] = True
    key[:, :, 8:], value[:, :, 8:], position[..., 8:] = 1e30, 1e30, 1e30
    torch.testing.assert_close(attend(arguments, mask, causal=causal)[:, :, :8], short)


def test_memory_is_that_of_the_arguments(path):
    """Neither pass stores all logits: the test counts bytes beyond arguments and their gradients."""
    from tools.bench.memory import peak_memory

    if path == "plain, one query a chunk":
        pytest.skip("a loop of many queries")
    B, M, T, d = 1, 4, 2048, 16
    arguments = operands((True, True, True, False), B=B, M=M, T=T, S=T, d=d, dv=d, K=7, dtype=torch.float32)
    logits = B * M * T * T * 4
    held = peak_memory(
        lambda: torch.autograd.grad(attend(arguments, causal=True).square().sum(), given(*arguments)), "cpu"
    )
    assert held < logits // 4


def test_gradients_of_queries_far_behind_all_keys():
    """The band reaches no key: outputs are 0, and the gradients exist and are 0."""
    terms = [torch.randn(1, 2, n, 4, requires_grad=True) for n in (3, 40, 40)]
    band = torch.randn(1, 2, 3, 5, requires_grad=True)
    output = sequence_attention(*terms, band_logits=band, outside_logits=-math.inf, start=60)
    assert not output.any()
    for grad in torch.autograd.grad(output.sum(), [*terms, band]):
        assert not grad.any()


SLOTS = [(1, 1, 4800, 16), (2, 4, 4800, 2), (1, 1, 100, 3), (3, 8, 4800, 1), (0, 0, 0, 1)]


@pytest.mark.parametrize("B, M, T, slots", SLOTS)
def test_few_heads_are_divided_among_threads(B, M, T, slots):
    assert cpu._slots(B, M, T) == slots
