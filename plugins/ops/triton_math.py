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
