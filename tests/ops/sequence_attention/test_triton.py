"""Sequence attention by Triton: interpreted on the CPU where there is no device."""

from __future__ import annotations

import math

import pytest
import torch

from attn_plugins.core import triton_launch
from attn_plugins.ops import backend, explain, sequence_attention
from attn_plugins.ops.sequence_attention import triton as triton_sequence
from attn_plugins.ops.sequence_attention.operands import Options, Terms
from attn_plugins.ops.sequence_attention.triton import Tile
from tests.helpers.triton_checks import DEVICE, SLOW_INTERPRETED, needs_triton, slow_interpreted
from tests.ops.contract_examples import Example
from tests.ops.sequence_attention import operands
from tests.ops.sequence_attention.operands import ALL, TERMS, identifiers, padding
from tests.ops.test_contract import forced, results
from tests.ops.test_contract_backends import BRAIN, HALF, SINGLE, check

pytestmark = needs_triton
CONTENT, POSITION = "query key", "query key position_logits"
SIZES = dict(B=2, M=1, T=20, S=37, K=5, d=8, dv=5)


def drawn(terms=ALL, dtype=SINGLE, **extents) -> Example:
    return operands.drawn(terms, dtype, DEVICE, **{**SIZES, **extents})


@pytest.fixture
def small_tiles(monkeypatch):
    """Several blocks even of short sequences."""
    tiles = (Tile(16, 32, 1, 1), Tile(16, 32, 1, 1), Tile(32, 16, 1, 1), Tile(16, 16, 1, 1))
    for kinds in (triton_sequence.TILES, triton_sequence.OTHER_TILES):
        for widths in kinds.values():
            for width in widths:
                monkeypatch.setitem(widths, width, tiles)


@pytest.mark.parametrize(
    "terms, lone, causal, start, segments",
    [
        pytest.param(ALL, dict(outside_logits=(0,), position_logits=(2,)), True, 17, 0, marks=SLOW_INTERPRETED),
        pytest.param(ALL, dict(band_logits=(2,), position_logits=(0,)), False, 9, 1, marks=SLOW_INTERPRETED),
        ("position_logits", {}, True, 17, 2),
        *(pytest.param(terms, dict(position_logits=(0,)), n % 2 == 1, 9, (n % 3 == 0) * (1 + n % 2),
                       marks=pytest.mark.slow) for n, terms in enumerate(TERMS[1:8:2])),
    ],
)  # fmt: skip
def test_any_terms_equal_the_reference(terms, lone, causal, start, segments, small_tiles):
    mask = None if segments else padding(2, 37)
    options = dict(causal=causal, start=start)
    check(drawn(terms, T=19, lone=lone, mask=mask, ids=identifiers(segments, 37), options=options), "triton", SINGLE)


@pytest.mark.parametrize("dtype", [*(pytest.param(t, marks=SLOW_INTERPRETED) for t in (SINGLE, HALF)), BRAIN], ids=str)
def test_dtypes_and_real_tiles(dtype):
    terms = ALL if dtype == SINGLE else "query key band_logits"
    some = drawn(terms, dtype, T=70, S=97, K=9, B=1, d=16, dv=16, options=dict(causal=True, start=27))
    check(some, "triton", dtype)


@pytest.mark.parametrize(
    "T, S, K, d, dv, start, causal",
    [(1, 1, 1, 1, 1, 0, False), (1, 50, 7, 16, 20, 49, True), (40, 17, 101, 3, 64, 2, False),
     (5, 40, 3, 4, 4, 200, True), pytest.param(33, 33, 5, 70, 128, 0, False, marks=SLOW_INTERPRETED)],
)  # fmt: skip
def test_any_length_equals_the_reference(T, S, K, d, dv, start, causal):
    some = drawn(B=1, T=T, S=S, K=K, d=d, dv=dv, options=dict(start=start, causal=causal))
    check(some, "triton", SINGLE, times=5 if T == 1 else 1)  # a single query's gradients are sums that are nearly 0


