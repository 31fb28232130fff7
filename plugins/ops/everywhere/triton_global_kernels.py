"""Triton kernels of global attention; :mod:`.triton_global` launches them.

Keys are visited a tile at a time: ``ROWS`` rows of the map by ``COLUMNS`` columns (a power of two, at least the map's
width or a part of it), so that logits of rows and columns are broadcast, and their gradients summed, in registers. A
program of ``forward`` and ``query_gradients`` holds queries and visits all keys, one of ``key_gradients`` holds a tile
of keys and visits all queries: nothing is added by atomics, every sum has a fixed order.

Shapes: B batch, M heads, (Hq, Wq) queries, (Hk, Wk) keys, D and DV widths. Strides are in elements and named by the
axis: ``key_h`` is from one row of keys to the next. The last axis of all tensors but ``key_logits`` has stride 1.

Constants: ``BLOCK_D`` and ``BLOCK_DV`` are the widths, rounded up; ``CONTENT``, ``ROW``, ``COLUMN`` and ``NEAR`` say
which terms are there; ``WIDE`` that a tile is a part of the map's width; ``ALIGNED`` is a power of two that divides
the strides of queries, keys and values; ``FLAT`` that queries lie evenly spaced in memory; ``LONG`` that offsets
within one head of one image need 64 bits; ``PRECISION`` and ``UPCAST`` are those of :func:`..triton_math.multiply`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_math import multiply

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# All numbers: another map size is another value, not another binary.
_TENSORS = ("query", "key", "value", "row", "column", "near", "output", "grad_output", "grad_query", "grad_key",
            "grad_value", "grad_row", "grad_column", "grad_near")  # fmt: skip
NUMBERS = (
    *(f"{name}_{axis}" for name in _TENSORS for axis in "bmhw"),
    *("M", "Wq", "queries", "Hk", "Wk", "keys", "row_blocks", "scale"),
)


@triton.jit
def slab(tensor, b, m, stride_b, stride_m, ALIGNED: tl.constexpr):
    """Where one head of one image begins."""
    return tensor + tl.multiple_of(b * stride_b + m * stride_m, ALIGNED)


@triton.jit
def places(cells, stride_h, stride_w, width, ALIGNED: tl.constexpr, FLAT: tl.constexpr, LONG: tl.constexpr):
    """Offsets of cells that are counted row by row in a map of ``width`` columns."""
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
def load_rows(tensor, offsets, there, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """(cells, BLOCK) numbers, 0 where a cell is not there and beyond ``WIDTH``."""
    width = tl.arange(0, BLOCK)
    mask = there[:, None]
    if WIDTH < BLOCK:
        mask = mask & (width < WIDTH)[None, :]
    return tl.load(tensor + offsets[:, None] + width[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(tensor, offsets, there, numbers, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The reverse of :func:`load_rows`, in the tensor's dtype."""
    width = tl.arange(0, BLOCK)
    mask = there[:, None]
    if WIDTH < BLOCK:
        mask = mask & (width < WIDTH)[None, :]
    tl.store(tensor + offsets[:, None] + width[None, :], numbers.to(tensor.dtype.element_ty), mask=mask)


@triton.jit
def load_lines(tensor, offsets, there, line, length):
    """(queries, lines) logits of rows or of columns in float32, -inf where there is none."""
    mask = there[:, None] & (line < length)[None, :]
    return tl.load(tensor + offsets[:, None] + line[None, :], mask=mask, other=-float("inf")).to(tl.float32)


@triton.jit
def load_lines_across(tensor, offsets, there, line, length):
    """:func:`load_lines` with the axes exchanged, (lines, queries)."""
    mask = (line < length)[:, None] & there[None, :]
    return tl.load(tensor + line[:, None] + offsets[None, :], mask=mask, other=-float("inf")).to(tl.float32)


@triton.jit
def load_near(near, rows, columns, near_h, near_w, there, NEAR: tl.constexpr, LONG: tl.constexpr):
    """Logits of a tile's keys in float32, -inf where there is no key."""
    if NEAR:
        offsets = tile_places(rows, columns, near_h, near_w, 1, LONG)
        found = tl.load(near + offsets, mask=there, other=-float("inf")).to(tl.float32)
    else:
        found = tl.where(there, 0.0, -float("inf"))
    return found


