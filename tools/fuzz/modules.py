"""Random options and inputs of every public module: one function a class, by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from attn_plugins import modules
from attn_plugins.modules.captioning.entangled_attention import Activation, Entangled
from attn_plugins.modules.captioning.eta_transformer import Fusion
from attn_plugins.modules.maps.non_local_block import Mode
from attn_plugins.modules.sequences.alignment_attention import AlignmentScore
from attn_plugins.modules.sequences.bilateral_1d import SequenceSmoothing
from attn_plugins.modules.tokens.space_time_attention import Pattern
from attn_plugins.terms.nonlocal_position import Outside, Smoothing

from .draw import Draw

ATTENTION_TYPES = tuple(f"{bits:04b}" for bits in range(16))


@dataclass
class Made:
    """Options of a module, and arguments of its call, as float64 on the CPU before :meth:`Draw.finish`."""

    options: dict[str, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def one(draw: Draw, kind: Any) -> str:
    """Draw one of the strings of a ``Literal``."""
    return draw.choice(get_args(kind))


def odd(draw: Draw, largest: int = 7) -> int:
    return 2 * draw.integer(0, largest // 2) + 1


def odds(draw: Draw, largest: int = 7) -> Any:
    """Draw an odd kernel, as an int or for rows and columns."""
    return draw.short((odd(draw, largest), odd(draw, largest)))


def batch(draw: Draw) -> int:
    return draw.rarely_none(draw.integer(1, 3), 0.04)


def size(draw: Draw, axes: int = 2, product: int = 150) -> tuple[int, ...]:
    return draw.extents(axes, product)


def heads(draw: Draw, width: int = 6) -> dict[str, int]:
    num_heads = draw.integer(1, 4)
    return dict(embed_dim=num_heads * draw.integer(1, width), num_heads=num_heads)


def dropout(draw: Draw) -> float:
    return draw.choice((0.0, 0.0, 0.3))


def mask(draw: Draw, batch: int, length: int) -> Tensor | None:
    """Draw a padding mask (batch, length); the first position stays."""
    if draw.chance(0.4):
        return None
    padding = torch.rand(batch, length, generator=draw.generator) < draw.choice((0.1, 0.6))
    padding[:, 0] = False
    return padding


def map_of(draw: Draw, channels: int, axes: int = 2) -> Tensor:
    return draw.normal(batch(draw), channels, *size(draw, axes))


def modality(draw: Draw, batch: int, channels: int) -> modules.Modality:
    length = draw.extent(20)
    return modules.Modality(draw.normal(batch, length, channels), mask(draw, batch, length))


def sequence(draw: Draw, options: dict[str, Any]) -> Made:
    """Add a sequence with a padding mask to options with ``embed_dim``."""
    n, length = batch(draw), draw.extent(40)
    x = draw.normal(n, length, options["embed_dim"])
    return Made(options, (x,), dict(key_padding_mask=mask(draw, n, length)))


def sources(draw: Draw, options: dict[str, Any], n: int) -> dict[str, modules.Modality]:
    return {name: modality(draw, n, options["embed_dim"]) for name in options["sources"]}


def outside(draw: Draw, smoothing: str) -> str:
    """Draw what logits are outside of a window; z-scores need numbers there."""
    return draw.choice([name for name in get_args(Outside) if name != "-inf" or smoothing != "zscore"])


def names(draw: Draw) -> tuple[str, ...]:
    return draw.choice((("visual",), ("semantic",), ("visual", "semantic")))


# --- maps -------------------------------------------------------------------------------------------------------------


def augmented(draw: Draw) -> Made:
    num_heads = draw.integer(1, 3)
    dv = num_heads * draw.integer(0, 3)
    position = draw.choice(("relative", "none", "sine", "coordconv"))
    x = map_of(draw, 4 * draw.integer(1, 2))
    stride, pool = draw.integer(1, 2), draw.chance(0.3)
    near = tuple(max(1, extent + draw.integer(-1, 1)) for extent in x.shape[2:])
    options = dict(
        in_channels=x.shape[1], out_channels=max(1, dv + draw.integer(0, 4)), kernel_size=odds(draw, 5),
        dk=num_heads * draw.integer(1, 4), dv=dv, num_heads=num_heads, stride=stride, position=position,
        input_size=near if position == "relative" else None, pool=pool,
    )  # fmt: skip
    return Made(options, (x,))


def bilateral_map(draw: Draw) -> Made:
    x, smoothing = map_of(draw, 4 * draw.integer(1, 4)), one(draw, Smoothing)
    options = dict(in_channels=x.shape[1], reduction=draw.choice((1, 2, 4)), kernel_size=odds(draw),
                   outside=outside(draw, smoothing), smoothing=smoothing)  # fmt: skip
    return Made(options, (x,))


def positions(draw: Draw, x: Tensor) -> dict[str, Any]:
    """Draw the options of relative tables, for a size near that of ``x``."""
    if draw.chance(0.5):
        return {}
    near = tuple(max(1, extent + draw.integer(-1, 1)) for extent in x.shape[2:])
    return dict(position="relative", input_size=near)


def criss_cross(draw: Draw) -> Made:
    x = map_of(draw, 4 * draw.integer(1, 4))
    options = dict(in_channels=x.shape[1], reduction=draw.choice((1, 2, 8)), scale=draw.choice((1.0, 0.5)))
    return Made({**options, **positions(draw, x)}, (x,))


def deformable_conv(draw: Draw, axes: int = 2, causal: bool = False) -> Made:
    groups, offset_groups = draw.choice(((1, 1), (1, 2), (2, 1), (2, 2)))
    x = map_of(draw, 2 * draw.integer(1, 3), axes)
    kernel, dilation = draw.integer(1, 3), draw.integer(1, 2)
    options = dict(
        in_channels=x.shape[1], out_channels=2 * draw.integer(1, 3), kernel_size=kernel, dilation=dilation,
        groups=groups, offset_groups=offset_groups, bias=draw.chance(0.5), modulated=draw.chance(0.5),
        offset_scale=draw.choice((1.0, 0.3)),
    )  # fmt: skip
    if not causal:
        options |= dict(stride=draw.integer(1, 2), padding=dilation * (kernel - 1))
    return Made(options, (x,))


def dynamic_conv_2d(draw: Draw) -> Made:
    groups = draw.integer(1, 3)
    x = map_of(draw, groups * draw.integer(1, 4))
    options = dict(in_channels=x.shape[1], kernel_size=odds(draw), num_groups=groups,
                   dilation=draw.integer(1, 2), bias=draw.chance(0.5), residual=draw.chance(0.5))  # fmt: skip
    return Made(options, (x,))


def generalized(draw: Draw) -> Made:
    num_heads, kind = draw.integer(1, 3), draw.choice(ATTENTION_TYPES)
    x = map_of(draw, num_heads * 4 * draw.integer(1, 2))
    options = dict(
        in_channels=x.shape[1], num_heads=num_heads, attention_type=kind,
        spatial_range=draw.choice((-1, -1, 1, 3, 5)), scale=draw.choice((1.0, 0.5)),
    )  # fmt: skip
    if options["spatial_range"] == -1:
        options |= dict(q_stride=draw.integer(1, 2), kv_stride=draw.integer(1, 2))
    return Made(options, (x,))


def local_bilateral(draw: Draw) -> Made:
    num_heads = draw.integer(1, 2)
    x = map_of(draw, num_heads * draw.integer(1, 4))
    content, geometric = draw.choice(((True, True), (True, False), (False, True)))
    options = dict(
        in_channels=x.shape[1], out_channels=num_heads * draw.integer(1, 4), kernel_size=draw.choice((1, 3, 5)),
        num_heads=num_heads, content=content, geometric=geometric, stride=draw.integer(1, 2),
        dilation=draw.integer(1, 2), bias=draw.chance(0.5), activation=draw.choice(("none", "relu")),
    )  # fmt: skip
    if content:
        options |= dict(iterations=draw.integer(1, 3))
    return Made(options, (x,))


def non_local(draw: Draw, axes: int) -> Made:
    x = draw.normal(batch(draw), 4 * draw.integer(1, 3), *size(draw, axes, 80))
    options = dict(
        in_channels=x.shape[1], reduction=draw.choice((1, 2, 4)), mode=one(draw, Mode),
        use_scale=draw.chance(0.5), sub_sample=draw.chance(0.3) and min(x.shape[2:]) > 1,
        norm_layer=draw.choice((None, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[axes - 1])),
    )  # fmt: skip
    if axes == 2 and options["mode"] in ("embedded_gaussian",) and not options["sub_sample"]:
        options |= positions(draw, x)
    return Made(options, (x,))


# --- tokens -----------------------------------------------------------------------------------------------------------


def multi_scale(draw: Draw) -> Made:
    num_heads, levels, queries, n = draw.integer(1, 3), draw.integer(1, 3), draw.extent(20), batch(draw)
    shapes = [size(draw, 2, 40) for _ in range(levels)]
    width = num_heads * draw.integer(1, 6)
    first = draw.chance(0.5)
    order = (lambda tokens: (n, tokens, width)) if first else (lambda tokens: (tokens, n, width))
    points = torch.rand(n, queries, levels, draw.choice((2, 4)), generator=draw.generator, dtype=torch.float64)
    total = sum(h * w for h, w in shapes)
    options = dict(embed_dims=width, num_heads=num_heads, num_levels=levels, num_points=draw.integer(1, 4),
                   dropout=dropout(draw), batch_first=first, key_saliency=draw.chance(0.3))  # fmt: skip
    return Made(
        options, (draw.normal(*order(queries)),),
        dict(value=draw.normal(*order(total)), reference_points=points,
             spatial_shapes=draw.choice((tuple(shapes), torch.tensor(shapes))), key_padding_mask=mask(draw, n, total)),
    )  # fmt: skip


def space_time(draw: Draw) -> Made:
    options = {**heads(draw), "pattern": one(draw, Pattern), "dropout": dropout(draw)}
    frames, rows, columns = draw.integer(1, 4), 2 * draw.integer(1, 2), 2 * draw.integer(1, 3)
    prefix = draw.integer(0, 1)
    if options["pattern"] == "axial" and draw.chance(0.5):
        options["norm_layer"] = nn.LayerNorm
    x = draw.normal(batch(draw), prefix + frames * rows * columns, options["embed_dim"])
    return Made(options, (x, (frames, rows, columns), prefix))


def spatial(draw: Draw) -> Made:
    width = heads(draw, 2)
    options: dict[str, Any] = dict(embed_dim=4 * width["embed_dim"], num_heads=width["num_heads"])
    options |= dict(attention_type=draw.choice(ATTENTION_TYPES), dropout=dropout(draw), bias=draw.chance(0.5))
    if draw.chance(0.3):
        smoothing = one(draw, Smoothing)
        options |= dict(kernel_size=odd(draw, 5), outside=outside(draw, smoothing), smoothing=smoothing)
    elif draw.chance(0.3):
        options |= dict(spatial_range=odd(draw, 5))
    n, grid, prefix = batch(draw), size(draw, 2, 60), draw.integer(0, 2)
    tokens = prefix + grid[0] * grid[1]
    x = draw.normal(n, tokens, options["embed_dim"])
    return Made(options, (x,), dict(grid=grid, prefix_tokens=prefix, key_padding_mask=mask(draw, n, tokens)))


def windows(draw: Draw) -> Made:
    window = odd(draw, 5) if draw.chance(0.5) else draw.integer(1, 4)
    version = draw.choice(("v1", "v2"))
    position = "table" if version == "v2" else draw.choice(("table", "relative", "bilateral", "none"))
    width = heads(draw)
    if position == "relative":  # sines and cosines in pairs
        width["embed_dim"] *= 2
    options: dict[str, Any] = dict(
        **width, window_size=window, version=version, position=position, dropout=dropout(draw)
    )
    if window > 1:
        options |= dict(shift_size=draw.integer(0, window - 1))
    return Made(options, (draw.normal(batch(draw), *size(draw, 2, 60), width["embed_dim"]),))


# --- sequences --------------------------------------------------------------------------------------------------------


def bilateral_sequence(draw: Draw) -> Made:
    causal, smoothing = draw.chance(0.4), one(draw, SequenceSmoothing)
    return sequence(draw, dict(
        **heads(draw), kernel_size=draw.integer(1, 9) if causal else odd(draw, 9), outside=outside(draw, smoothing),
        smoothing=smoothing, causal=causal, dropout=dropout(draw), bias=draw.chance(0.5),
    ))  # fmt: skip


def dynamic_conv_1d(draw: Draw) -> Made:
    groups, causal = draw.integer(1, 3), draw.chance(0.4)
    n, length = batch(draw), draw.extent(40)
    x = draw.normal(n, groups * draw.integer(1, 4), length)
    options = dict(in_channels=x.shape[1], kernel_size=draw.integer(1, 9) if causal else odd(draw, 9),
                   num_groups=groups, causal=causal, bias=draw.chance(0.5))  # fmt: skip
    return Made(options, (x,), dict(key_padding_mask=mask(draw, n, length)))


def multihead(draw: Draw) -> Made:
    return sequence(draw, dict(**heads(draw), dropout=dropout(draw), causal=draw.chance(0.4)))


def multihead_spatial(draw: Draw) -> Made:
    width = heads(draw, 3)
    return sequence(draw, dict(
        embed_dim=2 * width["embed_dim"], num_heads=width["num_heads"], attention_type=draw.choice(ATTENTION_TYPES),
        attention_range=draw.choice((-1, 1, 3, 7)), causal=draw.chance(0.4), dropout=dropout(draw),
        bias=draw.chance(0.5), scale=draw.choice((1.0, 0.5)),
    ))  # fmt: skip


def relative(draw: Draw) -> Made:
    return sequence(draw, dict(
        **heads(draw), max_distance=draw.integer(1, 20), values=draw.chance(0.5), per_head=draw.chance(0.5),
        causal=draw.chance(0.4), dropout=dropout(draw), bias=draw.chance(0.5),
    ))  # fmt: skip


# --- captioning -------------------------------------------------------------------------------------------------------


def alignment(draw: Draw) -> Made:
    score, n = one(draw, AlignmentScore), batch(draw)
    width, other = draw.integer(1, 8), draw.integer(1, 8)
    other = width if score in ("cosine", "dot", "scaled-dot") else other
    queries, keys = draw.extent(20), draw.extent(20)
    options = dict(score=score, query_channels=width, source_channels=other)
    return Made(options, (draw.normal(n, queries, width), draw.normal(n, keys, other), mask(draw, n, keys)))


def attended_lstm(draw: Draw) -> Made:
    n = batch(draw)
    options: dict[str, Any] = dict(embed_dim=draw.integer(1, 8), sources=names(draw), num_layers=draw.integer(1, 2),
                                   dropout=dropout(draw))  # fmt: skip
    return Made(options, (draw.normal(n, draw.integer(1, 5), options["embed_dim"]), sources(draw, options, n)))


def dual_way(draw: Draw) -> Made:
    n, visual_dim = batch(draw), draw.integer(1, 8)
    options = dict(
        visual_dim=visual_dim, **heads(draw), num_layers=1, ffn_dim=draw.integer(1, 8), dropout=dropout(draw)
    )
    regions, padding = modality(draw, n, visual_dim)
    attributes, absent = modality(draw, n, options["embed_dim"])
    return Made(options, (regions, attributes, padding, absent))


def entangled(draw: Draw) -> Made:
    n, options = batch(draw), dict(**heads(draw), dropout=dropout(draw))
    x = draw.normal(n, draw.extent(20), options["embed_dim"])
    return Made(options, (x, modality(draw, n, x.shape[2]), modality(draw, n, x.shape[2])))


def controller(draw: Draw) -> Made:
    shape = (batch(draw), draw.extent(20), draw.integer(1, 16))
    pathways = Entangled(*(draw.normal(*shape) for _ in range(4)))
    return Made(dict(embed_dim=shape[2], activation=one(draw, Activation)), (pathways, draw.normal(*shape)))


def gated_conv(draw: Draw) -> Made:
    n, length = batch(draw), draw.integer(1, 9)
    options: dict[str, Any] = dict(embed_dim=draw.integer(1, 8), kernel_size=draw.integer(1, 5), sources=names(draw),
                                   dropout=dropout(draw))  # fmt: skip
    x, words = (draw.normal(n, length, options["embed_dim"]) for _ in range(2))
    return Made(options, (x, words, sources(draw, options, n)))


def decoder_block(draw: Draw) -> Made:
    n, length = batch(draw), draw.extent(20)
    options = dict(**heads(draw), ffn_dim=draw.integer(1, 8), dropout=dropout(draw), fusion=one(draw, Fusion))
    x = draw.normal(n, length, options["embed_dim"])
    both = (modality(draw, n, x.shape[2]), modality(draw, n, x.shape[2]))
    return Made(options, (x, *both, mask(draw, n, length)))


def show_attend_tell(draw: Draw) -> Made:
    n, width, regions = batch(draw), draw.integer(1, 8), draw.extent(20)
    options = dict(word_dim=draw.integer(1, 8), source_dim=width, hidden_dim=draw.integer(1, 8), dropout=dropout(draw))
    words = draw.normal(n, draw.integer(1, 5), options["word_dim"])
    return Made(options, (words, draw.normal(n, regions, width), mask(draw, n, regions)))


MODULES: dict[str, Callable[[Draw], Made]] = {
    "AAConv2d": augmented,
    "AlignmentAttention": alignment,
    "AttendedLSTM": attended_lstm,
    "BilateralCrissCross2d": bilateral_map,
    "BilateralNonLocal2d": bilateral_map,
    "BilateralSelfAttention": bilateral_sequence,
    "CausalDeformableConv1d": partial(deformable_conv, axes=1, causal=True),
    "CrissCrossAttention2d": criss_cross,
    "DeformableConv1d": partial(deformable_conv, axes=1),
    "DeformableConv2d": deformable_conv,
    "DualWayEncoder": dual_way,
    "DynamicConv1d": dynamic_conv_1d,
    "DynamicConv2d": dynamic_conv_2d,
    "EntangledAttention": entangled,
    "GatedBilateralController": controller,
    "GatedConvBlock": gated_conv,
    "GeneralizedAttention2d": generalized,
    "LocalBilateralConv2d": local_bilateral,
    "MultiScaleDeformableAttention": multi_scale,
    "MultiheadAttention": multihead,
    "MultiheadSpatialAttention": multihead_spatial,
    "MultimodalDecoderBlock": decoder_block,
    "NonLocal1d": partial(non_local, axes=1),
    "NonLocal2d": partial(non_local, axes=2),
    "NonLocal3d": partial(non_local, axes=3),
    "RelativeSelfAttention": relative,
    "ShowAttendTell": show_attend_tell,
    "SpaceTimeSelfAttention": space_time,
    "SpatialSelfAttention": spatial,
    "WindowSelfAttention": windows,
}
