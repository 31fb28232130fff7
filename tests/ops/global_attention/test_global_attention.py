"""Global attention: every path against plain loops, with keys that have no position, and in chunks of any size."""

from __future__ import annotations

import itertools
import math
from itertools import cycle

import numpy as np
import pytest
import torch
from torch import Tensor

from attn_plugins.core import chunks
from attn_plugins.ops import global_attention
from attn_plugins.ops.global_attention.prefix import corner
from tests.ops.global_attention.operands import ALL, BROADCAST, COMBINATIONS, FULL, drawn
from tests.ops.test_contract import FIRST
from tests.ops.test_contract_backends import DOUBLE, HALF, SINGLE, check, plain_backends


def loops(
    value, query=None, key=None, row_logits=None, column_logits=None, key_logits=None, prefix_key=None,
    prefix_value=None,
) -> Tensor:  # fmt: skip
    """Compute Equations 1 and 2, one query and one key at a time; a prefix has content alone."""
    given = value, query, key, row_logits, column_logits, key_logits, prefix_key, prefix_value
    value, query, key, row_logits, column_logits, key_logits, prefix_key, prefix_value = (
        None if t is None else t.numpy() for t in given
    )
    B, M, Hk, Wk, dv = value.shape
    grids = [t.shape[2:4] for t in (query, row_logits, column_logits) if t is not None]
    Hq, Wq = (max([1, *sizes]) for sizes in zip(*grids)) if grids else (1, 1)
    output = np.zeros((B, M, Hq, Wq, dv))

    def at(tensor: np.ndarray | None, *index: int) -> float:
        return 0.0 if tensor is None else float(tensor[tuple(min(i, n - 1) for i, n in zip(index, tensor.shape))])

    for b, m, y, x in itertools.product(range(B), range(M), range(Hq), range(Wq)):
        logits, values = [], []
        for ky, kx in itertools.product(range(Hk), range(Wk)):
            content = 0.0 if query is None else 0.7 * float(query[b, m, y, x] @ key[b, m, ky, kx])
            places = at(row_logits, b, m, y, x, ky) + at(column_logits, b, m, y, x, kx) + at(key_logits, b, m, ky, kx)
            logits.append(content + places)
            values.append(value[b, m, ky, kx])
        for p in range(0 if prefix_value is None else prefix_value.shape[2]):
            logits.append(0.0 if query is None else 0.7 * float(query[b, m, y, x] @ prefix_key[b, m, p]))
            values.append(prefix_value[b, m, p])
        weights = [math.exp(logit) for logit in logits]
        output[b, m, y, x] = sum(weight / sum(weights) * row for weight, row in zip(weights, values))
    return torch.from_numpy(output)


# Terms, axes of size 1, and the number of keys without a position.
CASES = [*((terms, lone, None) for terms in COMBINATIONS for lone in (FULL, BROADCAST)),
         *zip(COMBINATIONS, cycle([BROADCAST, FULL]), cycle([1, 3, 5]))]  # fmt: skip


@pytest.mark.parametrize("terms, lone, P", CASES)
def test_equals_the_definition_in_loops(terms, lone, P):
    prefix = "" if P is None else "prefix_value prefix_key" if "query" in terms else "prefix_value"
    some = drawn(f"{terms} {prefix}", lone=lone, P=P, keys=(4, 3))  # 5 keys leave one of 3 x 2 cells empty
    expected = loops(**some.tensors)
    for name in ("reference", FIRST, *plain_backends("global_attention")):
        torch.testing.assert_close(check(some, name, DOUBLE)["output"], expected)


def test_a_query_that_no_place_has_a_key_for_sees_the_prefix():
    some = drawn(f"{ALL} prefix_key prefix_value")
    some.tensors["row_logits"].fill_(-math.inf)
    torch.testing.assert_close(some.call(**some.tensors), loops(**some.tensors))
    some, none = drawn(), drawn(f"{ALL} prefix_key prefix_value", P=0)
    assert torch.equal(none.call(**some.tensors, prefix_key=none.tensors["prefix_key"],
                                 prefix_value=none.tensors["prefix_value"]), some.call(**some.tensors))  # fmt: skip


@pytest.mark.parametrize("size, P, expected", [((14, 14), 1, (1, 1)), ((37, 37), 5, (2, 3)), ((2, 50), 3, (1, 3))])
def test_the_corner_of_a_prefix_has_few_cells(size, P, expected):
    a, b = corner(*size, P)
    assert a * b >= P
    assert sorted((a, b)) == sorted(expected)


@pytest.mark.parametrize("terms", [ALL, "row_logits column_logits key_logits", "query key column_logits"])
@pytest.mark.parametrize("budget", [1, 40, 130, 10**6])
def test_chunks_of_any_size(terms, budget, monkeypatch):
    monkeypatch.setitem(chunks.WORKSPACE, "cpu", budget * 8)
    for lone in (FULL, BROADCAST):
        check(drawn(terms, B=3, lone=lone), "eager", DOUBLE)


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


def test_fully_masked_queries_without_content_return_zeros():
    """Fully masked queries return zeros in the closed forms as well."""
    row = torch.zeros(1, 1, 3, 1, 2)
    row[:, :, 1] = -math.inf
    value = torch.randn(2, 3, 2, 5, 6)
    output = global_attention(None, None, value, row_logits=row, column_logits=torch.randn(1, 1, 1, 4, 5))
    assert (output[:, :, 1] == 0).all()
    assert (output[:, :, 0] != 0).all()
    assert not global_attention(None, None, value, key_logits=torch.full((1, 1, 2, 5), -math.inf)).any()


@pytest.mark.cuda
@pytest.mark.parametrize("width", [28, 300])  # 300: too wide to fold
@pytest.mark.parametrize("terms", COMBINATIONS[1:])
def test_any_terms_on_cuda(terms, width, full_float32):
    for dtype in (SINGLE, HALF):
        check(drawn(terms, dtype, "cuda", d=width), FIRST, dtype, times=20)
