"""Sequence attention: the reference against plain loops, and every path against the reference."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from torch import Tensor

from attn_plugins.core import chunks
from attn_plugins.ops import backend
from attn_plugins.ops.sequence_attention import cpu
from tests.helpers.slow_cases import slow_but
from tests.ops.sequence_attention.operands import TERMS, drawn, identifiers, padding
from tests.ops.test_contract import FIRST, assert_close, forced, results
from tests.ops.test_contract_backends import DOUBLE, SINGLE, check


def by_loops(
    value, query=None, key=None, band_logits=None, outside_logits=None, position_logits=None, key_padding_mask=None,
    segment_ids=None, *, start=0, causal=False,
) -> Tensor:  # fmt: skip
    """Compute the definition for every query and key separately."""
    B, M, S, dv = value.shape
    T = max(t.shape[2] for t in (query, band_logits, outside_logits, position_logits) if t is not None)
    output = torch.zeros(B, M, T, dv, dtype=torch.float64)

    def at(tensor, b, m, t):
        return tensor[tuple(min(i, n - 1) for i, n in zip((b, m, t), tensor.shape))]

    for b, m, t in itertools.product(range(B), range(M), range(T)):
        weights = {}
        ids = None if segment_ids is None else segment_ids[b % len(segment_ids)]
        for s in range(S):
            offset = s - (start + t)
            if (causal and offset > 0) or (key_padding_mask is not None and key_padding_mask[b, s]):
                continue
            if ids is not None and ids[start + t] != ids[s]:
                continue
            logit = 0.0
            if query is not None:
                logit += 0.7 * float(query[b, m, t] @ key[b, m, s])
            if band_logits is not None:
                K = band_logits.shape[3]
                tap = offset + (K - 1 if causal else (K - 1) // 2)
                if 0 <= tap < K:
                    logit += float(at(band_logits, b, m, t)[tap])
                elif outside_logits is not None:
                    logit += float(at(outside_logits, b, m, t))
            if position_logits is not None:
                logit += float(at(position_logits, b, m, t)[s])
            weights[s] = math.exp(logit)
        for s, weight in weights.items():
            output[b, m, t] += weight / sum(weights.values()) * value[b, m, s]
    return output


@pytest.fixture(params=["first", "plain", "plain, one query a chunk"])
def path(request, monkeypatch):
    """Return the backend that serves by itself, or PyTorch's, in chunks of any size."""
    if request.param == "plain, one query a chunk":
        monkeypatch.setitem(chunks.WORKSPACE, "cpu", 1)
    return FIRST if request.param == "first" else "eager"


