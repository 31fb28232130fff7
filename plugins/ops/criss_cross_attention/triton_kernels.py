"""Triton's kernels of criss-cross attention; see :mod:`.triton`.

A kernel attends along the lines of a map: all columns (``COLUMN``) or all rows. A line has ``length`` places; its
queries attend to its own keys, so that one kernel serves both kinds of lines by other strides. Strides are multiples
of ``UNIT`` and counted in it: what Triton knows of their divisibility is the same for maps of all sizes.

Shapes: Q a block of queries, K a block of keys, D and DV the widths of a head, V a block of DV.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.triton_math import multiply, saturated

_STRIDED = (
    "value", "query", "key", "output", "slopes", "grad_value", "grad_query", "grad_key",
)  # fmt: skip
# Another size of map compiles nothing.
_SIZES = ["heads", "lines", "length"]
_SIZES += [f"{name}_{axis}" for name in _STRIDED for axis in ("batch", "head", "line", "place")]


def _kernel(function):
    """Compile ``function`` by Triton, once for all sizes of maps."""
    return triton.jit(function, do_not_specialize=[name for name in _SIZES if name in function.__code__.co_varnames])


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
def _tile(ptr, places, stride, length, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """Pointers to channels from ``first`` at some places of a line, (places, BLOCK), and where they are inside."""
    channels = first + tl.arange(0, BLOCK)
    inside = (places < length)[:, None]
    if WIDTH % BLOCK != 0:
        inside = inside & (channels < WIDTH)[None, :]
    return ptr + places.to(tl.int64)[:, None] * (stride * UNIT) + channels[None, :], inside


@triton.jit
def _load(ptr, places, stride, length, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """Return what :func:`_tile` points to, 0 outside."""
    pointers, inside = _tile(ptr, places, stride, length, first, WIDTH, BLOCK, UNIT)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _store(
    ptr, tile, places, stride, length, first,
    ADD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Write a tile, or add it to what is there."""
    pointers, inside = _tile(ptr, places, stride, length, first, WIDTH, BLOCK, UNIT)
    if ADD:
        tile += tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    tl.store(pointers, tile.to(ptr.dtype.element_ty), mask=inside)


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
    left_ptr, left_places, left_stride, right_ptr, right_places, right_stride, length,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Products of two blocks of places over all channels."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, WIDTH, BLOCK):
        left = _load(left_ptr, left_places, left_stride, length, first, WIDTH, BLOCK, UNIT)
        right = _load(right_ptr, right_places, right_stride, length, first, WIDTH, BLOCK, UNIT)
        total = multiply(left, tl.trans(right), total, PRECISION, UPCAST)
    return total


