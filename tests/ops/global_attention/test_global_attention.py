"""Global attention: the reference against plain loops, every path against the reference, invalid arguments."""

import itertools
import math

import pytest
import torch

from attn_plugins.ops import backend, global_attention, reference
from attn_plugins.ops.common import chunks
from tests.ops.global_attention.operands import (
    ALL,
    COMBINATIONS,
    attend,
    check_against_reference,
    close,
    gradients,
    make,
    masked_arguments,
)

NAMES = ("query", "key", "value", "row_logits", "column_logits", "key_logits")


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
    close(attend(arguments), expected)
    close(reference.global_attention(*arguments, 0.7), expected)


@pytest.mark.sampled(32)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("terms", COMBINATIONS)
def test_gradients_equal_the_reference(terms, broadcast, dtype, path):
    check_against_reference(make(terms, broadcast=broadcast, dtype=dtype), dtype)


@pytest.mark.parametrize("terms", [ALL, (False, True, True, True), (True, False, True, False)])
@pytest.mark.parametrize("budget", [1, 40, 130, 10**6])
def test_chunks_of_any_size(terms, budget, monkeypatch):
    monkeypatch.setitem(chunks.WORKSPACE, "cpu", budget * 8)
    for broadcast in (False, True):
        with backend("eager"):
            check_against_reference(make(terms, B=3, broadcast=broadcast))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("d, dv", [(1, 1), (16, 8), (17, 33), (40, 70)])
def test_sizes_around_the_blocks_and_vectors(d, dv, dtype):
    """Widths and numbers of keys below, at and above whole vectors; queries around whole blocks."""
    for grid, keys in (((4, 6), (8, 8)), ((5, 5), (1, 65)), ((1, 47), (3, 43)), ((9, 1), (33, 1)), ((1, 1), (1, 1))):
        for terms in (ALL, (True, False, False, False)):
            check_against_reference(make(terms, B=1, M=2, grid=grid, keys=keys, d=d, dv=dv, dtype=dtype), dtype)


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


def test_chunks_of_content_without_a_width():
    terms = [torch.randn(2, 1, 2, 3, width, dtype=torch.float64, requires_grad=True) for width in (0, 0, 5)]
    with backend("eager"):
        output = global_attention(*terms)
        grads = torch.autograd.grad(output.sum(), terms)
    torch.testing.assert_close(output, terms[2].mean((2, 3), keepdim=True).expand_as(output))
    assert [g.shape for g in grads] == [t.shape for t in terms]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_masked_keys(dtype, path):
    arguments = masked_arguments(dtype)
    output = attend(arguments)
    close(output[:, :, 0], arguments[2][:, :, :1, 0].expand_as(output[:, :, 0]), dtype)
    assert (output[:, :, 1] == 0).all()
    assert output.isfinite().all()
    expected = gradients(lambda a: reference.global_attention(*a, 0.7), [t.double() for t in arguments])
    for actual, wanted in zip(gradients(attend, arguments), expected):
        assert actual.isfinite().all()
        close(actual, wanted, dtype, factor=20)


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


def test_large_logits():
    arguments = [t if i == 2 else t * 1e4 for i, t in enumerate(make(dtype=torch.float32))]
    exact = reference.global_attention(*[t.double() for t in arguments], 0.7)
    output = attend(arguments)
    assert output.isfinite().all()
    close(output, exact, torch.float32, factor=50)  # float32 rounds differences of 1e8 by up to 8
    assert all(g.isfinite().all() for g in gradients(attend, arguments))


def test_nan_is_not_hidden():
    arguments = make(dtype=torch.float32)
    arguments[0][0, 0, 0, 0, 0] = float("nan")
    output = attend(arguments)
    assert output[0, 0, 0, 0].isnan().all()
    assert output[1].isfinite().all()


def test_queries_without_positions_are_not_expanded():
    value = torch.randn(2, 3, 4, 5, 6)
    assert global_attention(None, None, value).shape == (2, 3, 1, 1, 6)
    assert global_attention(None, None, value, key_logits=torch.randn(1, 3, 4, 5)).shape == (2, 3, 1, 1, 6)
    assert global_attention(None, None, value, row_logits=torch.randn(1, 1, 7, 1, 4)).shape == (2, 3, 7, 1, 6)


def changed(**replacements):
    arguments = dict(zip(NAMES, make(dtype=torch.float32)))
    return {**arguments, **replacements}


@pytest.mark.parametrize(
    "replacements, error, message",
    [
        (dict(value=torch.randn(2, 3, 5, 6)), ValueError, r"value must have shape \(B, M, Hk, Wk, dv\)"),
        (dict(value=torch.randn(2, 3, 0, 5, 6)), ValueError, "at least one key"),
        (dict(query=None), ValueError, "together"),
        (dict(query=torch.randn(2, 4, 3, 4, 4)), ValueError, "query must have value's batch and heads"),
        (dict(query=torch.randn(2, 3, 3, 4)), ValueError, "query must have shape"),
        (dict(key=torch.randn(2, 3, 2, 5, 3)), ValueError, "key must have shape"),
        (dict(key=torch.randn(2, 3, 5, 2, 4)), ValueError, "key must have shape"),
        (dict(row_logits=torch.randn(2, 3, 3, 4, 5)), ValueError, "row_logits must have shape"),
        (dict(row_logits=torch.randn(2, 2, 3, 4, 2)), ValueError, "row_logits must have shape"),
        (dict(column_logits=torch.randn(2, 3, 3, 4, 2)), ValueError, "column_logits must have shape"),
        (dict(column_logits=torch.randn(3, 4, 5)), ValueError, "column_logits must have shape"),
        (dict(key_logits=torch.randn(2, 3, 10)), ValueError, "key_logits must have shape"),
        (dict(key_logits=torch.randn(2, 3, 1, 5)), ValueError, "key_logits must have shape"),
    ],
)
def test_bad_input(replacements, error, message):
    arguments = changed(**replacements)
    tensors = {n: arguments.pop(n) for n in NAMES[:3]}
    with pytest.raises(error, match=message):
        global_attention(tensors["query"], tensors["key"], tensors["value"], **arguments)


def test_queries_are_the_query_tensors_own():
    """Logits of more positions than the query has would cause reads beyond its end."""
    query, key, value = torch.randn(1, 1, 1, 1, 4), torch.randn(1, 1, 2, 3, 4), torch.randn(1, 1, 2, 3, 4)
    for size in (0, 5):
        with pytest.raises(ValueError, match=r"row_logits must have shape \(1, 1, 1, 1, 2\), positions of query"):
            global_attention(query, key, value, row_logits=torch.randn(1, 1, size, 1, 2))
