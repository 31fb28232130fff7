"""Flash-style kernels of sequence attention; :mod:`.triton` launches them.

Shapes: B batch, M heads, T queries, S keys, K taps of the band, D and DV widths. A program has one (b, m) and a block
of queries or keys; its tiles of logits are those of :mod:`.triton_logits`. Strides of query, key, value and
the output come divided by ``UNIT``, those of position logits by ``LINE``: the compiler sees that rows are aligned,
reads 16 bytes at a time, and loads a loop's next tile as it computes. Pointers that are None are terms, or gradients,
that the call has not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core.triton_math import matrix_of, multiply, of_rows, rows, store_rows, unsettled
from .triton_logits import (
    ALL,
    AT,
    BEFORE,
    BEHIND,
    LOG2E,
    bounds,
    ids_of,
    keys_seen,
    load_outside,
    logits_of,
    segments_of,
    tile_of,
    tile_of_band,
    weights_and_gradients,
)

TENSORS = (
    *("query", "key", "value", "band_logits", "outside_logits", "position_logits", "output", "attended"),
    *("grad_output", "grad_query", "grad_key", "grad_value"),
    *("grad_band_logits", "grad_outside_logits", "grad_position_logits"),
)
# Arguments that differ from call to call, for which nothing is compiled again.
VARYING = [
    *("M", "T", "S", "K", "left", "start", "key_padding_mask_b", "period"),
    *("reduced_b", "reduced_m", "reduced_t", "share", "heads", "entries"),
    *(f"{tensor}_{axis}" for tensor in TENSORS for axis in "bmt"),
]


@triton.jit(do_not_specialize=VARYING)
def attend(
    value, query, key, band_logits, outside_logits, position_logits, key_padding_mask, segment_ids, output, lse,
    value_b, value_m, value_t, query_b, query_m, query_t, key_b, key_m, key_t,
    band_logits_b, band_logits_m, band_logits_t, outside_logits_b, outside_logits_m, outside_logits_t,
    position_logits_b, position_logits_m, position_logits_t, key_padding_mask_b, output_b, output_m, output_t,
    M, T, S, K, left, start, period, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_BAND: tl.constexpr, CAUSAL: tl.constexpr, UNIT: tl.constexpr,
    LINE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Write the outputs and log-sum-exps of a block of queries, +inf where all keys are masked."""
    blocks = tl.cdiv(T, BLOCK_T)
    head = tl.program_id(0) // blocks
    b, m = head // M, head % M
    t0 = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_T  # with causal, the long ones first
    t = t0 + tl.arange(0, BLOCK_T)
    query = matrix_of(query, b, m, query_b, query_m, UNIT)
    key = matrix_of(key, b, m, key_b, key_m, UNIT)
    value = matrix_of(value, b, m, value_b, value_m, UNIT)
    band_logits = matrix_of(band_logits, b, m, band_logits_b, band_logits_m, 1)
    outside_logits = matrix_of(outside_logits, b, m, outside_logits_b, outside_logits_m, 1)
    position_logits = matrix_of(position_logits, b, m, position_logits_b, position_logits_m, LINE)
    key_padding_mask = matrix_of(key_padding_mask, b, m, key_padding_mask_b, key_padding_mask_b * 0, 1)
    outside = load_outside(outside_logits, t0, T, outside_logits_t, BLOCK_T)
    segment_ids = segments_of(segment_ids, b, period, S)
    query_ids = ids_of(segment_ids, t0 + start, S, BLOCK_T)
    q = rows(query, t0, T, query_t, BLOCK_T, D, BLOCK_D, UNIT)
    # Running maximum, sum of weights and weighted sum of values, one row a query.
    m_i = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_T,), tl.float32)
    acc = tl.zeros((BLOCK_T, BLOCK_DV), tl.float32)
    end = keys_seen(t0, S, start, BLOCK_T, CAUSAL)
    first_part: tl.constexpr = ALL if band_logits is None else BEFORE
    last_part: tl.constexpr = ALL if band_logits is None else AT if CAUSAL else BEHIND
    for PART in tl.static_range(first_part, last_part + 1):
        low, high = bounds(PART, 0, end, t0 + start - left, K + BLOCK_T - 1, BLOCK_S, BLOCK_BAND)
        for s0 in tl.range(low, high, BLOCK_BAND if PART == AT else BLOCK_S, num_stages=1 if PART == AT else None):
            k = rows(key, s0, S, key_t, BLOCK_BAND if PART == AT else BLOCK_S, D, BLOCK_D, UNIT)
            s = logits_of(
                q, k, t0, s0, outside, query_ids, band_logits, position_logits, key_padding_mask, segment_ids,
                band_logits_t, position_logits_t, T, S, K, left, start,
                scale, BLOCK_T, BLOCK_BAND if PART == AT else BLOCK_S, CAUSAL, PART, False, LINE, PRECISION, UPCAST,
            )  # fmt: skip
            # The online softmax: a new maximum rescales the sum and the accumulator so far.
            m_new = tl.maximum(m_i, tl.max(s, 1))
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(s - m_safe[:, None])
            alpha = tl.exp2(m_i - m_safe)
            l_i = l_i * alpha + tl.sum(p, 1)
            v = rows(value, s0, S, value_t, BLOCK_BAND if PART == AT else BLOCK_S, DV, BLOCK_DV, UNIT)
            acc = multiply(p.to(v.dtype), v, acc * alpha[:, None], PRECISION, UPCAST)
            m_i = m_new
    # No key was visible: the output is 0, and a log-sum-exp of +inf gives weights of 0 in the backward pass.
    masked = l_i == 0
    acc = acc / tl.where(masked, 1.0, l_i)[:, None]
    store_rows(matrix_of(output, b, m, output_b, output_m, UNIT), t0, T, output_t, acc, BLOCK_T, DV, BLOCK_DV, UNIT)
    logsumexp = tl.where(masked, float("inf"), (m_i + tl.log2(tl.where(masked, 1.0, l_i))) / LOG2E)
    tl.store(lse + head.to(tl.int64) * T + t, logsumexp, mask=t < T)


