"""Triton's kernels of criss-cross attention; see :mod:`.triton`.

A kernel attends along the lines of a map: all columns (``COLUMN``) or all rows. A line has ``length`` places; its
queries attend to its own keys, so that one kernel serves both kinds of lines by other strides. Strides are multiples
of ``UNIT`` and counted in it: what Triton knows of their divisibility is the same for maps of all sizes.

Shapes: Q a block of queries, K a block of keys, D and DV the widths of a head, V a block of DV.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core.triton_math import multiply, saturated

_STRIDED = ("value", "query", "key", "output", "grad_output", "grad_value", "grad_query", "grad_key")
# Another size of map compiles nothing.
_SIZES = ["heads", "lines", "length"]
_SIZES += [f"{name}_{axis}" for name in _STRIDED for axis in ("batch", "head", "line", "place")]


@triton.jit
def _place(heads, lines, length, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Return this program's part, block of a line, line, head and image."""
    program = tl.program_id(0)
    blocks = tl.cdiv(length, BLOCK)
    part = program % PARTS
    block = program // PARTS % blocks
    line = (program // PARTS // blocks % lines).to(tl.int64)
    item = program // PARTS // blocks // lines
    return part, block, line, (item % heads).to(tl.int64), (item // heads).to(tl.int64)


@triton.jit
def _on_map(places, batch, head, line, heads, lines, length, COLUMN: tl.constexpr):
    """Offsets of places of a line in a contiguous (B, M, H, W)."""
    image = (batch * heads + head) * lines * length
    if COLUMN:
        return image + line + places.to(tl.int64) * lines
    else:
        return image + line * length + places


@triton.jit
def _tile(tensor, places, stride, length, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """Pointers to channels from ``first`` at some places of a line, (places, BLOCK), and where they are inside."""
    channels = first + tl.arange(0, BLOCK)
    inside = (places < length)[:, None]
    if WIDTH % BLOCK != 0:
        inside = inside & (channels < WIDTH)[None, :]
    return tensor + places.to(tl.int64)[:, None] * (stride * UNIT) + channels[None, :], inside


@triton.jit
def _load(tensor, places, stride, length, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """Return what :func:`_tile` points to, 0 outside."""
    pointers, inside = _tile(tensor, places, stride, length, first, WIDTH, BLOCK, UNIT)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _store(
    tensor, tile, places, stride, length, first,
    ADD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Write a tile, or add it to what is there."""
    pointers, inside = _tile(tensor, places, stride, length, first, WIDTH, BLOCK, UNIT)
    if ADD:
        tile += tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    tl.store(pointers, tile.to(tensor.dtype.element_ty), mask=inside)


@triton.jit
def _logits(
    left, right, queries, keys, length, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, COLUMN: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Logits of queries (Q, 1) and keys (1, K), or (1, Q) and (K, 1); -inf outside, and of a column's own place.

    ``left`` and ``right`` are the queries' and the keys' vectors, in the order of the logits' axes.
    """
    inside = (queries < length) & (keys < length)
    if COLUMN:
        inside = inside & (queries != keys)
    logits = tl.zeros((ROWS, COLUMNS), tl.float32)
    logits = multiply(left, tl.trans(right), logits, PRECISION, UPCAST) * scale
    return tl.where(inside, logits, float("-inf"))


@triton.jit
def _products(
    left, left_places, left_stride, right, right_places, right_stride, length,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Products of two blocks of places over all channels."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, WIDTH, BLOCK):
        a = _load(left, left_places, left_stride, length, first, WIDTH, BLOCK, UNIT)
        b = _load(right, right_places, right_stride, length, first, WIDTH, BLOCK, UNIT)
        total = multiply(a, tl.trans(b), total, PRECISION, UPCAST)
    return total


@triton.jit(do_not_specialize=_SIZES)
def attend(
    value, query, key, output, partial, log_sum_exp,
    scale, heads, lines, length,
    value_batch, value_head, value_line, value_place,
    query_batch, query_head, query_line, query_place,
    key_batch, key_head, key_line, key_place,
    output_batch, output_head, output_line, output_place,
    D: tl.constexpr, DV: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    COLUMN: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Attend along columns and write the output and log-sum-exp of these alone; or along rows, and join both.

    A program has a block of queries and a block of the values' channels. Along a row, its softmax continues that of
    the column: from the column's log-sum-exp as the maximum, 1 as the sum, and the column's output.
    """
    part, block, line, head, batch = _place(heads, lines, length, BLOCK_Q, PARTS)
    first = part * BLOCK_V
    queries = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    inside = queries < length
    value += (batch * value_batch + head * value_head + line * value_line) * UNIT
    output += (batch * output_batch + head * output_head + line * output_line) * UNIT
    key += (batch * key_batch + head * key_head + line * key_line) * UNIT
    query += (batch * query_batch + head * query_head + line * query_line) * UNIT
    q = _load(query, queries, query_place, length, 0, D, BLOCK_D, UNIT)
    on_map = _on_map(queries, batch, head, line, heads, lines, length, COLUMN)

    m_i = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, BLOCK_V), tl.float32)
    if not COLUMN:
        m_i = tl.load(partial + on_map, mask=inside, other=float("-inf"))
        l_i = tl.where(m_i > float("-inf"), 1.0, 0.0)
        acc = _load(output, queries, output_place, length, first, DV, BLOCK_V, UNIT).to(tl.float32)
    for start in range(0, length, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        k = _load(key, keys, key_place, length, 0, D, BLOCK_D, UNIT)
        logits = _logits(
            q, k, queries[:, None], keys[None, :], length, scale,
            BLOCK_Q, BLOCK_K, COLUMN, PRECISION, UPCAST,
        )  # fmt: skip
        # The online softmax: a new maximum rescales the sum and the accumulator so far.
        m_new = tl.maximum(m_i, tl.max(logits, 1))
        m_safe = tl.where(m_new > float("-inf"), m_new, 0.0)  # all masked so far: every weight is exp(-inf)
        p = tl.exp(logits - m_safe[:, None])
        alpha = tl.exp(m_i - m_safe)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = _load(value, keys, value_place, length, first, DV, BLOCK_V, UNIT)
        acc = multiply(p.to(v.dtype), v, acc * alpha[:, None], PRECISION, UPCAST)
        m_i = m_new

    masked = l_i == 0
    l_i = tl.where(masked, 1.0, l_i)
    _store(output, acc / l_i[:, None], queries, output_place, length, first, False, DV, BLOCK_V, UNIT)
    lse_i = m_i + tl.log(l_i)
    if COLUMN:
        tl.store(partial + on_map, lse_i, mask=inside & (part == 0))
    else:  # +inf gives weights of 0
        lse_i = tl.where(masked, float("inf"), lse_i)
        tl.store(log_sum_exp + on_map, lse_i, mask=inside & (part == 0))


@triton.jit
def _weights_and_gradients(
    q, queries, lse_i, key, grad_output, value, keys,
    key_place, grad_output_place, value_place, length, scale,
    D: tl.constexpr, DV: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    COLUMN: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Weights (Q, K), their gradients, and the keys' vectors."""
    k = _load(key, keys, key_place, length, 0, D, BLOCK_D, UNIT)
    logits = _logits(
        q, k, queries[:, None], keys[None, :], length, scale,
        BLOCK_Q, BLOCK_K, COLUMN, PRECISION, UPCAST,
    )  # fmt: skip
    dp = _products(
        grad_output, queries, grad_output_place, value, keys, value_place, length,
        BLOCK_Q, BLOCK_K, DV, BLOCK_V, UNIT, PRECISION, UPCAST,
    )  # fmt: skip
    return tl.exp(logits - lse_i[:, None]), dp, k


@triton.jit(do_not_specialize=_SIZES)
def gradients_of_queries(
    value, query, key, grad_output, log_sum_exp, output, delta, ds_sums, ds_sizes, grad_query,
    scale, heads, lines, length,
    value_batch, value_head, value_line, value_place,
    query_batch, query_head, query_line, query_place,
    key_batch, key_head, key_line, key_place,
    grad_output_batch, grad_output_head, grad_output_line, grad_output_place,
    output_batch, output_head, output_line, output_place,
    grad_query_batch, grad_query_head, grad_query_line, grad_query_place,
    D: tl.constexpr, DV: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    COLUMN: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of queries along columns, to which a launch along rows adds.

    The gradient of a logit is its weight times the difference between the weight's gradient, grad_output·value, and the
    mean of these over the query's keys. That mean is grad_output·output, up to the rounding of the output, which the
    sum of the gradients reveals after the rows are added and which is then corrected. ``AGAIN`` recomputes the queries
    for which that is too late because they are :func:`.saturated`; ``ds_sizes`` are 1 there and 0 elsewhere.
    """
    part, block, line, head, batch = _place(heads, lines, length, BLOCK_Q, PARTS)
    queries = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    inside = queries < length
    value += (batch * value_batch + head * value_head + line * value_line) * UNIT
    grad_output += (batch * grad_output_batch + head * grad_output_head + line * grad_output_line) * UNIT
    key += (batch * key_batch + head * key_head + line * key_line) * UNIT
    query += (batch * query_batch + head * query_head + line * query_line) * UNIT
    q = _load(query, queries, query_place, length, 0, D, BLOCK_D, UNIT)
    on_map = _on_map(queries, batch, head, line, heads, lines, length, COLUMN)
    lse_i = tl.load(log_sum_exp + on_map, mask=inside, other=float("inf"))
    end = length
    if AGAIN:
        delta_i = tl.load(delta + on_map, mask=inside, other=0.0)
        inside = inside & (tl.load(ds_sizes + on_map, mask=inside, other=0.0) > 0)
        end = tl.where(tl.max(inside.to(tl.int32), 0) > 0, length, 0)
    elif COLUMN:
        output += (batch * output_batch + head * output_head + line * output_line) * UNIT
        delta_i = tl.zeros((BLOCK_Q,), tl.float32)
        for first in range(0, DV, BLOCK_V):
            grad = _load(grad_output, queries, grad_output_place, length, first, DV, BLOCK_V, UNIT)
            out = _load(output, queries, output_place, length, first, DV, BLOCK_V, UNIT)
            delta_i += tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
        ds_sum = tl.zeros((BLOCK_Q,), tl.float32)
        ds_size = tl.zeros((BLOCK_Q,), tl.float32)
    else:
        delta_i = tl.load(delta + on_map, mask=inside, other=0.0)
        ds_sum = tl.load(ds_sums + on_map, mask=inside, other=0.0)
        ds_size = tl.load(ds_sizes + on_map, mask=inside, other=0.0)

    dq = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for start in range(0, end, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        p, dp, k = _weights_and_gradients(
            q, queries, lse_i, key, grad_output, value,
            keys, key_place, grad_output_place, value_place, length, scale,
            D, DV, UNIT, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_V, COLUMN, PRECISION, UPCAST,
        )  # fmt: skip
        # The softmax's gradient: ds = p * (dp - delta).
        ds = p * (dp - delta_i[:, None])
        if not AGAIN:
            ds_sum += tl.sum(ds, 1)
            ds_size += tl.sum(tl.abs(ds), 1)
        dq = multiply(ds.to(k.dtype), k, dq, PRECISION, UPCAST)
    if grad_query is not None:
        grad_query += (batch * grad_query_batch + head * grad_query_head + line * grad_query_line) * UNIT
        places = tl.where(inside, queries, length)
        _store(grad_query, dq * scale, places, grad_query_place, length, 0, not COLUMN, D, BLOCK_D, UNIT)
    if not AGAIN:
        if COLUMN:
            tl.store(ds_sums + on_map, ds_sum, mask=inside)
        else:
            ds_size = saturated(ds_sum, ds_size).to(tl.float32)
            delta_i += ds_sum
        tl.store(ds_sizes + on_map, ds_size, mask=inside)
        tl.store(delta + on_map, delta_i, mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def gradients_of_keys(
    value, query, key, grad_output, log_sum_exp, delta, grad_key, grad_value,
    scale, heads, lines, length,
    value_batch, value_head, value_line, value_place,
    query_batch, query_head, query_line, query_place,
    key_batch, key_head, key_line, key_place,
    grad_output_batch, grad_output_head, grad_output_line, grad_output_place,
    grad_key_batch, grad_key_head, grad_key_line, grad_key_place,
    grad_value_batch, grad_value_head, grad_value_line, grad_value_place,
    D: tl.constexpr, DV: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    COLUMN: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    VALUE_PARTS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys and values along columns or rows.

    A program computes that of a block of the values' channels, or, as the last of ``PARTS``, that of the keys.
    ``ADD`` adds to the gradients that are there.
    """
    part, block, line, head, batch = _place(heads, lines, length, BLOCK_K, PARTS)
    keys = block * BLOCK_K + tl.arange(0, BLOCK_K)
    grad_output += (batch * grad_output_batch + head * grad_output_head + line * grad_output_line) * UNIT
    query += (batch * query_batch + head * query_head + line * query_line) * UNIT
    key += (batch * key_batch + head * key_head + line * key_line) * UNIT
    k = _load(key, keys, key_place, length, 0, D, BLOCK_D, UNIT)

    if part < VALUE_PARTS:
        if grad_value is not None:  # else no part is, which is not known as this is compiled
            first = part * BLOCK_V
            dv = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
            for start in range(0, length, BLOCK_Q):
                queries = start + tl.arange(0, BLOCK_Q)
                q = _load(query, queries, query_place, length, 0, D, BLOCK_D, UNIT)
                logits = _logits(
                    k, q, queries[None, :], keys[:, None], length, scale,
                    BLOCK_K, BLOCK_Q, COLUMN, PRECISION, UPCAST,
                )  # fmt: skip
                on_map = _on_map(queries, batch, head, line, heads, lines, length, COLUMN)
                lse_i = tl.load(log_sum_exp + on_map, mask=queries < length, other=float("inf"))
                grad = _load(grad_output, queries, grad_output_place, length, first, DV, BLOCK_V, UNIT)
                p = tl.exp(logits - lse_i[None, :])
                dv = multiply(p.to(grad.dtype), grad, dv, PRECISION, UPCAST)
            grad_value += (batch * grad_value_batch + head * grad_value_head + line * grad_value_line) * UNIT
            _store(grad_value, dv, keys, grad_value_place, length, first, ADD, DV, BLOCK_V, UNIT)
    elif PARTS > VALUE_PARTS:
        value += (batch * value_batch + head * value_head + line * value_line) * UNIT
        dk = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
        for start in range(0, length, BLOCK_Q):
            queries = start + tl.arange(0, BLOCK_Q)
            q = _load(query, queries, query_place, length, 0, D, BLOCK_D, UNIT)
            logits = _logits(
                k, q, queries[None, :], keys[:, None], length, scale,
                BLOCK_K, BLOCK_Q, COLUMN, PRECISION, UPCAST,
            )  # fmt: skip
            on_map = _on_map(queries, batch, head, line, heads, lines, length, COLUMN)
            lse_i = tl.load(log_sum_exp + on_map, mask=queries < length, other=float("inf"))
            delta_i = tl.load(delta + on_map, mask=queries < length, other=0.0)
            dp = _products(
                value, keys, value_place, grad_output, queries, grad_output_place, length,
                BLOCK_K, BLOCK_Q, DV, BLOCK_V, UNIT, PRECISION, UPCAST,
            )  # fmt: skip
            ds = tl.exp(logits - lse_i[None, :]) * (dp - delta_i[None, :])
            dk = multiply(ds.to(q.dtype), q, dk, PRECISION, UPCAST)
        grad_key += (batch * grad_key_batch + head * grad_key_head + line * grad_key_line) * UNIT
        _store(grad_key, dk * scale, keys, grad_key_place, length, 0, ADD, D, BLOCK_D, UNIT)