# Terms; causal and start; whether logits are shared, and keys masked: each meets each at least once. Rows of segments.
PLACES = [(False, 0), (False, 3), (True, 0), (True, 2), (True, 9)]
CASES = [
    *((terms, *PLACES[(n + k) % 5], (n + k) % 2 == 0, (n + k // 2) % 2 == 0, 0)
      for n, terms in enumerate(TERMS) for k in (0, 2, 3)),
    *((terms, n % 2 == 1, (0, 2, 1, 1)[n % 4], True, n % 3 == 0, (4, 2, 1)[n % 3])
      for n, terms in enumerate([*TERMS, *TERMS[1::2], *TERMS[::2]])),
]  # fmt: skip
every_case = pytest.mark.parametrize("terms, causal, start, shared, masked, segments", CASES, ids=str)


def case(terms, causal, start, shared, masked, segments, *, S: int, **extents):
    lone = dict(outside_logits=(1,), position_logits=(0,)) if shared else {}
    if shared and ("query" in terms or "position" in terms):
        lone["band_logits"] = (2,)
    return drawn(terms, lone=lone, mask=padding(4, S) if masked else None, ids=identifiers(segments, S),
                 options=dict(start=start, causal=causal), B=4, S=S, **extents)  # fmt: skip


@every_case
def test_reference_is_the_formula(terms, causal, start, shared, masked, segments):
    some = case(terms, causal, start, shared, masked, segments, T=4, S=6, M=2)
    with backend("reference"):
        output = some.call(**some.tensors)
    torch.testing.assert_close(output, by_loops(**some.tensors, start=start, causal=causal))


@every_case
def test_every_path_equals_the_reference(terms, causal, start, shared, masked, segments, path):
    for K in (1, 5, 17) if "band" in terms else (1,):
        check(case(terms, causal, start, shared, masked, segments, S=7, K=K), path, DOUBLE)


@pytest.mark.parametrize(
    "B, M, T, shared",
    [(37, 3, 7, TERMS[6]), (5, 1, 9, "band_logits"), (5, 1, 9, "outside_logits"), (37, 3, 7, "position_logits"),
     (3, 2, 400, "band_logits position_logits")],
)  # fmt: skip
def test_a_batch_shares_logits(B, M, T, shared, path):
    """Their gradients are sums over the batch, computed in parts that do not divide it evenly."""
    if path == "eager" and T > 50 and chunks.WORKSPACE["cpu"] == 1:
        pytest.skip("a loop of many queries")
    lone = dict.fromkeys(shared.split(), (0,))
    check(drawn(lone=lone, mask=padding(B, 11), T=T, S=11, B=B, M=M, K=5), path, DOUBLE)


STARTS = [(False, 0), (False, 7), (False, 14), (True, 0), (True, 7), (True, 16)]


@pytest.mark.parametrize("number", [0, -1.5, -math.inf])
@pytest.mark.parametrize("causal, start", slow_but([STARTS[0], STARTS[2], STARTS[4]], STARTS))
@pytest.mark.parametrize("K, others", [(3, "shared"), (3, "position_logits"), (5, ""), (3, "segments")])
def test_outside_logits_may_be_a_number(number, causal, start, K, others, path):
    """One of -inf limits the range: to windows of 3 of 12 keys, which pays, or to 5. Some queries have no key."""
    start, ids = (start % 6, identifiers(3, 12)) if others == "segments" else (start, None)
    mask = None if others == "shared" and causal else padding(3, 12)
    some = drawn(
        f"query key band_logits outside_logits {others if 'logits' in others else ''}", mask=mask, ids=ids,
        lone=dict(band_logits=(2,)) if others == "shared" else None, options=dict(start=start, causal=causal), B=3, T=6,
        S=12, K=K,
    )  # fmt: skip
    some.tensors["outside_logits"].fill_(number)
    with forced("reference"):
        expected = results(some)
    for given in (some.tensors, expected):
        del given["outside_logits"]
    with forced(path):
        assert_close(results(some._replace(call=partial(some.call, outside_logits=number))), expected, 1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_never_changes_the_other_tokens(causal, path):
    """Values in the padding do not matter either, even infinite ones as an uninitialized buffer may hold."""
    some = drawn(T=12, S=12, K=5, options=dict(causal=causal))
    short = {n: t[:, :, :8, :8] if n == "position_logits" else t[:, :, :8] for n, t in some.tensors.items()}
    mask = torch.arange(12).expand(2, 12) >= 8
    with forced(path):
        expected = some.call(**short)
        for n, place in (("key", (..., slice(8, 12), slice(None))), ("value", (..., slice(8, 12), slice(None))),
                         ("position_logits", (..., slice(8, 12)))):  # fmt: skip
            some.tensors[n][place] = 1e30
        torch.testing.assert_close(some.call(**some.tensors, key_padding_mask=mask)[:, :, :8], expected)


def test_memory_is_that_of_the_arguments(path):
    """Neither pass stores all logits: the test counts bytes beyond arguments and their gradients."""
    from tools.bench.memory import peak_memory

    if chunks.WORKSPACE["cpu"] == 1:
        pytest.skip("a loop of many queries")
    B, M, T = 1, 4, 2048
    some = drawn(TERMS[1], SINGLE, B=B, M=M, T=T, S=T, d=16, dv=16, K=7, options=dict(causal=True))
    leaves = some.leaves()
    with forced(path):
        held = peak_memory(lambda: torch.autograd.grad(some.call(**leaves).square().sum(), [*leaves.values()]), "cpu")
    assert held < B * M * T * T  # bytes: a quarter of all logits


SLOTS = [(1, 1, 4800, 16), (2, 4, 4800, 2), (1, 1, 100, 3), (3, 8, 4800, 1), (0, 0, 0, 1)]


@pytest.mark.parametrize("B, M, T, slots", SLOTS)
def test_few_heads_are_divided_among_threads(B, M, T, slots):
    assert cpu._slots(B, M, T) == slots
