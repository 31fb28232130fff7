"""Sequence attention by Triton: interpreted on the CPU where there is no device."""

from __future__ import annotations

import math

import pytest
import torch

from attn_plugins.ops import backend, explain, sequence_attention
from attn_plugins.ops.common import triton_launch
from attn_plugins.ops.sequence_attention import triton as triton_sequence
from attn_plugins.ops.sequence_attention.operands import Options, Terms
from attn_plugins.ops.sequence_attention.sequence_attention import ATTEND
from attn_plugins.ops.sequence_attention.triton import Tile
from tests.helpers.triton_checks import DEVICE, DTYPES, check, needs_triton, randn, results_and_gradients
from tests.ops.sequence_attention.operands import ALL, TERMS, padding

pytestmark = needs_triton


def operands(terms=ALL, *, T=20, S=37, K=5, B=2, M=1, d=8, dv=5, dtype=torch.float32, shared=(0, 1, 2)):
    """Random terms; axis ``shared[i]`` of band, outside, position logits is of size 1, or none where it is None."""
    content, band, outside, position = terms

    def logits(seed: int, *last: int) -> torch.Tensor:
        shape = [B, M, T]
        axis = shared[seed]
        if axis is not None and (axis != 2 or content):
            shape[axis] = 1
        return randn(*shape, *last, dtype=dtype, seed=seed)

    return Terms(
        randn(B, M, T, d, dtype=dtype, seed=3) if content else None,
        randn(B, M, S, d, dtype=dtype, seed=4) if content else None,
        randn(B, M, S, dv, dtype=dtype, seed=5),
        logits(0, K) if band else None,
        logits(1) if outside else None,
        logits(2, S) if position else None,
    )


def options(mask=None, start=0, causal=False, scale=0.4) -> Options:
    return Options(None if mask is None else mask.to(DEVICE), start, causal, scale)


@pytest.fixture
def small_tiles(monkeypatch):
    """Several blocks even of short sequences."""
    tiles = (Tile(16, 32, 1, 1), Tile(16, 32, 1, 1), Tile(32, 16, 1, 1), Tile(16, 16, 1, 1))
    for kinds in (triton_sequence.TILES, triton_sequence.OTHER_TILES):
        for widths in kinds.values():
            for width in widths:
                monkeypatch.setitem(widths, width, tiles)


@pytest.mark.parametrize(
    "terms, causal, start, segments",
    [
        (ALL, True, 17, False),
        (ALL, False, 9, True),
        (TERMS[-1], True, 17, True),
        *(pytest.param(terms, n % 2 == 1, 9, n % 3 == 0, marks=pytest.mark.slow)
          for n, terms in enumerate(TERMS[1:8:2])),
    ],
)  # fmt: skip
def test_terms(terms, causal, start, segments, small_tiles):
    shared = (None, 0, 2) if causal else (2, None, 0)
    ids = torch.randint(3, (2 if causal else 1, 37), generator=torch.Generator().manual_seed(0)).int().to(DEVICE)
    how = options(padding(2, 37) if not segments else None, start, causal)
    check(ATTEND, operands(terms, T=19, shared=shared), how._replace(segment_ids=ids if segments else None))


@DTYPES
def test_dtypes_and_real_tiles(dtype):
    terms = operands(
        ALL if dtype == torch.float32 else (True, True, False, False),
        T=70,
        S=97,
        K=9,
        B=1,
        d=16,
        dv=16,
        dtype=dtype,
        shared=(None, None, None),
    )
    check(ATTEND, terms, options(causal=True, start=27))


@pytest.mark.parametrize(
    "T, S, K, d, dv, start, causal",
    [(1, 1, 1, 1, 1, 0, False), (1, 50, 7, 16, 20, 49, True), (40, 17, 101, 3, 64, 2, False),
     (5, 40, 3, 4, 4, 200, True), (33, 33, 5, 70, 128, 0, False)],
)  # fmt: skip
def test_sizes(T, S, K, d, dv, start, causal):
    far = start > S + K  # then all outside logits have the gradient 0
    terms = operands((True, True, not far, True), T=T, S=S, K=K, d=d, dv=dv, B=1, shared=(None, None, None))
    # A single query's gradient of an outside logit is one sum that is nearly 0.
    check(ATTEND, terms, options(start=start, causal=causal), 1e-4 if T == 1 else None)


