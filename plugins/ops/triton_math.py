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
    if tensor is None:
        return None
    else:
        return tensor + (b.to(tl.int64) * stride_b + m.to(tl.int64) * stride_m) * UNIT


@triton.jit
def row_places(index, stride, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets of rows ``index``, (n, BLOCK). ``stride`` comes divided by ``UNIT``, which aligns the rows."""
    return index.to(tl.int64)[:, None] * stride * UNIT + tl.arange(0, BLOCK)[None, :]


@triton.jit
def row_mask(index, limit, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Which of rows ``index`` are below ``limit`` and of BLOCK columns below ``WIDTH``, (n, BLOCK)."""
    there = (index < limit)[:, None]
    if WIDTH != BLOCK:
        there = there & (tl.arange(0, BLOCK) < WIDTH)[None, :]
    return there


@triton.jit
def rows(tensor, index, limit, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """Rows of a matrix, 0 where there are none, (n, BLOCK); None for None."""
    if tensor is None:
        return None
    else:
        there = row_mask(index, limit, WIDTH, BLOCK)
        return tl.load(tensor + row_places(index, stride, UNIT, BLOCK), mask=there, other=0.0)


@triton.jit
def store_rows(tensor, index, limit, stride, found, WIDTH: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """Store the rows of ``found``, (n, BLOCK), that there are."""
    there = row_mask(index, limit, WIDTH, BLOCK)
    tl.store(tensor + row_places(index, stride, UNIT, BLOCK), found.to(tensor.dtype.element_ty), mask=there)
