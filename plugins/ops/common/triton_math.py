"""What several Triton kernels compute alike; see :mod:`.triton_launch`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply(a, b, total, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """``total + a @ b`` in float32, whatever the operands' dtype. ``UPCAST`` is for the interpreter."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def matrix_of(tensor, b, m, stride_b, stride_m, UNIT: tl.constexpr):
    """Where the rows of batch entry b, head m begin; None for None. Strides come divided by ``UNIT``."""
    if tensor is not None:
        return tensor + (b.to(tl.int64) * stride_b + m.to(tl.int64) * stride_m) * UNIT


@triton.jit
def row_places(stride, ROWS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """Offsets of ROWS rows of BLOCK columns. ``stride`` comes divided by ``UNIT``, which aligns the rows."""
    return tl.arange(0, ROWS)[:, None] * stride * UNIT + tl.arange(0, BLOCK)[None, :]


@triton.jit
def row_mask(first, limit, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Which of the rows from ``first`` on are below ``limit``, and of BLOCK columns below ``WIDTH``: (ROWS, BLOCK)."""
    there = (first + tl.arange(0, ROWS) < limit)[:, None]
    if WIDTH != BLOCK:
        there = there & (tl.arange(0, BLOCK) < WIDTH)[None, :]
    return there


@triton.jit
def rows(
    tensor, first, limit, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr
):
    """ROWS rows of a matrix from ``first`` on, 0 where there are none: (ROWS, BLOCK); None for None.

    Offsets within them are of 32 bits: ``stride * UNIT * ROWS`` must be below 2**31.
    """
    if tensor is not None:
        there = row_mask(first, limit, ROWS, WIDTH, BLOCK)
        begin = tensor + stride.to(tl.int64) * UNIT * first
        return tl.load(begin + row_places(stride, ROWS, BLOCK, UNIT), mask=there, other=0.0)


@triton.jit
def store_rows(
    tensor, first, limit, stride, found,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Store the rows of ``found``, (ROWS, BLOCK), that there are."""
    there = row_mask(first, limit, ROWS, WIDTH, BLOCK)
    begin = tensor + stride.to(tl.int64) * UNIT * first
    tl.store(begin + row_places(stride, ROWS, BLOCK, UNIT), found.to(tensor.dtype.element_ty), mask=there)
