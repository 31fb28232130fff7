"""Kernels of position logits that batch entries, heads or queries share: sums of gradients over the axes they lack.

Names, shapes and units are those of :mod:`.triton_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core.triton_math import matrix_of, multiply, of_rows, rows, store_rows
from .triton_kernels import VARYING
from .triton_logits import (
    ALL,
    AT,
    LOG2E,
    ids_of,
    keys_seen,
    load_outside,
    logits_of,
    segments_of,
    weights_and_gradients,
)


@triton.jit(do_not_specialize=VARYING)
def differentiate_position(
    value, query, key, band_logits, outside_logits, position_logits, key_padding_mask, segment_ids, grad_output, lse,
    delta, inverse, sums,
    value_b, value_m, value_t, query_b, query_m, query_t, key_b, key_m, key_t,
    band_logits_b, band_logits_m, band_logits_t, outside_logits_b, outside_logits_m, outside_logits_t,
    position_logits_b, position_logits_m, position_logits_t, key_padding_mask_b,
    grad_output_b, grad_output_m, grad_output_t,
    heads, reduced_b, reduced_m, reduced_t, share,
    M, T, S, K, left, start, period, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, CAUSAL: tl.constexpr, UNIT: tl.constexpr,
    LINE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, EVERY_QUERY: tl.constexpr,
):  # fmt: skip
    """Sum the logits' gradients of a tile over a share of the axes along which position logits are broadcast.

    Writes ``sums``, (parts, b, m, t, S) float32, where b, m, t are 1 or B, M, T; with ``EVERY_QUERY`` t is 1, and
    ``heads`` is b * m. ``reduced_b``, ``reduced_m`` and ``reduced_t`` are the steps along the axes that are summed
    (entries, heads, blocks of queries), 1 along the others; a program takes ``share`` of them.
    """
    blocks_t, blocks_s = tl.cdiv(T, BLOCK_T), tl.cdiv(S, BLOCK_S)
    tiles = blocks_s if EVERY_QUERY else blocks_t * blocks_s
    tile, head = tl.program_id(0) % tiles, tl.program_id(0) // tiles % heads
    part = tl.program_id(0) // tiles // heads
    own_b, own_m = head // (M // reduced_m), head % (M // reduced_m)
    own_t, s0 = tile // blocks_s, tile % blocks_s * BLOCK_S
    s = s0 + tl.arange(0, BLOCK_S)
    end = tl.minimum((part + 1) * share, reduced_b * reduced_m * reduced_t)
    if CAUSAL and not EVERY_QUERY:
        end = tl.where(s0 < keys_seen(own_t * BLOCK_T, S, start, BLOCK_T, CAUSAL), end, 0)
    total = tl.zeros((BLOCK_T, BLOCK_S), tl.float32)
    part_of_all: tl.constexpr = ALL if band_logits is None else AT  # any tile may be one that a band touches
    for step in range(part * share, end):
        b, m = own_b + step // reduced_t // reduced_m, own_m + step // reduced_t % reduced_m
        t0 = (own_t + step % reduced_t) * BLOCK_T
        t = t0 + tl.arange(0, BLOCK_T)
        q = rows(matrix_of(query, b, m, query_b, query_m, UNIT), t0, T, query_t, BLOCK_T, D, BLOCK_D, UNIT)
        k = rows(matrix_of(key, b, m, key_b, key_m, UNIT), s0, S, key_t, BLOCK_S, D, BLOCK_D, UNIT)
        v = rows(matrix_of(value, b, m, value_b, value_m, UNIT), s0, S, value_t, BLOCK_S, DV, BLOCK_DV, UNIT)
        grad = matrix_of(grad_output, b, m, grad_output_b, grad_output_m, UNIT)
        grad = rows(grad, t0, T, grad_output_t, BLOCK_T, DV, BLOCK_DV, UNIT)
        row = (b.to(tl.int64) * M + m) * T + t
        lse_i = tl.load(lse + row, mask=t < T, other=float("inf")) * LOG2E
        delta_i = tl.load(delta + row, mask=t < T, other=0.0)
        p_scale = of_rows(inverse, row, t < T)
        outside = load_outside(
            matrix_of(outside_logits, b, m, outside_logits_b, outside_logits_m, 1), t0, T, outside_logits_t, BLOCK_T
        )
        lines = segments_of(segment_ids, b, period, S)
        query_ids = ids_of(lines, t0 + start, S, BLOCK_T)
        p, dp = weights_and_gradients(
            q, k, v, grad, lse_i, p_scale, t0, s0, outside, query_ids, matrix_of(band_logits, b, m, band_logits_b,
            band_logits_m, 1),
            matrix_of(position_logits, b, m, position_logits_b, position_logits_m, LINE),
            matrix_of(key_padding_mask, b, m, key_padding_mask_b, key_padding_mask_b * 0, 1), lines, band_logits_t,
            position_logits_t,
            T, S, K, left, start, scale,
            BLOCK_T, BLOCK_S, CAUSAL, part_of_all, False, LINE, PRECISION, UPCAST,
        )  # fmt: skip
        total += p * (dp - delta_i[:, None])
    place = part.to(tl.int64) * heads + head
    if EVERY_QUERY:
        tl.store(sums + place * S + s, tl.sum(total, 0), mask=s < S)
    else:
        t = own_t * BLOCK_T + tl.arange(0, BLOCK_T)
        valid = (t < T)[:, None] & (s < S)[None, :]
        tl.store(sums + (place * T + t)[:, None] * S + s[None, :], total, mask=valid)


@triton.jit(do_not_specialize=VARYING)
def differentiate_windows(
    value, query, key, band_logits, outside_logits, position_logits, key_padding_mask, segment_ids, grad_output, sums,
    grad_query, grad_key, grad_value,
    value_b, value_m, value_t, query_b, query_m, query_t, key_b, key_m, key_t,
    band_logits_b, band_logits_m, band_logits_t, outside_logits_b, outside_logits_m, outside_logits_t,
    position_logits_b, position_logits_m, position_logits_t, key_padding_mask_b,
    grad_output_b, grad_output_m, grad_output_t, grad_query_b, grad_query_m, grad_query_t,
    grad_key_b, grad_key_m, grad_key_t, grad_value_b, grad_value_m, grad_value_t,
    share, entries, M, T, S, K, left, start, period, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, CAUSAL: tl.constexpr, UNIT: tl.constexpr,
    LINE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Write all gradients of a head's sequences that fit a tile, in a share of the batch.

    Weights are computed anew, so that neither output nor log-sum-exp is read. ``sums``, (parts, M, T, S) float32, are
    those of position logits, which the batch shares.
    """
    part, m = tl.program_id(0) // M, tl.program_id(0) % M
    total = tl.zeros((BLOCK_T, BLOCK_S), tl.float32)
    first = part * share
    for entry in range(0, tl.minimum(share, entries - first)):
        b = first + entry
        q = rows(matrix_of(query, b, m, query_b, query_m, UNIT), 0, T, query_t, BLOCK_T, D, BLOCK_D, UNIT)
        k = rows(matrix_of(key, b, m, key_b, key_m, UNIT), 0, S, key_t, BLOCK_S, D, BLOCK_D, UNIT)
        v = rows(matrix_of(value, b, m, value_b, value_m, UNIT), 0, S, value_t, BLOCK_S, DV, BLOCK_DV, UNIT)
        grad = matrix_of(grad_output, b, m, grad_output_b, grad_output_m, UNIT)
        grad = rows(grad, 0, T, grad_output_t, BLOCK_T, DV, BLOCK_DV, UNIT)
        lines = segments_of(segment_ids, b, period, S)
        logits = logits_of(
            q, k, 0, 0, None, ids_of(lines, start, S, BLOCK_T), None,
            matrix_of(position_logits, b, m, position_logits_b, position_logits_m, LINE),
            matrix_of(key_padding_mask, b, m, key_padding_mask_b, key_padding_mask_b * 0, 1), lines, band_logits_t,
            position_logits_t,
            T, S, K, left, start, scale,
            BLOCK_T, BLOCK_S, CAUSAL, ALL, False, LINE, PRECISION, UPCAST,
        )  # fmt: skip
        # All keys are in the tile: a plain softmax, and delta from the tile itself.
        m_i = tl.max(logits, 1)
        p = tl.exp2(logits - tl.where(m_i == float("-inf"), 0.0, m_i)[:, None])
        l_i = tl.sum(p, 1)
        p /= tl.where(l_i == 0, 1.0, l_i)[:, None]
        dp = multiply(grad, tl.trans(v), tl.zeros((BLOCK_T, BLOCK_S), tl.float32), PRECISION, UPCAST)
        ds = p * (dp - tl.sum(p * dp, 1)[:, None])
        total += ds
        if grad_query is not None:
            dq = multiply(ds.to(k.dtype), k, tl.zeros((BLOCK_T, BLOCK_D), tl.float32), PRECISION, UPCAST)
            place = matrix_of(grad_query, b, m, grad_query_b, grad_query_m, UNIT)
            store_rows(place, 0, T, grad_query_t, dq * scale, BLOCK_T, D, BLOCK_D, UNIT)
        if grad_key is not None:
            zeros = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
            dk = multiply(tl.trans(ds.to(q.dtype)), q, zeros, PRECISION, UPCAST)
            place = matrix_of(grad_key, b, m, grad_key_b, grad_key_m, UNIT)
            store_rows(place, 0, S, grad_key_t, dk * scale, BLOCK_S, D, BLOCK_D, UNIT)
        if grad_value is not None:
            zeros = tl.zeros((BLOCK_S, BLOCK_DV), tl.float32)
            dv = multiply(tl.trans(p.to(grad.dtype)), grad, zeros, PRECISION, UPCAST)
            place = matrix_of(grad_value, b, m, grad_value_b, grad_value_m, UNIT)
            store_rows(place, 0, S, grad_value_t, dv, BLOCK_S, DV, BLOCK_DV, UNIT)
    if sums is not None:
        t, s = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_S)
        place = sums + tl.program_id(0).to(tl.int64) * T * S + t[:, None] * S + s[None, :]
        tl.store(place, total, mask=(t < T)[:, None] & (s < S)[None, :])
