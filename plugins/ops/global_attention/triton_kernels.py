"""Triton kernels of global attention; :mod:`.triton` launches them.

Keys are visited a tile at a time: ``ROWS`` rows of the map by ``COLUMNS`` columns (a power of two, at least the map's
width or a part of it), so that logits of rows and columns are broadcast, and their gradients summed, in registers. A
program of ``forward`` and ``query_gradients`` holds queries and visits all keys, one of ``key_gradients`` holds a tile
of keys and visits all queries: nothing is added by atomics, every sum has a fixed order.

Shapes: B batch, M heads, (Hq, Wq) queries, (Hk, Wk) keys, D and DV widths. Strides are in elements and named by the
axis: ``key_h`` is from one row of keys to the next. The last axis of all tensors but ``grad_key_logits`` has stride 1.
A tensor that is None is absent, or a gradient that is not wanted.

Constants: ``BLOCK_D`` and ``BLOCK_DV`` are the widths, rounded up; ``WIDE`` says that a tile is a part of the map's
width; ``ALIGNED`` is a power of two that divides the strides of queries, keys and values, ``LINE`` one that divides
those of column logits; ``FLAT`` says that queries lie evenly spaced in memory; ``LONG`` that offsets within one head of
one image need 64 bits; ``PRECISION`` and ``UPCAST`` are those of :func:`..triton_math.multiply`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core.triton_math import load_cells, multiply, of_rows, store_cells, unsettled

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NARROWEST = tl.constexpr(16)  # of what tl.dot multiplies
# All numbers: another map size is another value, not another binary.
TENSORS = (
    *("query", "key", "value", "row_logits", "column_logits", "key_logits", "output", "grad_output"),
    *("grad_query", "grad_key", "grad_value", "grad_row_logits", "grad_column_logits", "grad_key_logits"),
)
NUMBERS = (
    *(f"{name}_{axis}" for name in TENSORS for axis in "bmhw"),
    *("M", "Wq", "queries", "Hk", "Wk", "keys", "row_blocks", "scale"),
)


@triton.jit
def block_of_queries(M, queries, QUERIES: tl.constexpr):
    """Return what a program has: a head of all images, its image, the head in it, cells, and which of them exist."""
    blocks = tl.cdiv(queries, QUERIES)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b, m = head // M, head % M
    cells = tl.program_id(0) % blocks * QUERIES + tl.arange(0, QUERIES)
    return head, b, m, cells, cells < queries


@triton.jit
def slab(tensor, b, m, stride_b, stride_m, ALIGNED: tl.constexpr):
    """Return the pointer to one head of one image; None for None."""
    if tensor is not None:
        return tensor + tl.multiple_of(b * stride_b + m * stride_m, ALIGNED)


@triton.jit
def places(cells, stride_h, stride_w, width, ALIGNED: tl.constexpr, FLAT: tl.constexpr, LONG: tl.constexpr):
    """Return the offsets of cells that are numbered row by row in a map of ``width`` columns."""
    if LONG:
        cells = cells.to(tl.int64)
    if FLAT:
        offsets = cells * stride_w
    else:
        offsets = cells // width * stride_h + cells % width * stride_w
    return tl.multiple_of(offsets, ALIGNED)


@triton.jit
def tile_places(rows, columns, stride_h, stride_w, ALIGNED: tl.constexpr, LONG: tl.constexpr):
    """Offsets of cells in these rows and columns."""
    if LONG:
        rows = rows.to(tl.int64)
        columns = columns.to(tl.int64)
    return tl.multiple_of(rows * stride_h + columns * stride_w, ALIGNED)


@triton.jit
def load_lines(tensor, offsets, known, lines, length):
    """Return (queries, lines) logits of rows or of columns in float32, -inf where there is none; None for None."""
    if tensor is not None:
        mask = known[:, None] & (lines < length)[None, :]
        return tl.load(tensor + offsets[:, None] + lines[None, :], mask=mask, other=-float("inf")).to(tl.float32)


@triton.jit
def load_key_logits(key_logits, rows, columns, key_logits_h, there, MASKED: tl.constexpr, LONG: tl.constexpr):
    """Logits of a tile's keys in float32, -inf where there is no key; None for None where that is ``MASKED`` anyway."""
    if key_logits is not None:
        if LONG:
            rows = rows.to(tl.int64)
        return tl.load(key_logits + rows * key_logits_h + columns, mask=there, other=-float("inf")).to(tl.float32)
    elif not MASKED:
        return tl.where(there, 0.0, -float("inf"))


