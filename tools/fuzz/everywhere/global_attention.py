"""Random calls of global attention."""

from __future__ import annotations

from attn_plugins.ops import global_attention

from .. import magnitudes
from ..call import Call
from ..draw import DTYPES, Draw


def draw(source: Draw) -> Call:
    dtype = source.choice(DTYPES)
    content, rows, columns, keys = (source.chance(0.5) for _ in range(4))
    B, M = source.rarely_none(source.integer(1, 3)), source.rarely_none(source.integer(1, 4), 0.01)
    (Hq, Wq), (Hk, Wk) = source.extents(2, 130), source.extents(2, 200)
    if source.chance(0.02):
        Wq = 0
    d, dv = (source.rarely_none(source.extent(), 0.01) for _ in range(2))
    if source.chance(0.15):  # cases that the library's fused attention supports on CPUs
        content, rows, columns, keys, d = True, False, False, False, source.integer(33, 80)

    def logits(there: bool, last: int):
        if not there:
            return None
        shape = source.broadcast((B, M, Hq, Wq, last), 4)
        return source.finish(source.logits(*shape), dtype)

    key_logits = source.logits(*source.broadcast((B, M, Hk, Wk), 2)) if keys else None
    arguments = dict(
        query=source.finish(source.normal(B, M, Hq, Wq, d), dtype) if content else None,
        key=source.finish(source.normal(B, M, Hk, Wk, d), dtype) if content else None,
        value=source.finish(source.normal(B, M, Hk, Wk, dv), dtype),
        row_logits=logits(rows, Hk),
        column_logits=logits(columns, Wk),
        key_logits=None if key_logits is None else source.finish(key_logits, dtype),
        scale=source.choice((1.0, d**-0.5 if d else 1.0, 0.0, -0.7, 2)),
    )

    return Call(
        global_attention,
        arguments,
        axes=dict(
            query="B M Hq Wq d",
            key="B M Hk Wk d",
            value="B M Hk Wk dv",
            row_logits="B? M? Hq? Wq? Hk",
            column_logits="B? M? Hq? Wq? Wk",
            key_logits="B? M? Hk Wk",
        ),
        options=dict(scale="number"),
        given=lambda names: "value" in names and ("query" in names) == ("key" in names),
        fits=lambda sizes: sizes["Hk"] * sizes["Wk"] > 0,
        magnitude=lambda grad: magnitudes.of_attention(arguments, grad),
    )
