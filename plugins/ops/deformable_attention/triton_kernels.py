"""Triton's kernels of deformable attention; see :mod:`.triton`.

A program has one head of a block of queries of an image, and a block of its channels. All tensors are contiguous.
Levels are numbers among the arguments, :data:`MOST_LEVELS` of them at most: ``rows_0`` and ``columns_0`` pixels,
sampled by ``points_0`` points, of a level whose predecessors have ``pixels`` pixels and ``points`` points.

Shapes: QUERIES a block of queries, D the width of a head, BLOCK_D a block of it, P the points of a query and a head.
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST_LEVELS = 8
# Another size of map compiles nothing.
_SIZES = ["S", "M", "Q", "P", "pixels", "points"]
_SIZES += [f"{name}_{n}" for name in ("rows", "columns", "points") for n in range(MOST_LEVELS)]


@triton.jit
def _of_level(LEVEL: tl.constexpr, n_0, n_1, n_2, n_3, n_4, n_5, n_6, n_7):
    """Return the number of a level; those of levels that there are not are None."""
    n = n_0
    if LEVEL == 1:
        n = n_1
    if LEVEL == 2:
        n = n_2
    if LEVEL == 3:
        n = n_3
    if LEVEL == 4:
        n = n_4
    if LEVEL == 5:
        n = n_5
    if LEVEL == 6:
        n = n_6
    if LEVEL == 7:
        n = n_7
    return n


@triton.jit
def _place(M, Q, D: tl.constexpr, QUERIES: tl.constexpr, PARTS: tl.constexpr):
    """Return this program's image, head, first query and block of channels."""
    program = tl.program_id(0)
    blocks = tl.cdiv(Q, QUERIES)
    part = program % PARTS
    m = program // PARTS % M
    first = program // PARTS // M % blocks * QUERIES
    b = program // PARTS // M // blocks
    return b.to(tl.int64), m, first, part


@triton.jit
def _located(locations, point, there, rows, columns, PROPAGATES_NAN: tl.constexpr):
    """Return row and column of the upper left pixel of samples, both -2 where none is read, and the fractions."""
    x = tl.load(locations + 2 * point, mask=there, other=0.0).to(tl.float32) * columns - 0.5
    y = tl.load(locations + 2 * point + 1, mask=there, other=0.0).to(tl.float32) * rows - 0.5
    inside = there & (y >= -1.0) & (y < rows) & (x >= -1.0) & (x < columns)  # not NaN
    row = tl.floor(tl.where(inside, y, -2.0))
    column = tl.floor(tl.where(inside, x, -2.0))
    down = tl.where(inside, y - row, y - y if PROPAGATES_NAN else 0.0)  # NaN if not finite, else 0
    right = tl.where(inside, x - column, x - x if PROPAGATES_NAN else 0.0)
    return row.to(tl.int32), column.to(tl.int32), down, right


