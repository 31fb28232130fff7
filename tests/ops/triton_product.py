"""A kernel around ``multiply``, for its test."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_plugins.core.triton_math import multiply


@triton.jit
def product(a, b, result, BLOCK: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    place = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.full((BLOCK, BLOCK), 1.0, tl.float32)
    tl.store(result + place, multiply(tl.load(a + place), tl.load(b + place), total, PRECISION, UPCAST))
