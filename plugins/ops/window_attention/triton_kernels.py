"""Triton's kernels of window attention; see :mod:`.triton`.

A program has one head of a block of queries (or of keys) of an image and goes through the taps, each of which reads one
key (or query) for every row of the block. Strides are multiples of ``UNIT`` and counted in it, so that what Triton
knows of their divisibility is the same for maps of all sizes.

Shapes: BLOCK queries or keys, D and DV the widths of a head, as powers of two WIDE_D and WIDE_DV.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core.triton_math import load_cells, store_cells

_STRIDED = ("query", "key", "value", "output", "grad_output", "grad_query", "grad_key", "grad_value")
# Another size of map or window compiles nothing.
_SIZES = ["M", "Hq", "Wq", "Hk", "Wk", "taps_y", "taps_x", "stride_y", "stride_x", "pad_y", "pad_x"]
_SIZES += ["step_y", "step_x", "position_logits_b", "position_logits_m"]
_SIZES += [f"{name}_{axis}" for name in _STRIDED for axis in "bmhw"]


@triton.jit
def _place(M, size, BLOCK: tl.constexpr):
    """Return this program's image, head and first query or key."""
    program = tl.program_id(0)
    m = program % M
    blocks = tl.cdiv(size, BLOCK)
    return (program // M // blocks).to(tl.int64), m.to(tl.int64), program // M % blocks * BLOCK


@triton.jit
def _load(tensor, row, column, h, w, there, WIDTH: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr):
    """Return cells of a map in float32, 0 where there are none: (BLOCK, WIDE)."""
    return load_cells(tensor, (row * h + column * w) * UNIT, there, WIDTH, WIDE).to(tl.float32)


@triton.jit
def _store(tensor, values, row, column, h, w, there, WIDTH: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr):
    store_cells(tensor, (row * h + column * w) * UNIT, there, values, WIDTH, WIDE)


@triton.jit
def _logits(query, key, position_logits, at, there, inside, scale, BLOCK: tl.constexpr, EXCLUDE: tl.constexpr):
    """Return the logits of one tap: (BLOCK). ``at`` are their offsets among the position logits."""
    logits = tl.zeros((BLOCK,), tl.float32)
    if query is not None:
        logits += tl.sum(query * key, 1) * scale
    if position_logits is not None:
        logits += tl.load(position_logits + at, mask=there, other=0.0).to(tl.float32)
    if EXCLUDE:
        logits = tl.where(inside, logits, float("-inf"))
    return logits


@triton.jit
def _first_key(query, keys, taps, stride, pad, step, INSIDE: tl.constexpr):
    """Return the key of the first tap of queries along an axis."""
    if INSIDE:
        phase = query % step
        last = (keys - phase + step - 1) // step - taps
        key = phase + step * tl.minimum(tl.maximum(query // step - taps // 2, 0), last)
    else:
        key = query * stride - pad
    return key


@triton.jit
def _query(key, n, queries, keys, taps, stride, pad, step, INSIDE: tl.constexpr):
    """Return the ``n``-th query that may have a key along an axis, its tap that is the key, and whether it has it."""
    if INSIDE:
        query = key + (n - taps + 1) * step
        there = (query >= 0) & (query < queries)
        distance = key - _first_key(tl.where(there, query, 0), keys, taps, stride, pad, step, INSIDE)
        tap = distance // step
        there = there & (distance >= 0) & (tap < taps)
    else:
        first = key + pad - n * step
        query = first // stride
        tap = n
        there = (first >= 0) & (query * stride == first) & (query < queries)
    return query, tap, there


@triton.jit(do_not_specialize=_SIZES)
def attend(
    value, query, key, position_logits, output, lse, scale, M, Hq, Wq, Hk, Wk, taps_y, taps_x, stride_y, stride_x,
    pad_y, pad_x, step_y, step_x, position_logits_b, position_logits_m,
    value_b, value_m, value_h, value_w, query_b, query_m, query_h, query_w, key_b, key_m, key_h, key_w,
    output_b, output_m, output_h, output_w,
    D: tl.constexpr, DV: tl.constexpr, WIDE_D: tl.constexpr, WIDE_DV: tl.constexpr, UNIT: tl.constexpr,
    EXCLUDE: tl.constexpr, INSIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the output and the log-sum-exp of a block of queries, by a softmax that goes on from tap to tap."""
    b, m, first = _place(M, Hq * Wq, BLOCK)
    n = first + tl.arange(0, BLOCK)
    valid = n < Hq * Wq
    row = n // Wq
    column = n % Wq
    value += (b * value_b + m * value_m) * UNIT
    output += (b * output_b + m * output_m) * UNIT
    q = None
    if query is not None:
        key += (b * key_b + m * key_m) * UNIT
        query += (b * query_b + m * query_m) * UNIT
        q = _load(query, row, column, query_h, query_w, valid, D, WIDE_D, UNIT)
    if position_logits is not None:
        position_logits += b * position_logits_b + m * position_logits_m
    top = _first_key(row, Hk, taps_y, stride_y, pad_y, step_y, INSIDE)
    left = _first_key(column, Wk, taps_x, stride_x, pad_x, step_x, INSIDE)
    m_i = tl.full((BLOCK,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, WIDE_DV), tl.float32)
    for y in range(0, taps_y):
        for x in range(0, taps_x):
            h = top + y * step_y
            w = left + x * step_x
            inside = valid & (h >= 0) & (h < Hk) & (w >= 0) & (w < Wk)
            k = None
            if query is not None:
                k = _load(key, h, w, key_h, key_w, inside, D, WIDE_D, UNIT)
            v = _load(value, h, w, value_h, value_w, inside, DV, WIDE_DV, UNIT)
            at = (n * taps_y + y) * taps_x + x
            logits = _logits(q, k, position_logits, at, valid, inside, scale, BLOCK, EXCLUDE)
            # The online softmax: a new maximum rescales the sum and the accumulator so far.
            m_new = tl.maximum(m_i, logits)
            m_safe = tl.where(m_new > float("-inf"), m_new, 0.0)  # all masked so far: every weight is exp(-inf)
            p = tl.exp(logits - m_safe)
            alpha = tl.exp(m_i - m_safe)
            l_i = l_i * alpha + p
            acc = acc * alpha[:, None] + p[:, None] * v
            m_i = m_new
    masked = l_i == 0
    l_i = tl.where(masked, 1.0, l_i)
    _store(output, acc / l_i[:, None], row, column, output_h, output_w, valid, DV, WIDE_DV, UNIT)
    lse_i = tl.where(masked, float("inf"), m_i + tl.log(l_i))  # +inf gives weights of 0
    tl.store(lse + (b * M + m) * Hq * Wq + n, lse_i, mask=valid)


@triton.jit(do_not_specialize=_SIZES)
def gradients_of_queries(
    value, query, key, position_logits, grad_output, lse, delta, grad_query, grad_position_logits,
    scale, M, Hq, Wq, Hk, Wk, taps_y, taps_x, stride_y, stride_x, pad_y, pad_x, step_y, step_x,
    position_logits_b, position_logits_m,
    value_b, value_m, value_h, value_w, query_b, query_m, query_h, query_w, key_b, key_m, key_h, key_w,
    grad_output_b, grad_output_m, grad_output_h, grad_output_w, grad_query_b, grad_query_m, grad_query_h, grad_query_w,
    D: tl.constexpr, DV: tl.constexpr, WIDE_D: tl.constexpr, WIDE_DV: tl.constexpr, UNIT: tl.constexpr,
    EXCLUDE: tl.constexpr, INSIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of queries and of their position logits, and the mean of the weights' gradients.

    A logit's gradient is its weight times the difference between the weight's gradient, grad_output·value, and that
    mean. The first turn computes the mean, since the output is too coarse in half precision.
    """
    b, m, first = _place(M, Hq * Wq, BLOCK)
    n = first + tl.arange(0, BLOCK)
    valid = n < Hq * Wq
    row = n // Wq
    column = n % Wq
    value += (b * value_b + m * value_m) * UNIT
    grad_output += (b * grad_output_b + m * grad_output_m) * UNIT
    lse += (b * M + m) * Hq * Wq
    delta += (b * M + m) * Hq * Wq
    q = None
    if query is not None:
        key += (b * key_b + m * key_m) * UNIT
        query += (b * query_b + m * query_m) * UNIT
        q = _load(query, row, column, query_h, query_w, valid, D, WIDE_D, UNIT)
    if position_logits is not None:
        position_logits += b * position_logits_b + m * position_logits_m
    if grad_position_logits is not None:
        grad_position_logits += (b * M + m) * Hq * Wq * taps_y * taps_x
    do = _load(grad_output, row, column, grad_output_h, grad_output_w, valid, DV, WIDE_DV, UNIT)
    lse_i = tl.load(lse + n, mask=valid, other=float("inf"))
    top = _first_key(row, Hk, taps_y, stride_y, pad_y, step_y, INSIDE)
    left = _first_key(column, Wk, taps_x, stride_x, pad_x, step_x, INSIDE)
    delta_i = tl.zeros((BLOCK,), tl.float32)
    dq = tl.zeros((BLOCK, WIDE_D), tl.float32)
    for attempt in tl.static_range(2):
        for y in range(0, taps_y):
            for x in range(0, taps_x):
                h = top + y * step_y
                w = left + x * step_x
                inside = valid & (h >= 0) & (h < Hk) & (w >= 0) & (w < Wk)
                k = None
                if query is not None:
                    k = _load(key, h, w, key_h, key_w, inside, D, WIDE_D, UNIT)
                v = _load(value, h, w, value_h, value_w, inside, DV, WIDE_DV, UNIT)
                at = (n * taps_y + y) * taps_x + x
                p = tl.exp(_logits(q, k, position_logits, at, valid, inside, scale, BLOCK, EXCLUDE) - lse_i)
                dp = tl.sum(do * v, 1)
                if attempt == 0:
                    delta_i += p * dp
                else:
                    # The softmax's gradient: ds = p * (dp - delta).
                    ds = p * (dp - delta_i)
                    if grad_query is not None:
                        dq += ds[:, None] * k
                    if grad_position_logits is not None:
                        ds = ds.to(grad_position_logits.dtype.element_ty)
                        tl.store(grad_position_logits + at, ds, mask=valid)
    tl.store(delta + n, delta_i, mask=valid)
    if grad_query is not None:
        grad_query += (b * grad_query_b + m * grad_query_m) * UNIT
        _store(grad_query, dq * scale, row, column, grad_query_h, grad_query_w, valid, D, WIDE_D, UNIT)


@triton.jit(do_not_specialize=_SIZES)
def gradients_of_keys(
    value, query, key, position_logits, grad_output, lse, delta, grad_key, grad_value,
    scale, M, Hq, Wq, Hk, Wk, taps_y, taps_x, stride_y, stride_x, pad_y, pad_x, step_y, step_x,
    position_logits_b, position_logits_m,
    value_b, value_m, value_h, value_w, query_b, query_m, query_h, query_w, key_b, key_m, key_h, key_w,
    grad_output_b, grad_output_m, grad_output_h, grad_output_w, grad_key_b, grad_key_m, grad_key_h, grad_key_w,
    grad_value_b, grad_value_m, grad_value_h, grad_value_w,
    D: tl.constexpr, DV: tl.constexpr, WIDE_D: tl.constexpr, WIDE_DV: tl.constexpr, UNIT: tl.constexpr,
    EXCLUDE: tl.constexpr, INSIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of keys and values, which each tap gets from one query or none."""
    b, m, first = _place(M, Hk * Wk, BLOCK)
    n = first + tl.arange(0, BLOCK)
    valid = n < Hk * Wk
    row = n // Wk
    column = n % Wk
    grad_output += (b * grad_output_b + m * grad_output_m) * UNIT
    lse += (b * M + m) * Hq * Wq
    delta += (b * M + m) * Hq * Wq
    k = None
    if query is not None:
        key += (b * key_b + m * key_m) * UNIT
        query += (b * query_b + m * query_m) * UNIT
        k = _load(key, row, column, key_h, key_w, valid, D, WIDE_D, UNIT)
    if position_logits is not None:
        position_logits += b * position_logits_b + m * position_logits_m
    value += (b * value_b + m * value_m) * UNIT
    v = _load(value, row, column, value_h, value_w, valid, DV, WIDE_DV, UNIT)
    dk = tl.zeros((BLOCK, WIDE_D), tl.float32)
    dv = tl.zeros((BLOCK, WIDE_DV), tl.float32)
    # A moved window also has keys that are farther away.
    rows = 2 * taps_y - 1 if INSIDE else taps_y
    columns = 2 * taps_x - 1 if INSIDE else taps_x
    for i in range(0, rows):
        h, y, in_rows = _query(row, i, Hq, Hk, taps_y, stride_y, pad_y, step_y, INSIDE)
        for j in range(0, columns):
            w, x, in_columns = _query(column, j, Wq, Wk, taps_x, stride_x, pad_x, step_x, INSIDE)
            inside = valid & in_rows & in_columns
            q = None
            if query is not None:
                q = _load(query, h, w, query_h, query_w, inside, D, WIDE_D, UNIT)
            do = _load(grad_output, h, w, grad_output_h, grad_output_w, inside, DV, WIDE_DV, UNIT)
            place = h * Wq + w
            at = (place * taps_y + y) * taps_x + x
            lse_i = tl.load(lse + place, mask=inside, other=float("inf"))
            p = tl.exp(_logits(q, k, position_logits, at, inside, inside, scale, BLOCK, EXCLUDE) - lse_i)
            if grad_value is not None:
                dv += p[:, None] * do
            if grad_key is not None:
                delta_i = tl.load(delta + place, mask=inside, other=0.0)
                dk += (p * (tl.sum(do * v, 1) - delta_i))[:, None] * q
    if grad_value is not None:
        grad_value += (b * grad_value_b + m * grad_value_m) * UNIT
        _store(grad_value, dv, row, column, grad_value_h, grad_value_w, valid, DV, WIDE_DV, UNIT)
    if grad_key is not None:
        grad_key += (b * grad_key_b + m * grad_key_m) * UNIT
        _store(grad_key, dk * scale, row, column, grad_key_h, grad_key_w, valid, D, WIDE_D, UNIT)