@triton.jit
def sum_of_terms(
    q, k, key_logits, row_logits, column_logits, scale,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Logits of queries and of a tile of keys, (QUERIES, ROWS * COLUMNS)."""
    logits = tl.zeros((QUERIES, ROWS * COLUMNS), tl.float32)
    if q is not None:
        logits = multiply(q, tl.trans(k), logits, PRECISION, UPCAST) * scale
    if key_logits is not None:
        logits += key_logits[None, :]
    # Positions are added in the products' layout: three axes are not.
    if row_logits is not None:
        logits += tl.reshape(
            tl.broadcast_to(row_logits[:, :, None], (QUERIES, ROWS, COLUMNS)), (QUERIES, ROWS * COLUMNS)
        )
    if column_logits is not None:
        logits += tl.reshape(
            tl.broadcast_to(column_logits[:, None, :], (QUERIES, ROWS, COLUMNS)), (QUERIES, ROWS * COLUMNS)
        )
    return logits


@triton.jit
def weights_of(logits, lse_i, p_scale):
    """Weights of logits and their log-sum-exps; times ``p_scale``, that of float32, they sum to 1."""
    if p_scale is None:  # one fused operation on the device
        return tl.exp2(logits * LOG2E - (lse_i * LOG2E)[:, None])
    else:  # the difference of large logits is exact
        return tl.exp2((logits - lse_i[:, None]) * LOG2E) * p_scale[:, None]


@triton.jit
def logit_gradients(p, g, v, delta_i, QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
              UPCAST: tl.constexpr):  # fmt: skip
    """Gradients of logits, (QUERIES, KEYS), from the gradients of outputs and the softmax's products."""
    zeros = tl.zeros((QUERIES, KEYS), tl.float32)
    return p * (multiply(g, tl.trans(v), zeros, PRECISION, UPCAST) - delta_i[:, None])


@triton.jit(do_not_specialize=NUMBERS)
def forward(
    value, query, key, row_logits, column_logits, key_logits, output, lse,
    value_b, value_m, value_h, value_w, query_b, query_m, query_h, query_w, key_b, key_m, key_h, key_w,
    row_logits_b, row_logits_m, row_logits_h, row_logits_w,
    column_logits_b, column_logits_m, column_logits_h, column_logits_w, key_logits_b, key_logits_m, key_logits_h,
    output_b, output_m, output_h, output_w,
    scale, M, Wq, queries, Hk, Wk, keys,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
    ALIGNED: tl.constexpr, LINE: tl.constexpr, FLAT: tl.constexpr, LONG: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Write ``output`` and ``lse`` (B, M, queries), ``QUERIES`` queries a program."""
    head, b, m, cells, known = block_of_queries(M, queries, QUERIES)
    value = slab(value, b, m, value_b, value_m, ALIGNED)
    query = slab(query, b, m, query_b, query_m, ALIGNED)
    key = slab(key, b, m, key_b, key_m, ALIGNED)
    row_logits = slab(row_logits, b, m, row_logits_b, row_logits_m, 1)
    column_logits = slab(column_logits, b, m, column_logits_b, column_logits_m, LINE)
    key_logits = slab(key_logits, b, m, key_logits_b, key_logits_m, 1)
    q = load_cells(query, places(cells, query_h, query_w, Wq, ALIGNED, FLAT, LONG), known, D, BLOCK_D)
    row_places = places(cells, row_logits_h, row_logits_w, Wq, 1, FLAT, LONG)
    column_places = places(cells, column_logits_h, column_logits_w, Wq, LINE, FLAT, LONG)

    slot = tl.arange(0, ROWS * COLUMNS)
    MASKED: tl.constexpr = row_logits is not None and column_logits is not None  # beyond the map they are -inf
    # Running maximum of the logits times log2(e), sum of weights, and weighted sum of values.
    m_i = tl.full((QUERIES,), -float("inf"), tl.float32)
    l_i = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, BLOCK_DV), tl.float32)
    for start in range(0, Wk if WIDE else 1, COLUMNS):
        columns = start + slot % COLUMNS
        column_terms = load_lines(column_logits, column_places, known, start + tl.arange(0, COLUMNS), Wk // LINE * LINE)
        for first in range(0, Hk, ROWS):
            rows = first + slot // COLUMNS
            there = (columns < Wk) & (rows * Wk + columns < keys)
            k = load_cells(key, tile_places(rows, columns, key_h, key_w, ALIGNED, LONG), there, D, BLOCK_D)
            v = load_cells(value, tile_places(rows, columns, value_h, value_w, ALIGNED, LONG), there, DV, BLOCK_DV)
            of_keys = load_key_logits(key_logits, rows, columns, key_logits_h, there, MASKED, LONG)
            row_terms = load_lines(row_logits, row_places, known, first + tl.arange(0, ROWS), Hk)
            s = sum_of_terms(q, k, of_keys, row_terms, column_terms, scale, QUERIES, ROWS, COLUMNS,
                             PRECISION, UPCAST)  # fmt: skip
            # The online softmax: a new maximum rescales the sum and the accumulator so far.
            m_new = tl.maximum(m_i, tl.max(s, 1) * LOG2E)
            m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)  # nothing but masked keys so far
            p = tl.exp2(s * LOG2E - m_safe[:, None])
            alpha = tl.exp2(m_i - m_safe)
            l_i = l_i * alpha + tl.sum(p, 1)
            acc = multiply(p.to(v.dtype), v, acc * alpha[:, None], PRECISION, UPCAST)
            m_i = m_new

    masked = l_i == 0.0
    l_i = tl.where(masked, 1.0, l_i)
    output = slab(output, b, m, output_b, output_m, ALIGNED)
    output_places = places(cells, output_h, output_w, Wq, ALIGNED, FLAT, LONG)
    store_cells(output, output_places, known, acc * (1.0 / l_i)[:, None], DV, BLOCK_DV)
    lse_i = tl.where(masked, float("inf"), (m_i + tl.log2(l_i)) * LN2)
    tl.store(lse + head * queries + cells, lse_i, mask=known)


@triton.jit(do_not_specialize=NUMBERS)
def query_gradients(
    value, query, key, row_logits, column_logits, key_logits, grad_output, output, lse, delta, inverse,
    grad_query, grad_row_logits, grad_column_logits,
    value_b, value_m, value_h, value_w, query_b, query_m, query_h, query_w, key_b, key_m, key_h, key_w,
    row_logits_b, row_logits_m, row_logits_h, row_logits_w,
    column_logits_b, column_logits_m, column_logits_h, column_logits_w, key_logits_b, key_logits_m, key_logits_h,
    grad_output_b, grad_output_m, grad_output_h, grad_output_w, output_b, output_m, output_h, output_w,
    grad_query_b, grad_query_m, grad_query_h, grad_query_w,
    grad_row_logits_b, grad_row_logits_m, grad_row_logits_h, grad_row_logits_w,
    grad_column_logits_b, grad_column_logits_m, grad_column_logits_h, grad_column_logits_w,
    scale, M, Wq, queries, Hk, Wk, keys,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
    ALIGNED: tl.constexpr, LINE: tl.constexpr, FLAT: tl.constexpr, LONG: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Gradients of ``QUERIES`` queries a program, and of their row and column logits.

    ``delta`` (B, M, queries), which a softmax's gradient subtracts, is the weighted mean of value·grad_output, and
    for float32 ``inverse`` is the factor with which weights of the log-sum-exp sum to 1. The mean is first taken from
    the output, and corrected by the sum of what it gives; where that is :func:`.unsettled`, everything is computed once
    more.
    """
    head, b, m, cells, known = block_of_queries(M, queries, QUERIES)
    value = slab(value, b, m, value_b, value_m, ALIGNED)
    query = slab(query, b, m, query_b, query_m, ALIGNED)
    key = slab(key, b, m, key_b, key_m, ALIGNED)
    row_logits = slab(row_logits, b, m, row_logits_b, row_logits_m, 1)
    column_logits = slab(column_logits, b, m, column_logits_b, column_logits_m, LINE)
    key_logits = slab(key_logits, b, m, key_logits_b, key_logits_m, 1)
    grad_output = slab(grad_output, b, m, grad_output_b, grad_output_m, ALIGNED)
    grad_row_logits = slab(grad_row_logits, b, m, grad_row_logits_b, grad_row_logits_m, 1)
    grad_query = slab(grad_query, b, m, grad_query_b, grad_query_m, ALIGNED)
    grad_column_logits = slab(grad_column_logits, b, m, grad_column_logits_b, grad_column_logits_m, 1)
    grad_places = places(cells, grad_output_h, grad_output_w, Wq, ALIGNED, FLAT, LONG)
    g = load_cells(grad_output, grad_places, known, DV, BLOCK_DV)
    output = slab(output, b, m, output_b, output_m, ALIGNED)
    o = load_cells(output, places(cells, output_h, output_w, Wq, ALIGNED, FLAT, LONG), known, DV, BLOCK_DV)
    # delta = grad_output·output, the mean of dp; as wrong as the output is rounded, hence the second attempt.
    delta_i = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    lse_i = tl.load(lse + head * queries + cells, mask=known, other=float("inf"))
    q = load_cells(query, places(cells, query_h, query_w, Wq, ALIGNED, FLAT, LONG), known, D, BLOCK_D)
    row_places = places(cells, row_logits_h, row_logits_w, Wq, 1, FLAT, LONG)
    column_places = places(cells, column_logits_h, column_logits_w, Wq, LINE, FLAT, LONG)

    slot = tl.arange(0, ROWS * COLUMNS)
    MASKED: tl.constexpr = row_logits is not None and column_logits is not None  # beyond the map they are -inf
    p_sum = None
    p_scale = None
    if inverse is not None:
        p_sum, p_scale = tl.zeros((QUERIES,), tl.float32), tl.full((QUERIES,), 1.0, tl.float32)
    attempt = 0
    # The second attempt runs only if the first one's gradients do not sum to 0 well enough.
    while attempt < 2:
        if inverse is not None:
            p_sum = tl.zeros((QUERIES,), tl.float32)
        ds_sum = tl.zeros((QUERIES,), tl.float32)
        ds_size = tl.zeros((QUERIES,), tl.float32)
        dq = tl.zeros((QUERIES, BLOCK_D), tl.float32)
        for start in range(0, Wk if WIDE else 1, COLUMNS):
            columns = start + slot % COLUMNS
            line = start + tl.arange(0, COLUMNS)
            column_terms = load_lines(column_logits, column_places, known, line, Wk // LINE * LINE)
            column_sum = tl.zeros((QUERIES, COLUMNS), tl.float32)
            for first in range(0, Hk, ROWS):
                rows = first + slot // COLUMNS
                lines = first + tl.arange(0, ROWS)
                there = (columns < Wk) & (rows * Wk + columns < keys)
                k = load_cells(key, tile_places(rows, columns, key_h, key_w, ALIGNED, LONG), there, D, BLOCK_D)
                v = load_cells(value, tile_places(rows, columns, value_h, value_w, ALIGNED, LONG), there, DV, BLOCK_DV)
                of_keys = load_key_logits(key_logits, rows, columns, key_logits_h, there, MASKED, LONG)
                row_terms = load_lines(row_logits, row_places, known, lines, Hk)
                logits = sum_of_terms(q, k, of_keys, row_terms, column_terms, scale, QUERIES, ROWS, COLUMNS,
                                      PRECISION, UPCAST)  # fmt: skip
                # Recompute the weights from the log-sum-exp, then ds = p * (dp - delta).
                p = weights_of(logits, lse_i, p_scale)
                ds = logit_gradients(p, g, v, delta_i, QUERIES, ROWS * COLUMNS, PRECISION, UPCAST)
                if inverse is not None:
                    p_sum += tl.sum(p, 1)
                ds_sum += tl.sum(ds, 1)
                ds_size += tl.sum(tl.abs(ds), 1)
                if grad_query is not None:
                    dq = multiply(ds.to(k.dtype), k, dq, PRECISION, UPCAST)
                if grad_row_logits is not None:
                    row_sum = tl.sum(tl.reshape(ds, (QUERIES, ROWS, COLUMNS)), 2)
                    row_pointers = (
                        grad_row_logits
                        + places(cells, grad_row_logits_h, grad_row_logits_w, Wq, 1, FLAT, LONG)[:, None]
                    )
                    row_mask = known[:, None] & (lines < Hk)[None, :]
                    if WIDE:  # the row's other columns came before
                        row_sum += tl.load(row_pointers + lines[None, :], mask=row_mask & (start > 0), other=0.0)
                    tl.store(row_pointers + lines[None, :], row_sum.to(grad_row_logits.dtype.element_ty), mask=row_mask)
                if grad_column_logits is not None:
                    column_sum += tl.sum(tl.reshape(ds, (QUERIES, ROWS, COLUMNS)), 1)
            if grad_column_logits is not None:
                column_pointers = (
                    grad_column_logits
                    + places(cells, grad_column_logits_h, grad_column_logits_w, Wq, 1, FLAT, LONG)[:, None]
                )
                column_mask = known[:, None] & (line < Wk)[None, :]
                tl.store(
                    column_pointers + line[None, :],
                    column_sum.to(grad_column_logits.dtype.element_ty),
                    mask=column_mask,
                )
            if WIDE:
                tl.debug_barrier()  # what one thread stored of rows' gradients, another may load
        if inverse is not None:
            # Weights of a rounded log-sum-exp do not sum to 1: normalize what was summed with them.
            correction = 1 / tl.where(p_sum == 0, 1.0, p_sum)
            dq *= correction[:, None]
            ds_sum *= correction
            p_scale *= correction
        if grad_query is not None:
            query_places = places(cells, grad_query_h, grad_query_w, Wq, ALIGNED, FLAT, LONG)
            store_cells(grad_query, query_places, known, dq * scale, D, BLOCK_D)
        repeat = unsettled(ds_sum, ds_size, p_sum, grad_row_logits is not None or grad_column_logits is not None)
        attempt = tl.where(repeat, attempt + 1, 2)
        # The sum would be 0 with an exact mean, so it is what the mean lacks.
        delta_i += ds_sum
    tl.store(delta + head * queries + cells, delta_i, mask=known)
    if inverse is not None:
        tl.store(inverse + head * queries + cells, p_scale, mask=known)


@triton.jit(do_not_specialize=NUMBERS)
def key_gradients(
    value, query, key, row_logits, column_logits, key_logits, grad_output, lse, delta, inverse, grad_key, grad_value,
    grad_key_logits,
    value_b, value_m, value_h, value_w, query_b, query_m, query_h, query_w, key_b, key_m, key_h, key_w,
    row_logits_b, row_logits_m, row_logits_h, row_logits_w,
    column_logits_b, column_logits_m, column_logits_h, column_logits_w, key_logits_b, key_logits_m, key_logits_h,
    grad_output_b, grad_output_m, grad_output_h, grad_output_w, grad_key_b, grad_key_m, grad_key_h, grad_key_w,
    grad_value_b, grad_value_m, grad_value_h, grad_value_w,
    grad_key_logits_b, grad_key_logits_m, grad_key_logits_h, grad_key_logits_w,
    scale, M, Wq, queries, Hk, Wk, keys, row_blocks,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr, LINE: tl.constexpr, FLAT: tl.constexpr, LONG: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys a program, of their values and of their logits."""
    blocks = row_blocks * tl.cdiv(Wk, COLUMNS)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b, m = head // M, head % M
    tile = tl.program_id(0) % blocks
    first, start = tile % row_blocks * ROWS, tile // row_blocks * COLUMNS
    slot = tl.arange(0, ROWS * COLUMNS)
    MASKED: tl.constexpr = row_logits is not None and column_logits is not None  # beyond the map they are -inf
    rows, columns = first + slot // COLUMNS, start + slot % COLUMNS
    there = (columns < Wk) & (rows * Wk + columns < keys)
    value = slab(value, b, m, value_b, value_m, ALIGNED)
    query = slab(query, b, m, query_b, query_m, ALIGNED)
    key = slab(key, b, m, key_b, key_m, ALIGNED)
    row_logits = slab(row_logits, b, m, row_logits_b, row_logits_m, 1)
    column_logits = slab(column_logits, b, m, column_logits_b, column_logits_m, LINE)
    key_logits = slab(key_logits, b, m, key_logits_b, key_logits_m, 1)
    grad_output = slab(grad_output, b, m, grad_output_b, grad_output_m, ALIGNED)
    k = load_cells(key, tile_places(rows, columns, key_h, key_w, ALIGNED, LONG), there, D, BLOCK_D)
    v = load_cells(value, tile_places(rows, columns, value_h, value_w, ALIGNED, LONG), there, DV, BLOCK_DV)
    of_keys = load_key_logits(key_logits, rows, columns, key_logits_h, there, MASKED, LONG)

    dk = tl.zeros((ROWS * COLUMNS, BLOCK_D), tl.float32)
    dv = tl.zeros((ROWS * COLUMNS, BLOCK_DV), tl.float32)
    logit_sum = tl.zeros((NARROWEST, ROWS * COLUMNS), tl.float32)  # alike in all rows: a product with ones
    for block in range(0, queries, QUERIES):
        cells = block + tl.arange(0, QUERIES)
        known = cells < queries
        q = load_cells(query, places(cells, query_h, query_w, Wq, ALIGNED, FLAT, LONG), known, D, BLOCK_D)
        grad_places = places(cells, grad_output_h, grad_output_w, Wq, ALIGNED, FLAT, LONG)
        g = load_cells(grad_output, grad_places, known, DV, BLOCK_DV)
        row_places = places(cells, row_logits_h, row_logits_w, Wq, 1, FLAT, LONG)
        row_terms = load_lines(row_logits, row_places, known, first + tl.arange(0, ROWS), Hk)
        column_places = places(cells, column_logits_h, column_logits_w, Wq, LINE, FLAT, LONG)
        column_terms = load_lines(column_logits, column_places, known, start + tl.arange(0, COLUMNS), Wk // LINE * LINE)
        logits = sum_of_terms(q, k, of_keys, row_terms, column_terms, scale, QUERIES, ROWS, COLUMNS,
                              PRECISION, UPCAST)  # fmt: skip
        lse_i = tl.load(lse + head * queries + cells, mask=known, other=float("inf"))
        p_scale = of_rows(inverse, head * queries + cells, known)
        # Recompute the weights from the log-sum-exp instead of storing them.
        p = weights_of(logits, lse_i, p_scale)
        if grad_value is not None:
            dv = multiply(tl.trans(p.to(g.dtype)), g, dv, PRECISION, UPCAST)
        if grad_key is not None or grad_key_logits is not None:
            delta_i = tl.load(delta + head * queries + cells, mask=known, other=0.0)
            ds = logit_gradients(p, g, v, delta_i, QUERIES, ROWS * COLUMNS, PRECISION, UPCAST)
            if grad_key is not None:
                dk = multiply(tl.trans(ds.to(q.dtype)), q, dk, PRECISION, UPCAST)
            if grad_key_logits is not None:
                ones = tl.full((NARROWEST, QUERIES), 1.0, tl.float32).to(g.dtype)
                logit_sum = multiply(ones, ds.to(g.dtype), logit_sum, PRECISION, UPCAST)

    if grad_key is not None:
        grad_key = slab(grad_key, b, m, grad_key_b, grad_key_m, ALIGNED)
        key_places = tile_places(rows, columns, grad_key_h, grad_key_w, ALIGNED, LONG)
        store_cells(grad_key, key_places, there, dk * scale, D, BLOCK_D)
    if grad_value is not None:
        grad_value = slab(grad_value, b, m, grad_value_b, grad_value_m, ALIGNED)
        value_places = tile_places(rows, columns, grad_value_h, grad_value_w, ALIGNED, LONG)
        store_cells(grad_value, value_places, there, dv, DV, BLOCK_DV)
    if grad_key_logits is not None:
        grad_key_logits = slab(grad_key_logits, b, m, grad_key_logits_b, grad_key_logits_m, 1)
        logit_places = tile_places(rows, columns, grad_key_logits_h, grad_key_logits_w, 1, LONG)
        tl.store(
            grad_key_logits + logit_places,
            (tl.sum(logit_sum, 0) / NARROWEST).to(grad_key_logits.dtype.element_ty),
            mask=there,
        )