@_kernel
def attend(
    value_ptr, query_ptr, key_ptr, output_ptr, partial_ptr, log_sum_exp_ptr,
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
    value_ptr += (batch * value_batch + head * value_head + line * value_line) * UNIT
    output_ptr += (batch * output_batch + head * output_head + line * output_line) * UNIT
    key_ptr += (batch * key_batch + head * key_head + line * key_line) * UNIT
    query_ptr += (batch * query_batch + head * query_head + line * query_line) * UNIT
    query = _load(query_ptr, queries, query_place, length, 0, D, BLOCK_D, UNIT)
    on_map = _on_map(queries, batch, head, line, heads, lines, length, COLUMN)

    highest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    mixed = tl.zeros((BLOCK_Q, BLOCK_V), tl.float32)
    if not COLUMN:
        highest = tl.load(partial_ptr + on_map, mask=inside, other=float("-inf"))
        total = tl.where(highest > float("-inf"), 1.0, 0.0)
        mixed = _load(output_ptr, queries, output_place, length, first, DV, BLOCK_V, UNIT).to(tl.float32)
    for start in range(0, length, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        key = _load(key_ptr, keys, key_place, length, 0, D, BLOCK_D, UNIT)
        logits = _logits(
            query, key, queries[:, None], keys[None, :], length, scale,
            BLOCK_Q, BLOCK_K, COLUMN, PRECISION, UPCAST,
        )  # fmt: skip
        higher = tl.maximum(highest, tl.max(logits, 1))
        finite = tl.where(higher > float("-inf"), higher, 0.0)  # all masked so far: every weight is exp(-inf)
        weights = tl.exp(logits - finite[:, None])
        faded = tl.exp(highest - finite)
        total = total * faded + tl.sum(weights, 1)
        value = _load(value_ptr, keys, value_place, length, first, DV, BLOCK_V, UNIT)
        mixed = multiply(weights.to(value.dtype), value, mixed * faded[:, None], PRECISION, UPCAST)
        highest = higher

    masked = total == 0
    total = tl.where(masked, 1.0, total)
    _store(output_ptr, mixed / total[:, None], queries, output_place, length, first, False, DV, BLOCK_V, UNIT)
    log_sum_exp = highest + tl.log(total)
    if COLUMN:
        tl.store(partial_ptr + on_map, log_sum_exp, mask=inside & (part == 0))
    else:  # +inf gives weights of 0
        log_sum_exp = tl.where(masked, float("inf"), log_sum_exp)
        tl.store(log_sum_exp_ptr + on_map, log_sum_exp, mask=inside & (part == 0))


@triton.jit
def _weights_and_slopes(
    query, queries, log_sum_exp, key_ptr, slopes_ptr, value_ptr, keys,
    key_place, slopes_place, value_place, length, scale,
    D: tl.constexpr, DV: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    COLUMN: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Weights (Q, K), their gradients, and the keys' vectors."""
    key = _load(key_ptr, keys, key_place, length, 0, D, BLOCK_D, UNIT)
    logits = _logits(
        query, key, queries[:, None], keys[None, :], length, scale,
        BLOCK_Q, BLOCK_K, COLUMN, PRECISION, UPCAST,
    )  # fmt: skip
    of_weights = _products(
        slopes_ptr, queries, slopes_place, value_ptr, keys, value_place, length,
        BLOCK_Q, BLOCK_K, DV, BLOCK_V, UNIT, PRECISION, UPCAST,
    )  # fmt: skip
    return tl.exp(logits - log_sum_exp[:, None]), of_weights, key


@_kernel
def gradients_of_queries(
    value_ptr, query_ptr, key_ptr, slopes_ptr, log_sum_exp_ptr, output_ptr, mean_ptr, drift_ptr, size_ptr,
    grad_query_ptr,
    scale, heads, lines, length,
    value_batch, value_head, value_line, value_place,
    query_batch, query_head, query_line, query_place,
    key_batch, key_head, key_line, key_place,
    slopes_batch, slopes_head, slopes_line, slopes_place,
    output_batch, output_head, output_line, output_place,
    grad_query_batch, grad_query_head, grad_query_line, grad_query_place,
    D: tl.constexpr, DV: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    COLUMN: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of queries along columns, to which a launch along rows adds.

    The gradient of a logit is its weight times what the gradient of the weight, slopes·value, is above its mean over
    the query's keys. That mean is slopes·output, but for the rounding of the output, which the sum of the gradients
    shows when rows have been added: the mean is mended by it. ``AGAIN`` computes anew those queries of which that is
    too late, since they are :func:`.saturated`; ``size`` is 1 there, and 0 elsewhere.
    """
    part, block, line, head, batch = _place(heads, lines, length, BLOCK_Q, PARTS)
    queries = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    inside = queries < length
    value_ptr += (batch * value_batch + head * value_head + line * value_line) * UNIT
    slopes_ptr += (batch * slopes_batch + head * slopes_head + line * slopes_line) * UNIT
    key_ptr += (batch * key_batch + head * key_head + line * key_line) * UNIT
    query_ptr += (batch * query_batch + head * query_head + line * query_line) * UNIT
    query = _load(query_ptr, queries, query_place, length, 0, D, BLOCK_D, UNIT)
    on_map = _on_map(queries, batch, head, line, heads, lines, length, COLUMN)
    log_sum_exp = tl.load(log_sum_exp_ptr + on_map, mask=inside, other=float("inf"))
    end = length
    if AGAIN:
        mean = tl.load(mean_ptr + on_map, mask=inside, other=0.0)
        inside = inside & (tl.load(size_ptr + on_map, mask=inside, other=0.0) > 0)
        end = tl.where(tl.max(inside.to(tl.int32), 0) > 0, length, 0)
    elif COLUMN:
        output_ptr += (batch * output_batch + head * output_head + line * output_line) * UNIT
        mean = tl.zeros((BLOCK_Q,), tl.float32)
        for first in range(0, DV, BLOCK_V):
            slopes = _load(slopes_ptr, queries, slopes_place, length, first, DV, BLOCK_V, UNIT)
            output = _load(output_ptr, queries, output_place, length, first, DV, BLOCK_V, UNIT)
            mean += tl.sum(slopes.to(tl.float32) * output.to(tl.float32), 1)
        drift = tl.zeros((BLOCK_Q,), tl.float32)
        size = tl.zeros((BLOCK_Q,), tl.float32)
    else:
        mean = tl.load(mean_ptr + on_map, mask=inside, other=0.0)
        drift = tl.load(drift_ptr + on_map, mask=inside, other=0.0)
        size = tl.load(size_ptr + on_map, mask=inside, other=0.0)

    total = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for start in range(0, end, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        weights, of_weights, key = _weights_and_slopes(
            query, queries, log_sum_exp, key_ptr, slopes_ptr, value_ptr,
            keys, key_place, slopes_place, value_place, length, scale,
            D, DV, UNIT, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_V, COLUMN, PRECISION, UPCAST,
        )  # fmt: skip
        of_logits = weights * (of_weights - mean[:, None])
        if not AGAIN:
            drift += tl.sum(of_logits, 1)
            size += tl.sum(tl.abs(of_logits), 1)
        total = multiply(of_logits.to(key.dtype), key, total, PRECISION, UPCAST)
    if grad_query_ptr is not None:
        grad_query_ptr += (batch * grad_query_batch + head * grad_query_head + line * grad_query_line) * UNIT
        places = tl.where(inside, queries, length)
        _store(grad_query_ptr, total * scale, places, grad_query_place, length, 0, not COLUMN, D, BLOCK_D, UNIT)
    if not AGAIN:
        if COLUMN:
            tl.store(drift_ptr + on_map, drift, mask=inside)
        else:
            size = saturated(drift, size).to(tl.float32)
            mean += drift
        tl.store(size_ptr + on_map, size, mask=inside)
        tl.store(mean_ptr + on_map, mean, mask=inside)


@_kernel
def gradients_of_keys(
    value_ptr, query_ptr, key_ptr, slopes_ptr, log_sum_exp_ptr, mean_ptr, grad_key_ptr, grad_value_ptr,
    scale, heads, lines, length,
    value_batch, value_head, value_line, value_place,
    query_batch, query_head, query_line, query_place,
    key_batch, key_head, key_line, key_place,
    slopes_batch, slopes_head, slopes_line, slopes_place,
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
    slopes_ptr += (batch * slopes_batch + head * slopes_head + line * slopes_line) * UNIT
    query_ptr += (batch * query_batch + head * query_head + line * query_line) * UNIT
    key_ptr += (batch * key_batch + head * key_head + line * key_line) * UNIT
    key = _load(key_ptr, keys, key_place, length, 0, D, BLOCK_D, UNIT)

    if part < VALUE_PARTS:
        if grad_value_ptr is not None:  # else no part is, which is not known as this is compiled
            first = part * BLOCK_V
            of_value = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
            for start in range(0, length, BLOCK_Q):
                queries = start + tl.arange(0, BLOCK_Q)
                query = _load(query_ptr, queries, query_place, length, 0, D, BLOCK_D, UNIT)
                logits = _logits(
                    key, query, queries[None, :], keys[:, None], length, scale,
                    BLOCK_K, BLOCK_Q, COLUMN, PRECISION, UPCAST,
                )  # fmt: skip
                on_map = _on_map(queries, batch, head, line, heads, lines, length, COLUMN)
                log_sum_exp = tl.load(log_sum_exp_ptr + on_map, mask=queries < length, other=float("inf"))
                slopes = _load(slopes_ptr, queries, slopes_place, length, first, DV, BLOCK_V, UNIT)
                weights = tl.exp(logits - log_sum_exp[None, :])
                of_value = multiply(weights.to(slopes.dtype), slopes, of_value, PRECISION, UPCAST)
            grad_value_ptr += (batch * grad_value_batch + head * grad_value_head + line * grad_value_line) * UNIT
            _store(grad_value_ptr, of_value, keys, grad_value_place, length, first, ADD, DV, BLOCK_V, UNIT)
    elif PARTS > VALUE_PARTS:
        value_ptr += (batch * value_batch + head * value_head + line * value_line) * UNIT
        of_key = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
        for start in range(0, length, BLOCK_Q):
            queries = start + tl.arange(0, BLOCK_Q)
            query = _load(query_ptr, queries, query_place, length, 0, D, BLOCK_D, UNIT)
            logits = _logits(
                key, query, queries[None, :], keys[:, None], length, scale,
                BLOCK_K, BLOCK_Q, COLUMN, PRECISION, UPCAST,
            )  # fmt: skip
            on_map = _on_map(queries, batch, head, line, heads, lines, length, COLUMN)
            log_sum_exp = tl.load(log_sum_exp_ptr + on_map, mask=queries < length, other=float("inf"))
            mean = tl.load(mean_ptr + on_map, mask=queries < length, other=0.0)
            of_weights = _products(
                value_ptr, keys, value_place, slopes_ptr, queries, slopes_place, length,
                BLOCK_K, BLOCK_Q, DV, BLOCK_V, UNIT, PRECISION, UPCAST,
            )  # fmt: skip
            of_logits = tl.exp(logits - log_sum_exp[None, :]) * (of_weights - mean[None, :])
            of_key = multiply(of_logits.to(query.dtype), query, of_key, PRECISION, UPCAST)
        grad_key_ptr += (batch * grad_key_batch + head * grad_key_head + line * grad_key_line) * UNIT
        _store(grad_key_ptr, of_key * scale, keys, grad_key_place, length, 0, ADD, D, BLOCK_D, UNIT)
