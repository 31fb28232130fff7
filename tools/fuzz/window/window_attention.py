"""Random calls of window attention."""

from __future__ import annotations

import math

from attn_plugins.ops import window_attention

from .. import magnitudes
from ..call import Call
from ..draw import DTYPES, Draw


def draw(source: Draw) -> Call:
    axes = source.integer(1, 2)
    dtype = source.choice(DTYPES)
    terms = source.choice(("content", "position", "both"))
    kernel = source.extents(axes, 31)
    if terms != "content" and source.chance(0.25):  # wide enough for the kernel with only position logits
        kernel = (*kernel[:-1], source.integer(7, 13))
    centred = source.chance(0.5)
    if centred:
        kernel = tuple(size // 2 * 2 + 1 for size in kernel)
    dilation = tuple(source.integer(2, 12) if source.chance(0.3) else 1 for _ in kernel)
    stride = tuple(source.integer(2, 5) if source.chance(0.3) else 1 for _ in kernel)
    padding = None if centred else tuple(source.integer(0, size * step) for size, step in zip(kernel, dilation))
    B, M = source.rarely_none(source.integer(1, 3)), source.rarely_none(source.integer(1, 4), 0.01)
    size = source.extents(axes, 400)
    grid = tuple(-(-n // step) for n, step in zip(size, stride)) if source.chance(0.7) else source.extents(axes, 400)
    if source.chance(0.02):
        grid = (*grid[:-1], 0)
    d, dv = (source.rarely_none(source.extent(), 0.01) for _ in range(2))
    taps = math.prod(kernel)
    position = None
    if terms != "content":
        shape = source.broadcast((B, M, *grid, taps), 2)
        position = source.finish(source.logits(*shape), dtype)
    content = terms != "position"
    arguments = dict(
        query=source.finish(source.normal(B, M, *grid, d), dtype) if content else None,
        key=source.finish(source.normal(B, M, *size, d), dtype) if content else None,
        value=source.finish(source.normal(B, M, *size, dv), dtype),
        position_logits=position,
        kernel_size=source.short(kernel),
        dilation=source.short(dilation),
        scale=source.choice((1.0, d**-0.5 if d else 1.0, 0.0, -0.7, 2)),
        stride=source.short(stride),
        padding=padding if padding is None else source.short(padding),
        border=source.choice(("exclude", "zero")),
    )
    queries, keys = ("Tq", "T") if axes == 1 else ("Hq Wq", "H W")

    def fits(sizes):
        has_keys = 0 not in [sizes[axis] for axis in keys.split()]
        return has_keys and sizes.get("taps", taps) == taps

    return Call(
        window_attention,
        arguments,
        axes=dict(
            query=f"B M {queries} d",
            key=f"B M {keys} d",
            value=f"B M {keys} dv",
            position_logits=f"B? M? {queries} taps",
        ),
        options=dict(
            kernel_size="ints>=1",
            dilation="ints>=1",
            scale="number",
            stride="ints>=1",
            padding="ints>=0?",
            border="choice",
        ),
        given=lambda names: (
            "value" in names and ("query" in names) == ("key" in names) and bool(names & {"query", "position_logits"})
        ),
        fits=fits,
        magnitude=lambda grad: magnitudes.of_attention(arguments, grad),
    )
