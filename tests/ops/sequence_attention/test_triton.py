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

pytestmark = [needs_triton, pytest.mark.sampled(4, every_value=False)]


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


@pytest.mark.parametrize("causal, start", [(False, 9), (True, 17)])
@pytest.mark.parametrize("terms", TERMS)
def test_every_combination_of_terms(terms, causal, start, small_tiles):
    shared = (None, 0, 2) if causal else (2, None, 0)
    check(ATTEND, operands(terms, T=19, shared=shared), options(padding(2, 37) if start else None, start, causal))


@DTYPES
@pytest.mark.parametrize("terms", [ALL, (True, True, False, False)])
def test_dtypes_and_real_tiles(terms, dtype):
    terms = operands(terms, T=70, S=97, K=9, B=1, d=16, dv=16, dtype=dtype, shared=(None, None, None))
    check(ATTEND, terms, options(causal=True, start=27))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "T, S, K, d, dv, start",
    [(1, 1, 1, 1, 1, 0), (1, 50, 7, 16, 20, 49), (49, 49, 3, 32, 32, 0), (40, 17, 101, 3, 64, 2), (5, 40, 3, 4, 4, 200),
     (33, 33, 5, 70, 128, 0), (5, 9, 3, 0, 4, 1)],
)  # fmt: skip
def test_sizes(T, S, K, d, dv, start, causal):
    far = start > S + K  # then all outside logits have the gradient 0
    terms = operands((True, True, not far, True), T=T, S=S, K=K, d=d, dv=dv, B=1, shared=(None, None, None))
    # A single query's gradient of an outside logit is one sum that is nearly 0.
    check(ATTEND, terms, options(start=start, causal=causal), 1e-4 if T == 1 else None)


@DTYPES
@pytest.mark.parametrize("shared", [None, 0, 1, 2])
@pytest.mark.parametrize("S", [40, 41])
def test_rows_of_position_logits_that_are_read_at_once(S, shared, dtype, small_tiles):
    terms = operands((True, False, False, True), M=2, T=18, S=S, dtype=dtype, shared=(None, None, shared))
    check(ATTEND, terms, options(padding(2, S), 22, causal=shared == 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shared", [(0,), (0, 1), (0, 2), None])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_windows_by_one_kernel(masked, shared, dtype, monkeypatch):
    """Several entries of a batch share a program; the last has fewer."""
    monkeypatch.setattr(triton_sequence, "PROGRAMS", 4)
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


@DTYPES
@pytest.mark.parametrize("causal", [False, True])
def test_masked_logits_and_queries(causal, dtype, small_tiles):
    terms = operands(B=3, T=12, S=36, dtype=dtype, shared=(None, None, None))
    inf = float("-inf")
    terms.band_logits[:, :, ::3, 1:4] = inf
    terms.outside_logits[:, :, ::2] = inf
    terms.position_logits[:, :, 4, 3:] = inf
    terms.position_logits[:, :, 7] = inf
    check(ATTEND, terms, options(padding(3, 36), 6, causal))
    with backend("triton"):
        output = ATTEND(terms, options(padding(3, 36), 6, causal))
    assert not output[:, :, 7].any()
    assert not output[2].any()


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


def test_gradients_without_the_output(small_tiles):
    """A forward by another backend may not have kept it."""
    terms, how = operands(T=19, shared=(0, 1, 0)), options(causal=True)
    with backend("triton"):
        output, lse = ATTEND._forward(*terms, *how)
        given = ATTEND._backward(torch.ones_like(output), *terms, output, lse, *how, [True] * 6)
        anew = ATTEND._backward(torch.ones_like(output), *terms, None, lse, *how, [True] * 6)
    for one, other in zip(given, anew):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("B, M, T, dv", [(0, 2, 5, 4), (2, 0, 5, 4), (2, 2, 0, 4), (2, 2, 5, 0)])
@pytest.mark.parametrize("present, dtype", [(ALL, torch.float32), ((True, False, False, True), torch.float16)])
def test_nothing_to_compute(present, dtype, B, M, T, dv):
    shared = (None, None, 0 if dtype == torch.float16 and B else None)
    terms = operands(present, B=B, M=M, T=T, dv=dv, dtype=dtype, shared=shared)
    results = results_and_gradients(ATTEND, terms, options(), torch.zeros(B, M, T, dv, device=DEVICE, dtype=dtype))
    assert results[0].shape == (B, M, T, dv)
    assert all(not grad.any() for grad in results[1:] if grad is not None)


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


VARIANTS = """
import torch
from attn_plugins.ops.sequence_attention.operands import Options, Terms
from attn_plugins.ops.sequence_attention.sequence_attention import ATTEND
from tests.helpers.triton_checks import compiled_variants

def meta(*shape):
    return torch.empty(shape, device="meta", dtype=torch.bfloat16)

def call(T, S, K, start, d=64, B=2, M=4, causal=False):
    heads = [meta(B, n, M, d).transpose(1, 2) for n in (T, S, S)]
    band = () if K is None else (meta(B, M, T, K), meta(1, M, T))
    terms = Terms(*heads, *(band or (None, None)), meta(1 if band or T < 64 else B, M, T, S))
    return ATTEND, terms, Options(meta(B, S).bool(), start, causal, 0.125)
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="launches are recorded in a process of their own")
def test_no_length_is_compiled_for(compiling):
    """Twenty lengths compile what one does; short queries and keys have tiles of their own.

    Batch and heads do not matter.
    """
    code = (
        VARIANTS
        + """
lengths = [(65 + 37 * n, 70 + 16 * n, 2 * n + 1, n * n) for n in range(20)]
first, *others = [compiled_variants(lambda: call(*sizes)) for sizes in lengths]
assert all(other == first for other in others), [len(first), *map(len, others)]
assert len(first) == 4
every = set(first)
for n in range(1, 70):
    every |= compiled_variants(lambda: call(n, n % 7 + 1, 1 + 2 * (n % 5), n, B=n % 3 + 2, M=n % 4 + 1))
assert len(every) == 6, len(every)
"""
    )
    compiling(code)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="kernels are compiled ahead of time in a process of their own")
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_without_spills(compiling, capability):
    code = (
        VARIANTS
        + f"\ncapability = {capability}\n"
        + """
from tests.helpers.triton_compile import compiled, launches, variants

pairs, windows = (512, 512, None, False, "both"), (49, 49, None, False, "both")
for T, S, K, causal, passes in ((200, 300, 21, True, "forward"), pairs, windows):
    recorded = launches(*call(T, S, K, 0, causal=causal), passes=passes, capability=capability)
    for variant, kernel in variants(recorded).items():
        row = compiled(variant, kernel, capability)
        assert row["spills"] == 0, row
        assert row["shared"] <= 99 * 1024, row
"""
    )
    compiling(code)