@pytest.mark.parametrize(
    "S, shared, dtype",
    [
        pytest.param(40, (1,), BRAIN, marks=SLOW_INTERPRETED),
        pytest.param(41, (2,), HALF, marks=pytest.mark.slow),
        pytest.param(41, (0,), SINGLE, marks=pytest.mark.slow),
        pytest.param(40, (), SINGLE, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rows_of_position_logits_that_are_read_at_once(S, shared, dtype, small_tiles):
    options, lone = dict(start=22, causal=shared == (1,)), dict(position_logits=shared)
    some = drawn(POSITION, dtype, M=2, T=18, S=S, lone=lone, mask=padding(2, S), options=options)
    check(some, "triton", dtype)


@pytest.mark.parametrize(
    "masked, shared, dtype",
    [
        pytest.param(False, (0,), HALF, marks=SLOW_INTERPRETED),
        (True, (0, 1), BRAIN),
        pytest.param(True, (0, 2), HALF, marks=SLOW_INTERPRETED),
        (False, None, BRAIN),
    ],
    ids=str,
)
def test_gradients_of_windows_by_one_kernel(masked, shared, dtype, monkeypatch):
    """Several entries of a batch share a program; the last has fewer."""
    monkeypatch.setattr(triton_sequence, "WINDOW_PROGRAMS", 4)
    sizes = dict(B=3, M=2, T=12, S=14, lone=dict(position_logits=shared))
    if masked:
        sizes |= dict(mask=padding(3, 14), options=dict(start=2, causal=True))
    else:
        sizes |= dict(ids=(torch.arange(14) // 5).int().expand(1, 14).contiguous())
    some = drawn(CONTENT if shared is None else POSITION, dtype, **sizes)
    check(some, "triton", dtype)
    with forced("triton"), triton_launch.recorded() as recorded:
        results(some)
    assert [launch.kernel.__name__ for launch in recorded] == ["attend", "differentiate_windows"]


def test_a_large_batch_shares_position_logits(monkeypatch, small_tiles):
    """A batch is parted where it has more entries than programs are wanted; the last part is smaller."""
    monkeypatch.setattr(triton_sequence, "PROGRAMS", 3)
    check(drawn(POSITION, B=5, T=9, S=12, lone=dict(position_logits=(0,))), "triton", SINGLE)


def test_only_the_band_is_seen(small_tiles):
    """An outside logit of -inf, as a number is handed on: its gradient is 0, and not rounding noise."""
    some = drawn(TERMS[1], B=1, lone=dict(outside_logits=(0, 1, 2)))
    some.tensors["outside_logits"].fill_(-math.inf)
    assert not check(some, "triton", SINGLE)["outside_logits"].any()


@slow_interpreted
def test_an_expanded_gradient(small_tiles):
    some = drawn(CONTENT)
    with forced("triton"):
        gradients = []
        for ones in (torch.ones(1, device=DEVICE), torch.ones(2, 1, 20, 5, device=DEVICE)):
            leaves = some.leaves()
            gradients.append(torch.autograd.grad(some.call(**leaves), [*leaves.values()], ones.expand(2, 1, 20, 5)))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_what_it_refuses_in_words():
    query = torch.zeros(1, 1, 3, 129, device="meta")
    assert explain(sequence_attention, query, query, query).refusals["triton"].startswith("its kernels are for GPUs")
    query = torch.zeros(1, 1, 3, 129, device=DEVICE)
    with backend("triton"), pytest.raises(ValueError, match="hold widths of up to 128 in float32, and a head has 129"):
        sequence_attention(query, query, query)
    value = torch.zeros(1, 1, 1, 1, device=DEVICE).expand(1, 1, 2**23 + 1, 1)
    with backend("triton"), pytest.raises(ValueError, match="counts up to 8388608 queries, keys and taps, and there"):
        sequence_attention(None, None, value, position_logits=value[..., 0].unsqueeze(2))


def test_leaves_few_queries_of_many_keys_to_products(monkeypatch):
    """Not where batch and heads fill a device."""
    monkeypatch.setattr(triton_launch, "refusal", lambda tensor: None)
    monkeypatch.setattr(triton_launch, "prefers_not", lambda terms, options: None)

    def reason(B: int, M: int, T: int, S: int) -> str | None:
        value = torch.empty(B, M, S, 64, dtype=BRAIN, device="meta")
        terms = Terms(value[:, :, :T], value, value, None, None, value.new_empty(1, M, T, S))
        options = Options(None, 0, False, 0.4)
        assert triton_sequence.cannot(terms, options) is None
        return triton_sequence.prefers_not(terms, options)

    assert reason(1, 8, 65, 40000) == "only 16 programs would go through 40000 keys, which does not pay"
    assert reason(1, 9, 65, 40000) is None
    assert reason(1, 8, 65, 2000) is None