@triton.jit(do_not_specialize=VARYING)
def differentiate_queries(
    value, query, key, band_logits, outside_logits, position_logits, key_padding_mask, segment_ids, grad_output, lse,
    delta, inverse, attended,
    grad_query, grad_band_logits, grad_outside_logits, grad_position_logits,
    value_b, value_m, value_t, query_b, query_m, query_t, key_b, key_m, key_t,
    band_logits_b, band_logits_m, band_logits_t, outside_logits_b, outside_logits_m, outside_logits_t,
    position_logits_b, position_logits_m, position_logits_t, key_padding_mask_b,
    grad_output_b, grad_output_m, grad_output_t, attended_b, attended_m, attended_t,
    grad_query_b, grad_query_m, grad_query_t, grad_band_logits_b, grad_band_logits_m, grad_band_logits_t,
    grad_outside_logits_b, grad_outside_logits_m, grad_outside_logits_t,
    grad_position_logits_b, grad_position_logits_m, grad_position_logits_t,
    M, T, S, K, left, start, period, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_BAND: tl.constexpr, CAUSAL: tl.constexpr, UNIT: tl.constexpr,
    LINE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Write the gradients of what belongs to a block of queries, and what the other kernels need of these.

    That is ``delta``, the weighted mean of value·grad_output, and for float32 ``inverse``, the factor with which
    weights of the log-sum-exp sum to 1. The mean is first taken from the output, and corrected by the sum of what it
    gives; where that is :func:`.unsettled`, everything is computed once more.
    """
    blocks = tl.cdiv(T, BLOCK_T)
    head = tl.program_id(0) // blocks
    b, m = head // M, head % M
    t0 = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_T
    t = t0 + tl.arange(0, BLOCK_T)
    grad = matrix_of(grad_output, b, m, grad_output_b, grad_output_m, UNIT)
    grad = rows(grad, t0, T, grad_output_t, BLOCK_T, DV, BLOCK_DV, UNIT)
    attended = matrix_of(attended, b, m, attended_b, attended_m, UNIT)
    attended = rows(attended, t0, T, attended_t, BLOCK_T, DV, BLOCK_DV, UNIT)
    # delta = grad_output·output, the mean of dp; as wrong as the output is rounded, hence the second attempt.
    delta_i = tl.sum(grad.to(tl.float32) * attended.to(tl.float32), 1)
    query = matrix_of(query, b, m, query_b, query_m, UNIT)
    key = matrix_of(key, b, m, key_b, key_m, UNIT)
    value = matrix_of(value, b, m, value_b, value_m, UNIT)
    band_logits = matrix_of(band_logits, b, m, band_logits_b, band_logits_m, 1)
    outside_logits = matrix_of(outside_logits, b, m, outside_logits_b, outside_logits_m, 1)
    position_logits = matrix_of(position_logits, b, m, position_logits_b, position_logits_m, LINE)
    key_padding_mask = matrix_of(key_padding_mask, b, m, key_padding_mask_b, key_padding_mask_b * 0, 1)
    outside = load_outside(outside_logits, t0, T, outside_logits_t, BLOCK_T)
    segment_ids = segments_of(segment_ids, b, period, S)
    query_ids = ids_of(segment_ids, t0 + start, S, BLOCK_T)
    q = rows(query, t0, T, query_t, BLOCK_T, D, BLOCK_D, UNIT)
    # The kernels of logits work with powers of 2.
    lse_i = tl.load(lse + head.to(tl.int64) * T + t, mask=t < T, other=float("inf")) * LOG2E
    end = keys_seen(t0, S, start, BLOCK_T, CAUSAL)
    grad_query = matrix_of(grad_query, b, m, grad_query_b, grad_query_m, UNIT)
    grad_band_logits = matrix_of(grad_band_logits, b, m, grad_band_logits_b, grad_band_logits_m, 1)
    grad_outside_logits = matrix_of(grad_outside_logits, b, m, grad_outside_logits_b, grad_outside_logits_m, 1)
    grad_position_logits = matrix_of(grad_position_logits, b, m, grad_position_logits_b, grad_position_logits_m, LINE)
    first_part: tl.constexpr = ALL if band_logits is None else BEFORE
    last_part: tl.constexpr = ALL if band_logits is None else AT if CAUSAL else BEHIND
    p_sum = None
    p_scale = None
    if inverse is not None:
        p_sum, p_scale = tl.zeros((BLOCK_T,), tl.float32), tl.full((BLOCK_T,), 1.0, tl.float32)
    attempt = 0
    # The second attempt runs only if the first one's gradients do not sum to 0 well enough.
    while attempt < 2:
        if inverse is not None:
            p_sum = tl.zeros((BLOCK_T,), tl.float32)
        ds_sum = tl.zeros((BLOCK_T,), tl.float32)
        ds_size = tl.zeros((BLOCK_T,), tl.float32)
        sum_outside = tl.zeros((BLOCK_T,), tl.float32)
        dq = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        for PART in tl.static_range(first_part, last_part + 1):
            low, high = bounds(PART, 0, end, t0 + start - left, K + BLOCK_T - 1, BLOCK_S, BLOCK_BAND)
            for s0 in tl.range(low, high, BLOCK_BAND if PART == AT else BLOCK_S, num_stages=1 if PART == AT else None):
                k = rows(key, s0, S, key_t, BLOCK_BAND if PART == AT else BLOCK_S, D, BLOCK_D, UNIT)
                v = rows(value, s0, S, value_t, BLOCK_BAND if PART == AT else BLOCK_S, DV, BLOCK_DV, UNIT)
                p, dp = weights_and_gradients(
                    q, k, v, grad, lse_i, p_scale, t0, s0, outside, query_ids, band_logits, position_logits,
                    key_padding_mask, segment_ids, band_logits_t, position_logits_t, T, S, K, left, start, scale,
                    BLOCK_T, BLOCK_BAND if PART == AT else BLOCK_S, CAUSAL, PART, False, LINE, PRECISION, UPCAST,
                )  # fmt: skip
                # The softmax's gradient: ds = p * (dp - delta).
                ds = p * (dp - delta_i[:, None])
                if inverse is not None:
                    p_sum += tl.sum(p, 1)
                ds_sum += tl.sum(ds, 1)
                ds_size += tl.sum(tl.abs(ds), 1)
                if grad_query is not None:
                    dq = multiply(ds.to(k.dtype), k, dq, PRECISION, UPCAST)
                row, column = (
                    tl.arange(0, BLOCK_T)[:, None],
                    tl.arange(0, BLOCK_BAND if PART == AT else BLOCK_S)[None, :],
                )
                valid = (row < T - t0) & (column < S - s0)
                shift = s0 - t0 + left - start
                tap = (column + shift) - row
                inside = (tap >= 0) & (tap < K)
                if grad_position_logits is not None:
                    places, known = tile_of(
                        grad_position_logits, grad_position_logits_t, t0, s0, T, S, row, column, LINE
                    )
                    tl.store(places, ds.to(grad_position_logits.dtype.element_ty), mask=known)
                if (grad_band_logits is not None) and PART == AT:
                    taps = tile_of_band(grad_band_logits, grad_band_logits_t, t0, shift, row, column)
                    tl.store(taps, ds.to(grad_band_logits.dtype.element_ty), mask=valid & inside)
                if grad_outside_logits is not None:
                    sum_outside += tl.sum(tl.where(inside, 0.0, ds), 1)
        if inverse is not None:
            # Weights of a rounded log-sum-exp do not sum to 1: normalize what was summed with them.
            correction = 1 / tl.where(p_sum == 0, 1.0, p_sum)
            dq *= correction[:, None]
            sum_outside *= correction
            ds_sum *= correction
            p_scale *= correction
        if grad_query is not None:
            store_rows(grad_query, t0, T, grad_query_t, dq * scale, BLOCK_T, D, BLOCK_D, UNIT)
        if grad_outside_logits is not None:
            place = grad_outside_logits + t.to(tl.int64) * grad_outside_logits_t
            tl.store(place, sum_outside.to(grad_outside_logits.dtype.element_ty), mask=t < T)
        repeat = unsettled(ds_sum, ds_size, p_sum, grad_band_logits is not None or grad_position_logits is not None)
        attempt = tl.where(repeat, attempt + 1, 2)
        # The sum would be 0 with an exact mean, so it is what the mean lacks.
        delta_i += ds_sum
    tl.store(delta + head.to(tl.int64) * T + t, delta_i, mask=t < T)
    if inverse is not None:
        tl.store(inverse + head.to(tl.int64) * T + t, p_scale, mask=t < T)


@triton.jit(do_not_specialize=VARYING)
def differentiate_keys(
    value, query, key, band_logits, outside_logits, position_logits, key_padding_mask, segment_ids, grad_output, lse,
    delta, inverse,
    grad_key, grad_value,
    value_b, value_m, value_t, query_b, query_m, query_t, key_b, key_m, key_t,
    band_logits_b, band_logits_m, band_logits_t, outside_logits_b, outside_logits_m, outside_logits_t,
    position_logits_b, position_logits_m, position_logits_t, key_padding_mask_b,
    grad_output_b, grad_output_m, grad_output_t, grad_key_b, grad_key_m, grad_key_t,
    grad_value_b, grad_value_m, grad_value_t,
    M, T, S, K, left, start, period, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_BAND: tl.constexpr, CAUSAL: tl.constexpr, UNIT: tl.constexpr,
    LINE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of keys and values."""
    blocks = tl.cdiv(S, BLOCK_S)
    head = tl.program_id(0) // blocks
    b, m = head // M, head % M
    s0 = (tl.program_id(0) % blocks) * BLOCK_S
    query = matrix_of(query, b, m, query_b, query_m, UNIT)
    key = matrix_of(key, b, m, key_b, key_m, UNIT)
    value = matrix_of(value, b, m, value_b, value_m, UNIT)
    band_logits = matrix_of(band_logits, b, m, band_logits_b, band_logits_m, 1)
    outside_logits = matrix_of(outside_logits, b, m, outside_logits_b, outside_logits_m, 1)
    position_logits = matrix_of(position_logits, b, m, position_logits_b, position_logits_m, LINE)
    key_padding_mask = matrix_of(key_padding_mask, b, m, key_padding_mask_b, key_padding_mask_b * 0, 1)
    grad_output = matrix_of(grad_output, b, m, grad_output_b, grad_output_m, UNIT)
    segment_ids = segments_of(segment_ids, b, period, S)
    k = rows(key, s0, S, key_t, BLOCK_S, D, BLOCK_D, UNIT)
    v = rows(value, s0, S, value_t, BLOCK_S, DV, BLOCK_DV, UNIT)
    first_query = s0 * 0
    if CAUSAL:  # queries before it see none of the keys
        first_query = tl.maximum(s0 - start, 0) // BLOCK_T * BLOCK_T
    dk = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_S, BLOCK_DV), tl.float32)
    first_part: tl.constexpr = ALL if band_logits is None else AT if CAUSAL else BEFORE
    last_part: tl.constexpr = ALL if band_logits is None else BEHIND
    for PART in tl.static_range(first_part, last_part + 1):
        low, high = bounds(PART, first_query, T, s0 - start + left - K + 1, K + BLOCK_S - 1, BLOCK_T, BLOCK_BAND)
        for t0 in tl.range(low, high, BLOCK_BAND if PART == AT else BLOCK_T, num_stages=1 if PART == AT else None):
            t = t0 + tl.arange(0, BLOCK_BAND if PART == AT else BLOCK_T)
            q = rows(query, t0, T, query_t, BLOCK_BAND if PART == AT else BLOCK_T, D, BLOCK_D, UNIT)
            grad = rows(grad_output, t0, T, grad_output_t, BLOCK_BAND if PART == AT else BLOCK_T, DV, BLOCK_DV, UNIT)
            lse_i = tl.load(lse + head.to(tl.int64) * T + t, mask=t < T, other=float("inf")) * LOG2E
            outside = load_outside(outside_logits, t0, T, outside_logits_t, BLOCK_BAND if PART == AT else BLOCK_T)
            query_ids = ids_of(segment_ids, t0 + start, S, BLOCK_BAND if PART == AT else BLOCK_T)
            # Recompute the tile's weights from the log-sum-exp instead of storing them.
            p_scale = of_rows(inverse, head.to(tl.int64) * T + t, t < T)
            p, dp = weights_and_gradients(
                q, k, v, grad, lse_i, p_scale, t0, s0, outside, query_ids, band_logits, position_logits,
                key_padding_mask, segment_ids, band_logits_t, position_logits_t,
                T, S, K, left, start, scale,
                BLOCK_BAND if PART == AT else BLOCK_T, BLOCK_S, CAUSAL, PART, True, LINE, PRECISION, UPCAST,
            )  # fmt: skip
            if grad_value is not None:
                # dv = pᵀ · grad_output.
                dv = multiply(p.to(grad.dtype), grad, dv, PRECISION, UPCAST)
            if grad_key is not None:
                delta_i = tl.load(delta + head.to(tl.int64) * T + t, mask=t < T, other=0.0)
                # dk = dsᵀ · q, with ds = p * (dp - delta).
                ds = p * (dp - delta_i[None, :])
                dk = multiply(ds.to(q.dtype), q, dk, PRECISION, UPCAST)
    if grad_key is not None:
        grad_key = matrix_of(grad_key, b, m, grad_key_b, grad_key_m, UNIT)
        store_rows(grad_key, s0, S, grad_key_t, dk * scale, BLOCK_S, D, BLOCK_D, UNIT)
    if grad_value is not None:
        grad_value = matrix_of(grad_value, b, m, grad_value_b, grad_value_m, UNIT)
        store_rows(grad_value, s0, S, grad_value_t, dv, BLOCK_S, DV, BLOCK_DV, UNIT)
