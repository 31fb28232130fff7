"""Random calls of the four attention operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_plugins.ops import criss_cross_attention, global_attention, sequence_attention, window_attention

from .call import Call, allow, largest
from .draw import DTYPES, Draw

TERMS = ("content", "position", "both")


def _sizes(source: Draw) -> tuple[int, int]:
    """Draw batch and heads."""
    return source.rarely_none(source.integer(1, 3)), source.rarely_none(source.integer(1, 4), 0.01)


def _widths(source: Draw) -> tuple[int, int]:
    """Draw the widths of keys and values."""
    return source.rarely_none(source.extent(), 0.01), source.rarely_none(source.extent(), 0.01)


def _heads(
    source: Draw, dtype: torch.dtype, content: bool, queries: Sequence[int], keys: Sequence[int], d: int, dv: int
) -> dict[str, Tensor | None]:
    """Draw query and key (None without ``content``) and value."""
    query = key = None
    if content:
        query = source.finish(source.normal(*queries, d, scale=source.choice((1, 1, 1, 30, 1000))), dtype)
        key = source.finish(source.normal(*keys, d), dtype)
    return dict(query=query, key=key, value=source.finish(source.normal(*keys, dv), dtype))


def _scale(source: Draw, d: int) -> float:
    return source.choice((1.0, d**-0.5 if d else 1.0, 0.0, -0.7, 2))


def _call(
    function: Callable[..., Tensor], arguments: dict[str, Any], axes: dict[str, str], options: dict[str, str],
    fits: Callable = allow, needs: str | None = None, band: bool = False,
) -> Call:  # fmt: skip
    """Return a call: ``needs`` names logits of which one is given where there is no content."""

    def given(names: set[str]) -> bool:
        enough = needs is None or bool(names & {"query", *needs.split()})
        paired = ("query" in names) == ("key" in names)
        return "value" in names and paired and enough and (not band or "band_logits" in names)

    return Call(function, arguments, axes, options, given, lambda grad: _magnitude(arguments, grad), fits)


def _magnitude(arguments: dict[str, Any], grad: Tensor) -> dict[str, float]:
    """Return the magnitudes of an attention's output and gradients, and the condition of its weights.

    The relative error of a weight is that of its logits: rounding a logit of 50 changes it by 50 roundings.
    """
    query, key, value, scale = (arguments[name] for name in ("query", "key", "value", "scale"))
    terms = [name for name in arguments if name.endswith("_logits")]
    content = 0.0 if query is None else abs(scale) * largest(query) * largest(key) * query.shape[-1] ** 0.5
    slope = largest(grad) * largest(value) * max(1, value.shape[-1]) ** 0.5
    return {
        "condition": 1 + (content + sum(largest(arguments[name]) for name in terms)) / 8,
        "output": largest(value),
        "value": largest(grad),
        "query": abs(scale) * slope * largest(key),
        "key": abs(scale) * slope * largest(query),
        **dict.fromkeys(terms, slope),
    }


def window(source: Draw) -> Call:
    axes, dtype, terms = source.integer(1, 2), source.choice(DTYPES), source.choice(TERMS)
    kernel = source.extents(axes, 31)
    if terms != "content" and source.chance(0.25):  # wide enough for the kernel with only position logits
        kernel = (*kernel[:-1], source.integer(7, 13))
    centred = source.chance(0.5)
    if centred:
        kernel = tuple(size // 2 * 2 + 1 for size in kernel)
    dilation = tuple(source.integer(2, 12) if source.chance(0.3) else 1 for _ in kernel)
    stride = tuple(source.integer(2, 5) if source.chance(0.3) else 1 for _ in kernel)
    inside = source.chance(0.25)
    padding = (
        None if centred or inside else tuple(source.integer(0, size * step) for size, step in zip(kernel, dilation))
    )
    B, M = _sizes(source)
    size = source.extents(axes, 400)
    grid = tuple(-(-n // step) for n, step in zip(size, stride)) if source.chance(0.7) else source.extents(axes, 400)
    if source.chance(0.02):
        grid = (*grid[:-1], 0)
    if inside:
        stride, dilation = (1,) * axes, tuple(min(step, 3) for step in dilation)
        grid = size = tuple(max(n, k * step) for n, k, step in zip(size, kernel, dilation))
    d, dv = _widths(source)
    taps = math.prod(kernel)
    position = None if terms == "content" else source.logits((B, M, *grid, taps), 2, dtype)
    arguments = dict(
        **_heads(source, dtype, terms != "position", (B, M, *grid), (B, M, *size), d, dv),
        position_logits=position,
        kernel_size=source.short(kernel),
        dilation=source.short(dilation),
        scale=_scale(source, d),
        stride=source.short(stride),
        padding=padding if padding is None else source.short(padding),
        border="inside" if inside else source.choice(("exclude", "zero")),
    )
    queries, keys = ("Tq", "T") if axes == 1 else ("Hq Wq", "H W")
    queries = keys if inside else queries
    named = dict(query=f"B M {queries} d", key=f"B M {keys} d", value=f"B M {keys} dv")
    options = dict.fromkeys(("kernel_size", "dilation", "stride"), "ints>=1")
    return _call(
        window_attention,
        arguments,
        dict(**named, position_logits=f"B? M? {queries} taps"),
        {**options, "scale": "number", "padding": "ints>=0?", "border": "choice"},
        lambda sizes: 0 not in [sizes[axis] for axis in keys.split()] and sizes.get("taps", taps) == taps
        and not (inside and any(sizes[axis] < k * step for axis, k, step in zip(keys.split(), kernel, dilation))),
        "position_logits",
    )  # fmt: skip


def criss_cross(source: Draw) -> Call:
    dtype, terms = source.choice(DTYPES), source.choice(TERMS)
    B, M = _sizes(source)
    H, W = source.extents(2, 400)
    d, dv = _widths(source)
    position = None if terms == "content" else source.logits((B, M, H, W, H + W), 2, dtype)
    heads = _heads(source, dtype, terms != "position", (B, M, H, W), (B, M, H, W), d, dv)
    return _call(
        criss_cross_attention,
        dict(**heads, position_logits=position, scale=_scale(source, d)),
        dict(query="B M H W d", key="B M H W d", value="B M H W dv", position_logits="B? M? H W both"),
        dict(scale="number"),
        lambda sizes: sizes["H"] * sizes["W"] > 0 and sizes.get("both", H + W) == sizes["H"] + sizes["W"],
        "position_logits",
    )


def everywhere(source: Draw) -> Call:
    dtype = source.choice(DTYPES)
    content, rows, columns, keys = (source.chance(0.5) for _ in range(4))
    B, M = _sizes(source)
    (Hq, Wq), (Hk, Wk) = source.extents(2, 130), source.extents(2, 200)
    if source.chance(0.02):
        Wq = 0
    d, dv = _widths(source)
    if source.chance(0.15):  # cases that the library's fused attention supports on CPUs
        content, rows, columns, keys, d = True, False, False, False, source.integer(33, 80)
    arguments = dict(
        **_heads(source, dtype, content, (B, M, Hq, Wq), (B, M, Hk, Wk), d, dv),
        row_logits=source.logits((B, M, Hq, Wq, Hk), 4, dtype) if rows else None,
        column_logits=source.logits((B, M, Hq, Wq, Wk), 4, dtype) if columns else None,
        key_logits=source.logits((B, M, Hk, Wk), 2, dtype) if keys else None,
        scale=_scale(source, d),
    )
    axes = dict(query="B M Hq Wq d", key="B M Hk Wk d", value="B M Hk Wk dv", row_logits="B? M? Hq? Wq? Hk")
    axes |= dict(column_logits="B? M? Hq? Wq? Wk", key_logits="B? M? Hk Wk")
    return _call(global_attention, arguments, axes, dict(scale="number"), lambda sizes: sizes["Hk"] * sizes["Wk"] > 0)


def sequence(source: Draw) -> Call:
    dtype = source.choice(DTYPES)
    content, band, position = (source.chance(0.6) for _ in range(3))
    band |= not (content or position)
    causal = source.chance(0.4)
    B, M = _sizes(source)
    T, S = source.rarely_none(source.extent(130)), source.extent(130)
    if source.chance(0.1):
        S = source.integer(100, 200)
    start = None if source.chance(0.5) else source.choice((0, source.integer(0, 5), source.integer(0, 2 * S)))
    if causal and start is None and T > S:
        start = 0
    d, dv = _widths(source)
    K = source.extent(70)
    if not causal or source.chance(0.3):
        K = K // 2 * 2 + 1
    outside = source.choice((None, "tensor", -1.5, 2, float("-inf"), float("-inf"))) if band else None
    if outside == "tensor":
        outside = source.logits((B, M, T), 3, dtype)
    mask = segments = None
    if source.chance(0.3):
        padded = source.uniform(B, S, dtype=torch.float32)
        mask = source.laid_out((padded < source.choice((0.2, 0.9))).to(source.device))
    queries = max(T, 1)  # logits without an axis of queries are of one
    if source.chance(0.2) and (start or 0) + queries <= S and not (causal and start is None and T > S):
        start = source.integer(0, S - queries)
        if rows := 1 if source.chance(0.5) else B:
            ids = torch.randint(source.integer(1, 4), (rows, S), generator=source.generator, dtype=torch.int32)
            segments = source.laid_out(ids.to(source.device))
    arguments = dict(
        **_heads(source, dtype, content, (B, M, T), (B, M, S), d, dv),
        band_logits=source.logits((B, M, T, K), 3, dtype) if band else None,
        outside_logits=outside,
        position_logits=source.logits((B, M, T, S), 3, dtype) if position else None,
        causal=causal,
        key_padding_mask=mask,
        scale=_scale(source, d),
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

    axes = dict(query="B M T d", key="B M S d", value="B M S dv", band_logits="B? M? T? K", outside_logits="B? M? T?")
    axes |= dict(position_logits="B? M? T? S", key_padding_mask="B S", segment_ids="N S")
    options = dict(causal="bool", scale="number", start="ints>=0?")
    if isinstance(outside, (int, float)):
        options["outside_logits"] = "number?"
    needs = "band_logits position_logits"
    return _call(sequence_attention, arguments, axes, options, fits, needs, band=outside is not None)