@triton.jit(do_not_specialize=NUMBERS)
def forward(
    value, query, key, row, column, near, output, lse,
    value_b, value_m, value_h, value_w, query_b, query_m, query_h, query_w, key_b, key_m, key_h, key_w,
    row_b, row_m, row_h, row_w, column_b, column_m, column_h, column_w, near_b, near_m, near_h, near_w,
    output_b, output_m, output_h, output_w,
    scale, M, Wq, queries, Hk, Wk, keys,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
    CONTENT: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, NEAR: tl.constexpr,
    ALIGNED: tl.constexpr, FLAT: tl.constexpr, LONG: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """``output`` and ``lse`` (B, M, queries) of ``QUERIES`` queries a program."""
    blocks = tl.cdiv(queries, QUERIES)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b, m = head // M, head % M
    cells = tl.program_id(0) % blocks * QUERIES + tl.arange(0, QUERIES)
    known = cells < queries
    value = slab(value, b, m, value_b, value_m, ALIGNED)
    if CONTENT:
        key = slab(key, b, m, key_b, key_m, ALIGNED)
        query = slab(query, b, m, query_b, query_m, ALIGNED)
        q = load_rows(query, places(cells, query_h, query_w, Wq, ALIGNED, FLAT, LONG), known, D, BLOCK_D)
    if ROW:
        row = slab(row, b, m, row_b, row_m, 1)
        row_places = places(cells, row_h, row_w, Wq, 1, FLAT, LONG)
    if COLUMN:
        column = slab(column, b, m, column_b, column_m, 1)
        column_places = places(cells, column_h, column_w, Wq, 1, FLAT, LONG)
    if NEAR:
        near = slab(near, b, m, near_b, near_m, 1)

    slot = tl.arange(0, ROWS * COLUMNS)
    greatest = tl.full((QUERIES,), -float("inf"), tl.float32)  # of the logits, times log2(e)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, BLOCK_DV), tl.float32)
    for start in range(0, Wk if WIDE else 1, COLUMNS):
        columns = start + slot % COLUMNS
        if COLUMN:
            column_logits = load_lines(column, column_places, known, start + tl.arange(0, COLUMNS), Wk)
        for first in range(0, Hk, ROWS):
            rows = first + slot // COLUMNS
            there = (columns < Wk) & (rows * Wk + columns < keys)
            logits = load_near(near, rows, columns, near_h, near_w, there, NEAR, LONG)[None, :]
            if CONTENT:
                k = load_rows(key, tile_places(rows, columns, key_h, key_w, ALIGNED, LONG), there, D, BLOCK_D)
                zeros = tl.zeros((QUERIES, ROWS * COLUMNS), tl.float32)
                logits = multiply(q, tl.trans(k), zeros, PRECISION, UPCAST) * scale + logits
            else:
                logits = tl.broadcast_to(logits, (QUERIES, ROWS * COLUMNS))
            if ROW or COLUMN:
                logits = tl.reshape(logits, (QUERIES, ROWS, COLUMNS))
                if ROW:
                    logits += load_lines(row, row_places, known, first + tl.arange(0, ROWS), Hk)[:, :, None]
                if COLUMN:
                    logits += column_logits[:, None, :]
                logits = tl.reshape(logits, (QUERIES, ROWS * COLUMNS))
            before = greatest
            greatest = tl.maximum(before, tl.max(logits, 1) * LOG2E)
            shift = tl.where(greatest == -float("inf"), 0.0, greatest)  # nothing but masked keys so far
            weights = tl.exp2(logits * LOG2E - shift[:, None])
            shrink = tl.exp2(before - shift)
            total = total * shrink + tl.sum(weights, 1)
            v = load_rows(value, tile_places(rows, columns, value_h, value_w, ALIGNED, LONG), there, DV, BLOCK_DV)
            mixed = multiply(weights.to(v.dtype), v, mixed * shrink[:, None], PRECISION, UPCAST)

    masked = total == 0.0
    total = tl.where(masked, 1.0, total)
    output = slab(output, b, m, output_b, output_m, ALIGNED)
    output_places = places(cells, output_h, output_w, Wq, ALIGNED, FLAT, LONG)
    store_rows(output, output_places, known, mixed * (1.0 / total)[:, None], DV, BLOCK_DV)
    sums = tl.where(masked, float("inf"), (greatest + tl.log2(total)) * LN2)
    tl.store(lse + head * queries + cells, sums, mask=known)


@triton.jit(do_not_specialize=NUMBERS)
def products_of_outputs(
    output, grad_output, products,
    output_b, output_m, output_h, output_w, grad_output_b, grad_output_m, grad_output_h, grad_output_w,
    M, Wq, queries,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, QUERIES: tl.constexpr, ALIGNED: tl.constexpr, FLAT: tl.constexpr,
    LONG: tl.constexpr,
):  # fmt: skip
    """``products`` (B, M, queries), of each query's output and its gradient: what a softmax's gradient subtracts."""
    blocks = tl.cdiv(queries, QUERIES)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b, m = head // M, head % M
    cells = tl.program_id(0) % blocks * QUERIES + tl.arange(0, QUERIES)
    known = cells < queries
    output = slab(output, b, m, output_b, output_m, ALIGNED)
    grad_output = slab(grad_output, b, m, grad_output_b, grad_output_m, ALIGNED)
    o = load_rows(output, places(cells, output_h, output_w, Wq, ALIGNED, FLAT, LONG), known, DV, BLOCK_DV)
    places_of_grad = places(cells, grad_output_h, grad_output_w, Wq, ALIGNED, FLAT, LONG)
    g = load_rows(grad_output, places_of_grad, known, DV, BLOCK_DV)
    found = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    tl.store(products + head * queries + cells, found, mask=known)


@triton.jit(do_not_specialize=NUMBERS)
def query_gradients(
    value, query, key, row, column, near, grad_output, lse, products, grad_query, grad_row, grad_column,
    value_b, value_m, value_h, value_w, query_b, query_m, query_h, query_w, key_b, key_m, key_h, key_w,
    row_b, row_m, row_h, row_w, column_b, column_m, column_h, column_w, near_b, near_m, near_h, near_w,
    grad_output_b, grad_output_m, grad_output_h, grad_output_w, grad_query_b, grad_query_m, grad_query_h, grad_query_w,
    grad_row_b, grad_row_m, grad_row_h, grad_row_w, grad_column_b, grad_column_m, grad_column_h, grad_column_w,
    scale, M, Wq, queries, Hk, Wk, keys,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
    CONTENT: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, NEAR: tl.constexpr,
    GRAD_QUERY: tl.constexpr, GRAD_ROW: tl.constexpr, GRAD_COLUMN: tl.constexpr,
    ALIGNED: tl.constexpr, FLAT: tl.constexpr, LONG: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Gradients of ``QUERIES`` queries a program, and of their row and column logits."""
    blocks = tl.cdiv(queries, QUERIES)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b, m = head // M, head % M
    cells = tl.program_id(0) % blocks * QUERIES + tl.arange(0, QUERIES)
    known = cells < queries
    value = slab(value, b, m, value_b, value_m, ALIGNED)
    grad_output = slab(grad_output, b, m, grad_output_b, grad_output_m, ALIGNED)
    places_of_grad = places(cells, grad_output_h, grad_output_w, Wq, ALIGNED, FLAT, LONG)
    g = load_rows(grad_output, places_of_grad, known, DV, BLOCK_DV)
    total = tl.load(lse + head * queries + cells, mask=known, other=float("inf")) * LOG2E
    product = tl.load(products + head * queries + cells, mask=known, other=0.0)
    if CONTENT:
        key = slab(key, b, m, key_b, key_m, ALIGNED)
        query = slab(query, b, m, query_b, query_m, ALIGNED)
        q = load_rows(query, places(cells, query_h, query_w, Wq, ALIGNED, FLAT, LONG), known, D, BLOCK_D)
    if ROW:
        row = slab(row, b, m, row_b, row_m, 1)
        row_places = places(cells, row_h, row_w, Wq, 1, FLAT, LONG)
    if COLUMN:
        column = slab(column, b, m, column_b, column_m, 1)
        column_places = places(cells, column_h, column_w, Wq, 1, FLAT, LONG)
    if NEAR:
        near = slab(near, b, m, near_b, near_m, 1)
    if GRAD_ROW:
        grad_row = slab(grad_row, b, m, grad_row_b, grad_row_m, 1)
        grad_row_places = places(cells, grad_row_h, grad_row_w, Wq, 1, FLAT, LONG)
    if GRAD_COLUMN:
        grad_column = slab(grad_column, b, m, grad_column_b, grad_column_m, 1)
        grad_column_places = places(cells, grad_column_h, grad_column_w, Wq, 1, FLAT, LONG)

    slot = tl.arange(0, ROWS * COLUMNS)
    zeros = tl.zeros((QUERIES, ROWS * COLUMNS), tl.float32)
    if GRAD_QUERY:
        query_sum = tl.zeros((QUERIES, BLOCK_D), tl.float32)
    for start in range(0, Wk if WIDE else 1, COLUMNS):
        columns = start + slot % COLUMNS
        line = start + tl.arange(0, COLUMNS)
        if COLUMN:
            column_logits = load_lines(column, column_places, known, line, Wk)
        if GRAD_COLUMN:
            column_sum = tl.zeros((QUERIES, COLUMNS), tl.float32)
        for first in range(0, Hk, ROWS):
            rows = first + slot // COLUMNS
            there = (columns < Wk) & (rows * Wk + columns < keys)
            logits = load_near(near, rows, columns, near_h, near_w, there, NEAR, LONG)[None, :]
            if CONTENT:
                k = load_rows(key, tile_places(rows, columns, key_h, key_w, ALIGNED, LONG), there, D, BLOCK_D)
                logits = multiply(q, tl.trans(k), zeros, PRECISION, UPCAST) * scale + logits
            else:
                logits = tl.broadcast_to(logits, (QUERIES, ROWS * COLUMNS))
            if ROW or COLUMN:
                logits = tl.reshape(logits, (QUERIES, ROWS, COLUMNS))
                if ROW:
                    logits += load_lines(row, row_places, known, first + tl.arange(0, ROWS), Hk)[:, :, None]
                if COLUMN:
                    logits += column_logits[:, None, :]
                logits = tl.reshape(logits, (QUERIES, ROWS * COLUMNS))
            weights = tl.exp2(logits * LOG2E - total[:, None])
            v = load_rows(value, tile_places(rows, columns, value_h, value_w, ALIGNED, LONG), there, DV, BLOCK_DV)
            slopes = weights * (multiply(g, tl.trans(v), zeros, PRECISION, UPCAST) - product[:, None])
            if GRAD_QUERY:
                query_sum = multiply(slopes.to(k.dtype), k, query_sum, PRECISION, UPCAST)
            if GRAD_ROW:
                row_sum = tl.sum(tl.reshape(slopes, (QUERIES, ROWS, COLUMNS)), 2)
                lines = first + tl.arange(0, ROWS)
                row_mask = known[:, None] & (lines < Hk)[None, :]
                row_pointers = grad_row + grad_row_places[:, None] + lines[None, :]
                if WIDE:  # a row's other columns came before
                    row_sum += tl.load(row_pointers, mask=row_mask & (start > 0), other=0.0)
                tl.store(row_pointers, row_sum.to(grad_row.dtype.element_ty), mask=row_mask)
            if GRAD_COLUMN:
                column_sum += tl.sum(tl.reshape(slopes, (QUERIES, ROWS, COLUMNS)), 1)
        if GRAD_COLUMN:
            column_pointers = grad_column + grad_column_places[:, None] + line[None, :]
            column_mask = known[:, None] & (line < Wk)[None, :]
            tl.store(column_pointers, column_sum.to(grad_column.dtype.element_ty), mask=column_mask)
        if WIDE and GRAD_ROW:
            tl.debug_barrier()  # what one thread stored, another may load
    if GRAD_QUERY:
        grad_query = slab(grad_query, b, m, grad_query_b, grad_query_m, ALIGNED)
        grad_query_places = places(cells, grad_query_h, grad_query_w, Wq, ALIGNED, FLAT, LONG)
        store_rows(grad_query, grad_query_places, known, query_sum * scale, D, BLOCK_D)


@triton.jit(do_not_specialize=NUMBERS)
def key_gradients(
    value, query, key, row, column, near, grad_output, lse, products, grad_key, grad_value, grad_near,
    value_b, value_m, value_h, value_w, query_b, query_m, query_h, query_w, key_b, key_m, key_h, key_w,
    row_b, row_m, row_h, row_w, column_b, column_m, column_h, column_w, near_b, near_m, near_h, near_w,
    grad_output_b, grad_output_m, grad_output_h, grad_output_w, grad_key_b, grad_key_m, grad_key_h, grad_key_w,
    grad_value_b, grad_value_m, grad_value_h, grad_value_w, grad_near_b, grad_near_m, grad_near_h, grad_near_w,
    scale, M, Wq, queries, Hk, Wk, keys, row_blocks,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CONTENT: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, NEAR: tl.constexpr,
    GRAD_KEY: tl.constexpr, GRAD_VALUE: tl.constexpr, GRAD_NEAR: tl.constexpr,
    ALIGNED: tl.constexpr, FLAT: tl.constexpr, LONG: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys a program, of their values and of their logits. Logits are (keys, queries) here."""
    blocks = row_blocks * tl.cdiv(Wk, COLUMNS)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b, m = head // M, head % M
    tile = tl.program_id(0) % blocks
    first, start = tile % row_blocks * ROWS, tile // row_blocks * COLUMNS
    slot = tl.arange(0, ROWS * COLUMNS)
    rows, columns = first + slot // COLUMNS, start + slot % COLUMNS
    there = (columns < Wk) & (rows * Wk + columns < keys)
    value = slab(value, b, m, value_b, value_m, ALIGNED)
    v = load_rows(value, tile_places(rows, columns, value_h, value_w, ALIGNED, LONG), there, DV, BLOCK_DV)
    grad_output = slab(grad_output, b, m, grad_output_b, grad_output_m, ALIGNED)
    if CONTENT:
        query = slab(query, b, m, query_b, query_m, ALIGNED)
        key = slab(key, b, m, key_b, key_m, ALIGNED)
        k = load_rows(key, tile_places(rows, columns, key_h, key_w, ALIGNED, LONG), there, D, BLOCK_D)
    if ROW:
        row = slab(row, b, m, row_b, row_m, 1)
    if COLUMN:
        column = slab(column, b, m, column_b, column_m, 1)
    if NEAR:
        near = slab(near, b, m, near_b, near_m, 1)
    near_logits = load_near(near, rows, columns, near_h, near_w, there, NEAR, LONG)[:, None]

    zeros = tl.zeros((ROWS * COLUMNS, QUERIES), tl.float32)
    if GRAD_KEY:
        key_sum = tl.zeros((ROWS * COLUMNS, BLOCK_D), tl.float32)
    if GRAD_VALUE:
        value_sum = tl.zeros((ROWS * COLUMNS, BLOCK_DV), tl.float32)
    if GRAD_NEAR:
        near_sum = tl.zeros((ROWS * COLUMNS,), tl.float32)
    for block in range(0, queries, QUERIES):
        cells = block + tl.arange(0, QUERIES)
        known = cells < queries
        if CONTENT:
            q = load_rows(query, places(cells, query_h, query_w, Wq, ALIGNED, FLAT, LONG), known, D, BLOCK_D)
            logits = multiply(k, tl.trans(q), zeros, PRECISION, UPCAST) * scale + near_logits
        else:
            logits = tl.broadcast_to(near_logits, (ROWS * COLUMNS, QUERIES))
        if ROW or COLUMN:
            logits = tl.reshape(logits, (ROWS, COLUMNS, QUERIES))
            if ROW:
                row_places = places(cells, row_h, row_w, Wq, 1, FLAT, LONG)
                lines = first + tl.arange(0, ROWS)
                logits += load_lines_across(row, row_places, known, lines, Hk)[:, None, :]
            if COLUMN:
                column_places = places(cells, column_h, column_w, Wq, 1, FLAT, LONG)
                lines = start + tl.arange(0, COLUMNS)
                logits += load_lines_across(column, column_places, known, lines, Wk)[None, :, :]
            logits = tl.reshape(logits, (ROWS * COLUMNS, QUERIES))
        total = tl.load(lse + head * queries + cells, mask=known, other=float("inf")) * LOG2E
        weights = tl.exp2(logits * LOG2E - total[None, :])
        places_of_grad = places(cells, grad_output_h, grad_output_w, Wq, ALIGNED, FLAT, LONG)
        g = load_rows(grad_output, places_of_grad, known, DV, BLOCK_DV)
        if GRAD_VALUE:
            value_sum = multiply(weights.to(g.dtype), g, value_sum, PRECISION, UPCAST)
        if GRAD_KEY or GRAD_NEAR:
            product = tl.load(products + head * queries + cells, mask=known, other=0.0)
            slopes = weights * (multiply(v, tl.trans(g), zeros, PRECISION, UPCAST) - product[None, :])
            if GRAD_KEY:
                key_sum = multiply(slopes.to(q.dtype), q, key_sum, PRECISION, UPCAST)
            if GRAD_NEAR:
                near_sum += tl.sum(slopes, 1)

    if GRAD_KEY:
        grad_key = slab(grad_key, b, m, grad_key_b, grad_key_m, ALIGNED)
        grad_key_places = tile_places(rows, columns, grad_key_h, grad_key_w, ALIGNED, LONG)
        store_rows(grad_key, grad_key_places, there, key_sum * scale, D, BLOCK_D)
    if GRAD_VALUE:
        grad_value = slab(grad_value, b, m, grad_value_b, grad_value_m, ALIGNED)
        grad_value_places = tile_places(rows, columns, grad_value_h, grad_value_w, ALIGNED, LONG)
        store_rows(grad_value, grad_value_places, there, value_sum, DV, BLOCK_DV)
    if GRAD_NEAR:
        grad_near = slab(grad_near, b, m, grad_near_b, grad_near_m, 1)
        near_places = tile_places(rows, columns, grad_near_h, grad_near_w, 1, LONG)
        tl.store(grad_near + near_places, near_sum.to(grad_near.dtype.element_ty), mask=there)
