"""Computations shared by the kernels of sequence attention: a tile of logits, its weights and their gradients.

A tile is (queries, keys), or (keys, queries) with ``KEYS_FIRST``. Logits are in units of log(2), for ``exp2``. Names
and shapes are those of :mod:`.triton_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core.triton_math import multiply

LOG2E = tl.constexpr(1.4426950408889634)
# Parts of a loop: tiles before those that a band touches, these, those behind them; or all, where there is no band.
# A band's logits take many registers: its part has BLOCK_BAND places a step, fewer than others, and prefetches nothing.
BEFORE, AT, BEHIND, ALL = (tl.constexpr(n) for n in range(4))


@triton.jit
def of_queries(values, KEYS_FIRST: tl.constexpr):
    """Return (queries) as an axis of a tile."""
    if KEYS_FIRST:
        return values[None, :]
    else:
        return values[:, None]


@triton.jit
def of_keys(values, KEYS_FIRST: tl.constexpr):
    """Return (keys) as an axis of a tile."""
    if KEYS_FIRST:
        return values[:, None]
    else:
        return values[None, :]


@triton.jit
def tile_of(matrix, stride, t0, s0, T, S, row, column, LINE: tl.constexpr):
    """Pointers to a tile's elements of a matrix (T, S), and where there are any; ``LINE`` divides S and the stride."""
    begin = matrix + stride.to(tl.int64) * LINE * t0 + s0
    return (begin + row * stride * LINE) + column, (row < T - t0) & (column < S // LINE * LINE - s0)


@triton.jit
def tile_of_band(band_logits, stride, t0, shift, row, column):
    """Pointers to a tile's elements of a band (T, K), of whose first query the first key has tap ``shift``."""
    begin = band_logits + stride.to(tl.int64) * t0 + shift
    return (begin + row * (stride - 1)) + column


@triton.jit
def load_outside(outside_logits, t0, T, stride, BLOCK_T: tl.constexpr):
    """Outside logits of a block of queries; None for None."""
    if outside_logits is not None:
        row = tl.arange(0, BLOCK_T)
        begin = outside_logits + stride.to(tl.int64) * t0
        return tl.load(begin + row * stride, mask=row < T - t0, other=0.0).to(tl.float32) * LOG2E


@triton.jit
def ids_of(segment_ids, first, limit, BLOCK: tl.constexpr):
    """Numbers of the segments of keys from ``first`` on, below ``limit``; None for None."""
    if segment_ids is not None:
        key = first + tl.arange(0, BLOCK)
        return tl.load(segment_ids + key, mask=key < limit, other=0)


@triton.jit
def segments_of(segment_ids, b, period, S):
    """Return a pointer to the segments of batch entry b; None for None."""
    if segment_ids is not None:
        return segment_ids + (b % period).to(tl.int64) * S


@triton.jit
def bounds(PART: tl.constexpr, begin, end, first, count, BLOCK: tl.constexpr, BLOCK_BAND: tl.constexpr):
    """Return the bounds of a part of a loop from ``begin`` to ``end``, in which a band touches ``count`` places."""
    low = begin + tl.maximum(first - begin, 0) // BLOCK * BLOCK
    high = low + tl.cdiv(tl.maximum(first + count - low, 0), BLOCK_BAND) * BLOCK_BAND
    if PART == BEFORE:
        return begin, tl.minimum(low, end)
    elif PART == AT:
        return low, tl.minimum(high, end)
    elif PART == BEHIND:
        return high, end
    else:
        return begin, end


@triton.jit
def logits_of(
    q, k, t0, s0, outside, query_ids, band_logits, position_logits, key_padding_mask, segment_ids, band_logits_t,
    position_logits_t, T, S, K, left, start, scale,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, CAUSAL: tl.constexpr, PART: tl.constexpr, KEYS_FIRST: tl.constexpr,
    LINE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Return a tile of logits in units of log(2), -inf where a key is masked or there is none.

    Loads come before the product: Triton then lays all sums out as the product lies.
    """
    row = of_queries(tl.arange(0, BLOCK_T), KEYS_FIRST)
    column = of_keys(tl.arange(0, BLOCK_S), KEYS_FIRST)
    there = (row < T - t0) & (column < S - s0)
    if position_logits is not None:
        places, known = tile_of(position_logits, position_logits_t, t0, s0, T, S, row, column, LINE)
        addend = tl.load(places, mask=known, other=0.0)
    if PART == AT:
        shift = s0 - t0 + left - start
        tap = (column + shift) - row
        inside = (tap >= 0) & (tap < K)
        of_band = tl.load(
            tile_of_band(band_logits, band_logits_t, t0, shift, row, column), mask=inside & there, other=0.0
        )
    seen = column < S - s0
    if CAUSAL and (PART != BEFORE and PART != BEHIND):  # no key outside the band comes later than the query
        seen = seen & (column + (s0 - t0 - start) <= row)
    if key_padding_mask is not None:
        keys = tl.arange(0, BLOCK_S)
        kept = tl.load(key_padding_mask + s0 + keys, mask=keys < S - s0, other=1) == 0
        seen = seen & of_keys(kept, KEYS_FIRST)
    if segment_ids is not None:
        seen = seen & (of_keys(ids_of(segment_ids, s0, S, BLOCK_S), KEYS_FIRST) == of_queries(query_ids, KEYS_FIRST))
    if KEYS_FIRST:
        logits = tl.zeros((BLOCK_S, BLOCK_T), tl.float32)
    else:
        logits = tl.zeros((BLOCK_T, BLOCK_S), tl.float32)
    if q is not None:
        if KEYS_FIRST:
            logits = multiply(k, tl.trans(q), logits, PRECISION, UPCAST) * (scale * LOG2E)
        else:
            logits = multiply(q, tl.trans(k), logits, PRECISION, UPCAST) * (scale * LOG2E)
    if position_logits is not None:
        logits += addend.to(tl.float32) * LOG2E
    if PART == AT:
        if outside is None:
            logits += of_band.to(tl.float32) * LOG2E
        else:
            logits += tl.where(inside, of_band.to(tl.float32) * LOG2E, of_queries(outside, KEYS_FIRST))
    elif outside is not None:
        logits += of_queries(outside, KEYS_FIRST)
    return tl.where(seen, logits, float("-inf"))


@triton.jit
def keys_seen(t0, S, start, BLOCK_T: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the first key that no query of a block sees."""
    if CAUSAL:
        return tl.minimum(S, t0 + BLOCK_T + start)
    else:
        return S


@triton.jit
def weights_and_gradients(
    q, k, v, grad, lse_i, p_scale, t0, s0, outside, query_ids, band_logits, position_logits, key_padding_mask,
    segment_ids, band_logits_t, position_logits_t, T, S, K,
    left, start, scale,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, CAUSAL: tl.constexpr, PART: tl.constexpr, KEYS_FIRST: tl.constexpr,
    LINE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Return a tile of weights and one of their gradients.

    ``lse_i`` is the queries' log-sum-exp in units of log(2), as it was rounded; times ``p_scale``, weights sum to 1.
    """
    logits = logits_of(
        q, k, t0, s0, outside, query_ids, band_logits, position_logits, key_padding_mask, segment_ids, band_logits_t,
        position_logits_t, T, S, K, left, start, scale,
        BLOCK_T, BLOCK_S, CAUSAL, PART, KEYS_FIRST, LINE, PRECISION, UPCAST,
    )  # fmt: skip
    # dp = grad_output · vᵀ, and the weights once more, from logits and log-sum-exp.
    if KEYS_FIRST:
        dp = multiply(v, tl.trans(grad), tl.zeros((BLOCK_S, BLOCK_T), tl.float32), PRECISION, UPCAST)
    else:
        dp = multiply(grad, tl.trans(v), tl.zeros((BLOCK_T, BLOCK_S), tl.float32), PRECISION, UPCAST)
    p = tl.exp2(logits - of_queries(lse_i, KEYS_FIRST))
    if p_scale is not None:
        p *= of_queries(p_scale, KEYS_FIRST)
    return p, dp