@triton.jit
def _corner(row, column, rows, columns, pixels, stride, channels, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Offsets of pixels' channels within a head of an image, (QUERIES, BLOCK_D), and which of them there are."""
    there = ((row >= 0) & (row < rows) & (column >= 0) & (column < columns))[:, None]
    if D % BLOCK_D != 0:
        there = there & (channels < D)[None, :]
    return (pixels + row * columns + column)[:, None] * (stride * D) + channels[None, :], there


@triton.jit
def _product(value, offsets, there, grad):
    """Return pixels·grad: (QUERIES)."""
    return tl.sum(tl.load(value + offsets, mask=there, other=0.0).to(tl.float32) * grad, 1)


@triton.jit(do_not_specialize=_SIZES)
def attend(
    value, locations, weights, output, S, M, Q, P, pixels, points,
    rows_0, rows_1, rows_2, rows_3, rows_4, rows_5, rows_6, rows_7,
    columns_0, columns_1, columns_2, columns_3, columns_4, columns_5, columns_6, columns_7,
    points_0, points_1, points_2, points_3, points_4, points_5, points_6, points_7,
    D: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, PARTS: tl.constexpr,
    LEVELS: tl.constexpr, PROPAGATES_NAN: tl.constexpr, UNROLL: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write the sum of weighted samples of some levels; ``ADD`` adds it to what is there."""
    b, m, first, part = _place(M, Q, D, QUERIES, PARTS)
    query = tl.arange(0, QUERIES)
    there = first + query < Q
    channels = part * BLOCK_D + tl.arange(0, BLOCK_D)
    row_of_points = (b * Q + first) * M + m
    value += (b * S * M + m) * D
    locations += row_of_points * P * 2
    weights += row_of_points * P
    output += row_of_points * D
    total = tl.zeros((QUERIES, BLOCK_D), tl.float32)
    for level in tl.static_range(LEVELS):
        rows = _of_level(level, rows_0, rows_1, rows_2, rows_3, rows_4, rows_5, rows_6, rows_7)
        columns = _of_level(
            level, columns_0, columns_1, columns_2, columns_3, columns_4, columns_5, columns_6, columns_7
        )  # fmt: skip
        count = _of_level(level, points_0, points_1, points_2, points_3, points_4, points_5, points_6, points_7)
        for n in range(0, count, UNROLL):
            for step in tl.static_range(UNROLL):
                point = query * (M * P) + points + n + step
                row, column, down, right = _located(locations, point, there, rows, columns, PROPAGATES_NAN)
                weight = tl.load(weights + point, mask=there, other=0.0).to(tl.float32)
                for i in tl.static_range(4):
                    at, some = _corner(
                        row + i // 2, column + i % 2, rows, columns, pixels, M, channels, D, BLOCK_D
                    )  # fmt: skip
                    share = (down if i // 2 else 1 - down) * (right if i % 2 else 1 - right) * weight
                    total += share[:, None] * tl.load(value + at, mask=some, other=0.0).to(tl.float32)
        pixels += rows * columns
        points += count
    at = query[:, None] * (M * D) + channels[None, :]
    some = there[:, None] & (channels < D)[None, :]
    if ADD:
        total += tl.load(output + at, mask=some, other=0.0)
    tl.store(output + at, total.to(output.dtype.element_ty), mask=some)


@triton.jit(do_not_specialize=_SIZES)
def gradients(
    value, locations, weights, grad_output, grad_value, grad_locations, grad_weights, S, M, Q, P, pixels, points,
    rows_0, rows_1, rows_2, rows_3, rows_4, rows_5, rows_6, rows_7,
    columns_0, columns_1, columns_2, columns_3, columns_4, columns_5, columns_6, columns_7,
    points_0, points_1, points_2, points_3, points_4, points_5, points_6, points_7,
    D: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, LEVELS: tl.constexpr,
    PROPAGATES_NAN: tl.constexpr,
):  # fmt: skip
    """Gradients by the points of some levels, None where not wanted, from that of the output.

    The value's is float32 and added to; a program has all channels, of which the others are sums.
    """
    b, m, first, part = _place(M, Q, D, QUERIES, 1)
    query = tl.arange(0, QUERIES)
    there = first + query < Q
    row_of_points = (b * Q + first) * M + m
    head = (b * S * M + m) * D
    value += head
    if grad_value is not None:
        grad_value += head
    locations += row_of_points * P * 2
    weights += row_of_points * P
    grad_output += row_of_points * D
    if D <= BLOCK_D:
        channels = tl.arange(0, BLOCK_D)
        some = there[:, None] & (channels < D)[None, :]
        grad = tl.load(grad_output + query[:, None] * (M * D) + channels[None, :], mask=some, other=0.0).to(tl.float32)
    for level in tl.static_range(LEVELS):
        rows = _of_level(level, rows_0, rows_1, rows_2, rows_3, rows_4, rows_5, rows_6, rows_7)
        columns = _of_level(
            level, columns_0, columns_1, columns_2, columns_3, columns_4, columns_5, columns_6, columns_7
        )  # fmt: skip
        count = _of_level(level, points_0, points_1, points_2, points_3, points_4, points_5, points_6, points_7)
        for n in range(0, count):
            point = query * (M * P) + points + n
            row, column, down, right = _located(locations, point, there, rows, columns, PROPAGATES_NAN)
            weight = tl.load(weights + point, mask=there, other=0.0).to(tl.float32)
            upper_left = tl.zeros((QUERIES,), tl.float32)
            upper_right = tl.zeros((QUERIES,), tl.float32)
            lower_left = tl.zeros((QUERIES,), tl.float32)
            lower_right = tl.zeros((QUERIES,), tl.float32)
            for c in range(0, D, BLOCK_D):
                channels = c + tl.arange(0, BLOCK_D)
                if D > BLOCK_D:
                    some = there[:, None] & (channels < D)[None, :]
                    at = query[:, None] * (M * D) + channels[None, :]
                    grad = tl.load(grad_output + at, mask=some, other=0.0).to(tl.float32)
                at_0, some_0 = _corner(row, column, rows, columns, pixels, M, channels, D, BLOCK_D)
                at_1, some_1 = _corner(row, column + 1, rows, columns, pixels, M, channels, D, BLOCK_D)
                at_2, some_2 = _corner(row + 1, column, rows, columns, pixels, M, channels, D, BLOCK_D)
                at_3, some_3 = _corner(row + 1, column + 1, rows, columns, pixels, M, channels, D, BLOCK_D)
                if grad_locations is not None or grad_weights is not None:
                    upper_left += _product(value, at_0, some_0, grad)
                    upper_right += _product(value, at_1, some_1, grad)
                    lower_left += _product(value, at_2, some_2, grad)
                    lower_right += _product(value, at_3, some_3, grad)
                if grad_value is not None:
                    upper = (1 - down) * weight
                    lower = down * weight
                    tl.atomic_add(grad_value + at_0, (upper * (1 - right))[:, None] * grad, some_0, sem="relaxed")
                    tl.atomic_add(grad_value + at_1, (upper * right)[:, None] * grad, some_1, sem="relaxed")
                    tl.atomic_add(grad_value + at_2, (lower * (1 - right))[:, None] * grad, some_2, sem="relaxed")
                    tl.atomic_add(grad_value + at_3, (lower * right)[:, None] * grad, some_3, sem="relaxed")
            upper = upper_left + right * (upper_right - upper_left)
            lower = lower_left + right * (lower_right - lower_left)
            if grad_weights is not None:
                of_weight = upper + down * (lower - upper)
                at = row_of_points * P + point
                tl.store(grad_weights + at, of_weight.to(grad_weights.dtype.element_ty), mask=there)
            if grad_locations is not None:
                by_x = upper_right - upper_left + down * (lower_right - lower_left - upper_right + upper_left)
                at = (row_of_points * P + point) * 2
                kind = grad_locations.dtype.element_ty
                tl.store(grad_locations + at, (weight * columns * by_x).to(kind), mask=there)
                tl.store(grad_locations + at + 1, (weight * rows * (lower - upper)).to(kind), mask=there)
        pixels += rows * columns
        points += count
