"""Random calls of sequence attention."""

from __future__ import annotations

import torch

from attn_plugins.ops import sequence_attention

from .. import magnitudes
from ..call import Call
from ..draw import DTYPES, Draw


def draw(source: Draw) -> Call:
    dtype = source.choice(DTYPES)
    content, band, position = (source.chance(0.6) for _ in range(3))
    if not (content or band or position):
        band = True
    causal = source.chance(0.4)
    B, M = source.rarely_none(source.integer(1, 3)), source.rarely_none(source.integer(1, 4), 0.01)
    T, S = source.rarely_none(source.extent(130)), source.extent(130)
    if source.chance(0.1):
        S = source.integer(100, 200)
    start = None if source.chance(0.5) else source.choice((0, source.integer(0, 5), source.integer(0, 2 * S)))
    if causal and start is None and T > S:
        start = 0
    d, dv = (source.rarely_none(source.extent(), 0.01) for _ in range(2))
    K = source.extent(70)
    if not causal or source.chance(0.3):
        K = K // 2 * 2 + 1
    outside = None
    if band:
        outside = source.choice((None, "tensor", -1.5, 2, float("-inf"), float("-inf")))
    if outside == "tensor":
        outside = source.finish(source.logits(*source.broadcast((B, M, T), 3)), dtype)
    mask = None
    if source.chance(0.3):
        padded = torch.rand((B, S), generator=source.generator) < source.choice((0.2, 0.9))
        mask = source.laid_out(padded.to(source.device))

    segments = None
    if source.chance(0.2) and (start or 0) + T <= S and not (causal and start is None and T > S):
        start = source.integer(0, S - T)
        rows = 1 if source.chance(0.5) else B
        if rows:
            ids = torch.randint(source.integer(1, 4), (rows, S), generator=source.generator, dtype=torch.int32)
            segments = source.laid_out(ids.to(source.device))

    def logits(there: bool, last: int):
        return source.finish(source.logits(*source.broadcast((B, M, T, last), 3)), dtype) if there else None

    arguments = dict(
        query=source.finish(source.normal(B, M, T, d), dtype) if content else None,
        key=source.finish(source.normal(B, M, S, d), dtype) if content else None,
        value=source.finish(source.normal(B, M, S, dv), dtype),
        band_logits=logits(band, K),
        outside_logits=outside,
        position_logits=logits(position, S),
        causal=causal,
        key_padding_mask=mask,
        scale=source.choice((1.0, d**-0.5 if d else 1.0, 0.0, -0.7, 2)),
        start=start,
        segment_ids=segments,
    )

    def fits(sizes):
        if sizes["S"] == 0 or sizes.get("K", 1) == 0 or (not causal and sizes.get("K", 1) % 2 == 0):
            return False
        if segments is not None:
            rows = sizes.get("N", 1)
            if rows == 0 or sizes["B"] % rows or (start or 0) + sizes.get("T", 1) > sizes["S"]:
                return False
        return not causal or start is not None or sizes.get("T", 1) <= sizes["S"]

    options = dict(causal="bool", scale="number", start="ints>=0?")
    if isinstance(outside, (int, float)):
        options["outside_logits"] = "number?"
    return Call(
        sequence_attention,
        arguments,
        axes=dict(
            query="B M T d",
            key="B M S d",
            value="B M S dv",
            band_logits="B? M? T? K",
            outside_logits="B? M? T?",
            position_logits="B? M? T? S",
            key_padding_mask="B S",
            segment_ids="N S",
        ),
        options=options,
        given=lambda names: (
            "value" in names
            and ("query" in names) == ("key" in names)
            and bool(names & {"query", "band_logits", "position_logits"})
            and (outside is None or "band_logits" in names)
        ),
        fits=fits,
        magnitude=lambda grad: magnitudes.of_attention(arguments, grad),
    )
