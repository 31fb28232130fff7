"""Computations shared by several Triton kernels; see :mod:`.triton_launch`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply(a, b, total, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """Return ``total + a @ b`` in float32, whatever the operands' dtype. ``UPCAST`` is for the interpreter."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def matrix_of(tensor, b, m, stride_b, stride_m, UNIT: tl.constexpr):
    """Return a pointer to the rows of batch entry b, head m; None for None. Strides come divided by ``UNIT``."""
    if tensor is not None:
        return tensor + (b.to(tl.int64) * stride_b + m.to(tl.int64) * stride_m) * UNIT


@triton.jit
def row_places(stride, ROWS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """Offsets of ROWS rows of BLOCK columns. ``stride`` comes divided by ``UNIT``, which aligns the rows."""
    return tl.arange(0, ROWS)[:, None] * stride * UNIT + tl.arange(0, BLOCK)[None, :]


@triton.jit
def row_mask(first, limit, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return which rows from ``first`` on are below ``limit``, and columns below ``WIDTH``: (ROWS, BLOCK)."""
    there = (first + tl.arange(0, ROWS) < limit)[:, None]
    if WIDTH != BLOCK:
        there = there & (tl.arange(0, BLOCK) < WIDTH)[None, :]
    return there


@triton.jit
def rows(
    tensor, first, limit, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr
):
    """Load ROWS rows of a matrix from ``first`` on, 0 where there are none: (ROWS, BLOCK); None for None.

    Offsets within them are of 32 bits: ``stride * UNIT * ROWS`` must be below 2**31.
    """
    if tensor is not None:
        there = row_mask(first, limit, ROWS, WIDTH, BLOCK)
        begin = tensor + stride.to(tl.int64) * UNIT * first
        return tl.load(begin + row_places(stride, ROWS, BLOCK, UNIT), mask=there, other=0.0)


@triton.jit
def store_rows(
    tensor, first, limit, stride, values,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Store the rows of ``values``, (ROWS, BLOCK), that are below ``limit``."""
    there = row_mask(first, limit, ROWS, WIDTH, BLOCK)
    begin = tensor + stride.to(tl.int64) * UNIT * first
    tl.store(begin + row_places(stride, ROWS, BLOCK, UNIT), values.to(tensor.dtype.element_ty), mask=there)


@triton.jit
def load_cells(tensor, offsets, there, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load (cells, BLOCK) numbers, 0 where a cell is not there and beyond ``WIDTH``; None for None."""
    if tensor is not None:
        width = tl.arange(0, BLOCK)
        mask = there[:, None]
        if WIDTH < BLOCK:
            mask = mask & (width < WIDTH)[None, :]
        return tl.load(tensor + offsets[:, None] + width[None, :], mask=mask, other=0.0)


@triton.jit
def store_cells(tensor, offsets, there, numbers, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store what :func:`load_cells` loads, in the tensor's dtype."""
    width = tl.arange(0, BLOCK)
    mask = there[:, None]
    if WIDTH < BLOCK:
        mask = mask & (width < WIDTH)[None, :]
    tl.store(tensor + offsets[:, None] + width[None, :], numbers.to(tensor.dtype.element_ty), mask=mask)


@triton.jit
def of_rows(tensor, first, there):
    """Load a number per row at offsets ``first``, 0 where none is ``there``; None for None."""
    if tensor is not None:
        return tl.load(tensor + first, mask=there, other=0.0)


@triton.jit
def saturated(ds_sum, ds_size):
    """Return which queries need their logit gradients computed again, with a better mean: (queries).

    The gradient of a logit is ``p * (dp - delta)``, where delta is the mean of dp and is taken from the rounded output.
    The error is negligible in most rows, but dominates where one weight is close to 1 and the gradients are close to 0.
    ``ds_sum`` is the sum of a row's gradients, 0 if delta is exact; ``ds_size`` that of their absolute values.
    """
    return tl.abs(ds_sum) > ds_size * 2.0**-6


@triton.jit
def unsettled(ds_sum, ds_size, p_sum, EXACT: tl.constexpr):
    """Return whether any of a block's queries is :func:`saturated`, by float32's measure where ``p_sum`` is not None.

    ``p_sum`` is the sum of the weights, which would be 1 if the log-sum-exp were exact; half numbers are coarser than
    that. ``EXACT`` says that gradients are stored before it is known.
    """
    if p_sum is None:
        wrong = saturated(ds_sum, ds_size)
    else:
        wrong = saturated(ds_sum * 2.0**13, ds_size)
        if EXACT:
            wrong = wrong | ((tl.abs(p_sum - 1) > 2.0**-19) & (p_sum > 0))
    return tl.max(wrong.to(tl.int32), 0) > 0
