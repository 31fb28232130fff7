"""Global attention: the reference against plain loops, every path against the reference, invalid arguments."""

import itertools
import math

import pytest
import torch

from attn_plugins.ops import backend, global_attention, reference
from attn_plugins.ops.common import chunks, library
from tests.ops.global_attention.operands import ALL, COMBINATIONS, check_against_reference, close, make


def loops(arguments, scale=0.7):
    """Compute Equations 1 and 2, one query and one key at a time."""
    query, key, value, row, column, key_logits = arguments
    B, M, Hk, Wk, dv = value.shape
    shapes = [t.shape[2:4] for t in (query, row, column) if t is not None]
    Hq, Wq = max([s[0] for s in shapes], default=1), max([s[1] for s in shapes], default=1)
    output = torch.zeros(B, M, Hq, Wq, dv, dtype=torch.float64)

    def at(tensor, *index):
        return tensor[tuple(min(i, n - 1) for i, n in zip(index, tensor.shape))]

    for b, m, y, x in itertools.product(range(B), range(M), range(Hq), range(Wq)):
        weights = {}
        for ky, kx in itertools.product(range(Hk), range(Wk)):
            logit = 0.0
            if query is not None:
                logit += scale * float((query[b, m, y, x].double() * key[b, m, ky, kx].double()).sum())
            logit += float(at(row, b, m, y, x)[ky]) if row is not None else 0
            logit += float(at(column, b, m, y, x)[kx]) if column is not None else 0
            logit += float(at(key_logits, b, m, ky, kx)) if key_logits is not None else 0
            weights[ky, kx] = math.exp(logit)
        total = sum(weights.values())
        for (ky, kx), weight in weights.items():
            if weight:
                output[b, m, y, x] += weight / total * value[b, m, ky, kx].double()
    return output


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("terms", COMBINATIONS)
def test_equals_the_definition_in_loops(terms, broadcast):
    arguments = make(terms, broadcast=broadcast)
    expected = loops(arguments)
    close(reference.global_attention(*arguments, 0.7), expected)
    for name in ("cpu", "eager") if library.has_kernel("cpu") else ("eager",):
        with backend(name):
            check_against_reference(arguments)


@pytest.mark.parametrize("terms", [ALL, (False, True, True, True), (True, False, True, False)])
@pytest.mark.parametrize("budget", [1, 40, 130, 10**6])
def test_chunks_of_any_size(terms, budget, monkeypatch):
    monkeypatch.setitem(chunks.WORKSPACE, "cpu", budget * 8)
    for broadcast in (False, True):
        with backend("eager"):
            check_against_reference(make(terms, B=3, broadcast=broadcast))


def test_chunks_cover_every_query_once():
    for B, M, Hq, Wq, keys, budget in itertools.product((1, 3), (1, 2), (1, 5), (1, 4), (1, 7), (1, 9, 33, 1000)):
        seen = torch.zeros(B, Hq, Wq)
        pieces = list(chunks.chunks(B, M, Hq, Wq, keys, budget))
        for b, h, w in pieces:
            seen[b, h, w] += 1
        assert (seen == 1).all()
        first = seen[pieces[0]].numel()
        assert all(seen[piece].numel() <= first for piece in pieces)
        assert first == 1 or first * M * keys <= budget


def test_masked_without_content():
    """Fully masked queries return zeros on both factored paths as well."""
    row = torch.zeros(1, 1, 3, 1, 2)
    row[:, :, 1] = float("-inf")
    column = torch.randn(1, 1, 1, 4, 5)
    value = torch.randn(2, 3, 2, 5, 6)
    output = global_attention(None, None, value, row_logits=row, column_logits=column)
    assert output.shape == (2, 3, 3, 4, 6)
    assert (output[:, :, 1] == 0).all()
    assert (output[:, :, 0] != 0).all()
    assert (global_attention(None, None, value, key_logits=torch.full((1, 1, 2, 5), float("-inf"))) == 0).all()


@pytest.mark.cuda
@pytest.mark.parametrize("width", [28, 300])  # 300: too wide to fold
@pytest.mark.parametrize("terms", [t for t in COMBINATIONS if any(t)])
def test_any_terms_on_cuda(terms, width, full_float32):
    for dtype in (torch.float32, torch.float16):
        check_against_reference([t if t is None else t.cuda() for t in make(terms, d=width, dtype=dtype)], dtype)


def test_queries_without_positions_are_not_expanded():
    value = torch.randn(2, 3, 4, 5, 6)
    assert global_attention(None, None, value).shape == (2, 3, 1, 1, 6)
    assert global_attention(None, None, value, key_logits=torch.randn(1, 3, 4, 5)).shape == (2, 3, 1, 1, 6)
    assert global_attention(None, None, value, row_logits=torch.randn(1, 1, 7, 1, 4)).shape == (2, 3, 7, 1, 6)


def test_queries_are_the_query_tensors_own():
    """Logits of more positions than the query has would cause reads beyond its end."""
    query, key, value = torch.randn(1, 1, 1, 1, 4), torch.randn(1, 1, 2, 3, 4), torch.randn(1, 1, 2, 3, 4)
    for size in (0, 5):
        with pytest.raises(ValueError, match=r"row_logits must have shape \(1, 1, 1, 1, 2\), positions of query"):
            global_attention(query, key, value, row_logits=torch.randn(1, 1, size, 1, 2))