@pytest.mark.parametrize(
    "S, shared, dtype",
    [
        (40, 1, torch.bfloat16),
        (41, 2, torch.float16),
        pytest.param(41, 0, torch.float32, marks=pytest.mark.slow),
        pytest.param(40, None, torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rows_of_position_logits_that_are_read_at_once(S, shared, dtype, small_tiles):
    terms = operands((True, False, False, True), M=2, T=18, S=S, dtype=dtype, shared=(None, None, shared))
    check(ATTEND, terms, options(padding(2, S), 22, causal=shared == 1))


@pytest.mark.parametrize(
    "masked, shared, dtype",
    [(False, (0,), torch.float16), (True, (0, 1), torch.bfloat16), (True, (0, 2), torch.float16),
     (False, None, torch.bfloat16)],
    ids=str,
)  # fmt: skip
def test_gradients_of_windows_by_one_kernel(masked, shared, dtype, monkeypatch):
    """Several entries of a batch share a program; the last has fewer."""
    monkeypatch.setattr(triton_sequence, "WINDOW_PROGRAMS", 4)
    terms = operands((True, False, False, shared is not None), B=3, M=2, T=12, S=14, dtype=dtype, shared=(0, 0, None))
    for axis in shared or ():
        terms = terms._replace(position_logits=terms.position_logits.narrow(axis, 0, 1))
    how = options(padding(3, 14), 2, causal=True) if masked else options()
    ids = torch.arange(14, dtype=torch.int32, device=DEVICE).div(5, rounding_mode="floor").expand(1, 14)
    check(ATTEND, terms, how if masked else how._replace(segment_ids=ids.int().contiguous()))
    with backend("triton"), triton_launch.recorded() as recorded:
        output, lse = ATTEND._forward(*terms, *how)
        ATTEND._backward(output, *terms, output, lse, *how, [term is not None for term in terms])
    assert [launch.kernel.__name__ for launch in recorded] == ["attend", "differentiate_windows"]


def test_a_large_batch_shares_position_logits(monkeypatch, small_tiles):
    """A batch is parted where it has more entries than programs are wanted; the last part is smaller."""
    monkeypatch.setattr(triton_sequence, "PROGRAMS", 3)
    terms = operands((True, False, False, True), B=7, T=9, S=12, shared=(None, None, 0))
    check(ATTEND, terms, options())


def test_only_the_band_is_seen(small_tiles):
    """An outside logit of -inf, as a number is handed on: its gradient is 0, and not rounding noise."""
    terms = operands((True, True, True, False), shared=(None, None, None))
    terms = terms._replace(outside_logits=terms.value.new_full((1, 1, 1), -math.inf))
    check(ATTEND, terms, options())


def test_an_expanded_gradient(small_tiles):
    terms = operands((True, False, False, False))
    shape = terms.query.shape[:3] + terms.value.shape[3:]
    results = results_and_gradients(ATTEND, terms, options(), torch.ones(1, device=DEVICE).expand(shape))
    wanted = results_and_gradients(ATTEND, terms, options(), torch.ones(shape, device=DEVICE))
    for a, b in zip(results, wanted):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_what_it_refuses_in_words():
    query = torch.zeros(1, 1, 3, 129, device="meta")
    assert explain(sequence_attention, query, query, query).refusals["triton"].startswith("its kernels are for CUDA")
    query = torch.zeros(1, 1, 3, 129, device=DEVICE)
    with backend("triton"), pytest.raises(ValueError, match="hold widths of up to 128 in float32, and a head has 129"):
        sequence_attention(query, query, query)
    value = torch.zeros(1, 1, 1, 1, device=DEVICE).expand(1, 1, 2**23 + 1, 1)
    with backend("triton"), pytest.raises(ValueError, match="counts up to 8388608 queries, keys and taps, and there"):
        sequence_attention(None, None, value, position_logits=value[..., 0].unsqueeze(2))


def test_leaves_few_queries_of_many_keys_to_products(monkeypatch):
    """Not where it is asked for, nor where batch and heads fill a device."""
    monkeypatch.setattr(triton_launch, "refusal", lambda tensor: None)

    def reason(B: int, M: int, T: int, S: int) -> str | None:
        value = torch.empty(B, M, S, 64, dtype=torch.bfloat16, device="meta")
        terms = Terms(value[:, :, :T], value, value, None, None, value.new_empty(1, M, T, S))
        return triton_sequence.refuses(terms, options())

    assert reason(1, 8, 65, 40000) == "only 16 programs would go through 40000 keys, which does not pay"
    assert reason(1, 9, 65, 40000) is None
    assert reason(1, 8, 65, 2000) is None
    with backend("triton"):
        assert reason(1, 1, 1, 40000) is None
