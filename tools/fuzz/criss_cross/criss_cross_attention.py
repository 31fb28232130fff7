"""Random calls of criss-cross attention."""

from __future__ import annotations

from attn_plugins.ops import criss_cross_attention

from .. import magnitudes
from ..call import Call
from ..draw import DTYPES, Draw


def draw(source: Draw) -> Call:
    dtype = source.choice(DTYPES)
    terms = source.choice(("content", "position", "both"))
    content = terms != "position"
    B, M = source.rarely_none(source.integer(1, 3)), source.rarely_none(source.integer(1, 4), 0.01)
    H, W = source.extents(2, 400)
    d, dv = (source.rarely_none(source.extent(), 0.01) for _ in range(2))
    position = None
    if terms != "content":
        position = source.finish(source.logits(*source.broadcast((B, M, H, W, H + W), 2)), dtype)
    arguments = dict(
        query=source.finish(source.normal(B, M, H, W, d), dtype) if content else None,
        key=source.finish(source.normal(B, M, H, W, d), dtype) if content else None,
        value=source.finish(source.normal(B, M, H, W, dv), dtype),
        position_logits=position,
        scale=source.choice((1.0, d**-0.5 if d else 1.0, 0.0, -0.7, 2)),
    )

    return Call(
        criss_cross_attention,
        arguments,
        axes=dict(query="B M H W d", key="B M H W d", value="B M H W dv", position_logits="B? M? H W both"),
        options=dict(scale="number"),
        given=lambda names: (
            "value" in names and ("query" in names) == ("key" in names) and bool(names & {"query", "position_logits"})
        ),
        fits=lambda sizes: sizes["H"] * sizes["W"] > 0 and sizes.get("both", H + W) == sizes["H"] + sizes["W"],
        magnitude=lambda grad: magnitudes.of_attention(arguments, grad),
    )
