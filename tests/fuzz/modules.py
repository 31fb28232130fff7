"""Random options and inputs of every public module, by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from attn_plugins.modules import Modality
from attn_plugins.modules.captioning.entangled_attention import Activation, Entangled
from attn_plugins.modules.captioning.eta_transformer import Fusion
from attn_plugins.modules.maps.non_local_block import Mode
from attn_plugins.modules.sequences.alignment_attention import AlignmentScore
from attn_plugins.modules.sequences.bilateral_1d import SequenceSmoothing
from attn_plugins.modules.tokens.space_time_attention import Pattern
from attn_plugins.terms.nonlocal_position import Outside, Smoothing

from .draw import Draw as Source

KINDS = tuple(f"{bits:04b}" for bits in range(16))  # of attention, by its terms
Options = dict[str, Any]


class Made(NamedTuple):
    """Options of a module, and arguments of its call, as float64 on the CPU."""

    options: Options
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}


class Draw(Source):
    """Draws of what options and inputs have in common."""

    def one(self, literal: Any) -> str:
        return self.choice(get_args(literal))

    def odd(self, largest: int = 7) -> int:
        return 2 * self.integer(0, largest // 2) + 1

    def odds(self, largest: int = 7) -> Any:
        """Draw an odd kernel, as an int or for rows and columns."""
        return self.short((self.odd(largest), self.odd(largest)))

    def batch(self) -> int:
        return self.rarely_none(self.integer(1, 3), 0.04)

    def heads(self, width: int = 6, each: int = 1) -> Options:
        num_heads = self.integer(1, 4)
        return dict(embed_dim=each * num_heads * self.integer(1, width), num_heads=num_heads)

    def dropout(self) -> Options:
        return dict(dropout=self.choice((0.0, 0.0, 0.3)))

    def kernel(self, causal: bool) -> Options:
        """Draw a kernel along a sequence, odd if it is centred."""
        return dict(kernel_size=self.integer(1, 9) if causal else self.odd(9), causal=causal)

    def smoothing(self, literal: Any) -> Options:
        """Draw what logits are outside of a window; z-scores need numbers there."""
        smoothing = self.one(literal)
        outside = [name for name in get_args(Outside) if name != "-inf" or smoothing != "zscore"]
        return dict(outside=self.choice(outside), smoothing=smoothing)

    def names(self) -> Options:
        return dict(sources=self.choice((("visual",), ("semantic",), ("visual", "semantic"))))

    def mask(self, batch: int, length: int) -> Tensor | None:
        """Draw a padding mask (batch, length); the first position stays."""
        if self.chance(0.4):
            return None
        padding = self.below(self.choice((0.1, 0.6)), batch, length)
        padding[:, 0] = False
        return padding

    def map(self, channels: int, axes: int = 2, product: int = 150) -> Tensor:
        return self.normal(self.batch(), channels, *self.extents(axes, product))

    def modality(self, batch: int, channels: int) -> Modality:
        length = self.extent(20)
        return Modality(self.normal(batch, length, channels), self.mask(batch, length))

    def sequence(self, options: Options) -> Made:
        """Add a sequence with a padding mask to options with ``embed_dim``."""
        n, length = self.batch(), self.extent(40)
        x = self.normal(n, length, options["embed_dim"])
        return Made(options, (x,), dict(key_padding_mask=self.mask(n, length)))

    def sources(self, options: Options, n: int) -> dict[str, Modality]:
        return {name: self.modality(n, options["embed_dim"]) for name in options["sources"]}

    def near(self, x: Tensor) -> tuple[int, ...]:
        """Draw a map's size near that of ``x``."""
        return tuple(max(1, extent + self.integer(-1, 1)) for extent in x.shape[2:])

    def positions(self, x: Tensor) -> Options:
        """Draw the options of relative tables."""
        return {} if self.chance(0.5) else dict(position="relative", input_size=self.near(x))


# --- maps ---------------------------------------------------------------------------------------------------------


def augmented(draw: Draw) -> Made:
    num_heads = draw.integer(1, 3)
    dv, position = num_heads * draw.integer(0, 3), draw.choice(("relative", "none", "sine", "coordconv"))
    x = draw.map(4 * draw.integer(1, 2))
    stride, pool = draw.integer(1, 2), draw.chance(0.3)
    return Made(dict(
        in_channels=x.shape[1], out_channels=max(1, dv + draw.integer(0, 4)), kernel_size=draw.odds(5),
        dk=num_heads * draw.integer(1, 4), dv=dv, num_heads=num_heads, stride=stride, position=position,
        input_size=draw.near(x) if position == "relative" else None, pool=pool,
    ), (x,))  # fmt: skip


def bilateral_map(draw: Draw) -> Made:
    x = draw.map(4 * draw.integer(1, 4))
    options = dict(in_channels=x.shape[1], reduction=draw.choice((1, 2, 4)), kernel_size=draw.odds())
    return Made(options | draw.smoothing(Smoothing), (x,))


def criss_cross(draw: Draw) -> Made:
    x = draw.map(4 * draw.integer(1, 4))
    options = dict(in_channels=x.shape[1], reduction=draw.choice((1, 2, 8)), scale=draw.choice((1.0, 0.5)))
    return Made({**options, **draw.positions(x)}, (x,))


def deformable_conv(draw: Draw, axes: int = 2, causal: bool = False) -> Made:
    groups, offset_groups = draw.choice(((1, 1), (1, 2), (2, 1), (2, 2)))
    x = draw.map(2 * draw.integer(1, 3), axes)
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
    x = draw.map(groups * draw.integer(1, 4))
    options = dict(in_channels=x.shape[1], kernel_size=draw.odds(), num_groups=groups, dilation=draw.integer(1, 2))
    return Made(dict(**options, bias=draw.chance(0.5), residual=draw.chance(0.5)), (x,))


def generalized(draw: Draw) -> Made:
    options: Options = dict(num_heads=draw.integer(1, 3), attention_type=draw.choice(KINDS))
    x = draw.map(options["num_heads"] * 4 * draw.integer(1, 2))
    options |= dict(spatial_range=draw.choice((-1, -1, 1, 3, 5)), scale=draw.choice((1.0, 0.5)))
    if options["spatial_range"] == -1:
        options |= dict(q_stride=draw.integer(1, 2), kv_stride=draw.integer(1, 2))
    return Made(dict(in_channels=x.shape[1], **options), (x,))


def local_bilateral(draw: Draw) -> Made:
    num_heads = draw.integer(1, 2)
    x = draw.map(num_heads * draw.integer(1, 4))
    content, geometric = draw.choice(((True, True), (True, False), (False, True)))
    options = dict(
        in_channels=x.shape[1], out_channels=num_heads * draw.integer(1, 4), kernel_size=draw.choice((1, 3, 5)),
        num_heads=num_heads, content=content, geometric=geometric, stride=draw.integer(1, 2),
        dilation=draw.integer(1, 2), bias=draw.chance(0.5), activation=draw.choice(("none", "relu")),
    )  # fmt: skip
    return Made({**options, **(dict(iterations=draw.integer(1, 3)) if content else {})}, (x,))


def non_local(draw: Draw, axes: int) -> Made:
    x = draw.map(4 * draw.integer(1, 3), axes, 80)
    options = dict(
        in_channels=x.shape[1], reduction=draw.choice((1, 2, 4)), mode=draw.one(Mode),
        use_scale=draw.chance(0.5), sub_sample=draw.chance(0.3) and min(x.shape[2:]) > 1,
        norm_layer=draw.choice((None, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[axes - 1])),
    )  # fmt: skip
    if axes == 2 and options["mode"] == "embedded_gaussian" and not options["sub_sample"]:
        options |= draw.positions(x)
    return Made(options, (x,))


# --- tokens -------------------------------------------------------------------------------------------------------


def multi_scale(draw: Draw) -> Made:
    num_heads, levels, queries, n = draw.integer(1, 3), draw.integer(1, 3), draw.extent(20), draw.batch()
    shapes = [draw.extents(2, 40) for _ in range(levels)]
    width, first, total = num_heads * draw.integer(1, 6), draw.chance(0.5), sum(h * w for h, w in shapes)
    query, value = ((n, tokens, width) if first else (tokens, n, width) for tokens in (queries, total))
    points = draw.uniform(n, queries, levels, draw.choice((2, 4)))
    options = dict(embed_dims=width, num_heads=num_heads, num_levels=levels, num_points=draw.integer(1, 4),
                   **draw.dropout(), batch_first=first, key_saliency=draw.chance(0.3))  # fmt: skip
    return Made(
        options, (draw.normal(*query),),
        dict(value=draw.normal(*value), reference_points=points,
             spatial_shapes=draw.choice((tuple(shapes), torch.tensor(shapes))), key_padding_mask=draw.mask(n, total)),
    )  # fmt: skip


def space_time(draw: Draw) -> Made:
    options = {**draw.heads(), "pattern": draw.one(Pattern), **draw.dropout()}
    frames, rows, columns = draw.integer(1, 4), 2 * draw.integer(1, 2), 2 * draw.integer(1, 3)
    prefix = draw.integer(0, 1)
    if options["pattern"] == "axial" and draw.chance(0.5):
        options["norm_layer"] = nn.LayerNorm
    x = draw.normal(draw.batch(), prefix + frames * rows * columns, options["embed_dim"])
    return Made(options, (x, (frames, rows, columns), prefix))


def spatial(draw: Draw) -> Made:
    options: Options = dict(**draw.heads(2, each=4), attention_type=draw.choice(KINDS), **draw.dropout())
    options["bias"] = draw.chance(0.5)
    if draw.chance(0.3):
        options |= dict(kernel_size=draw.odd(5), **draw.smoothing(Smoothing))
    elif draw.chance(0.3):
        options["spatial_range"] = draw.odd(5)
    n, grid, prefix = draw.batch(), draw.extents(2, 60), draw.integer(0, 2)
    tokens = prefix + grid[0] * grid[1]
    x = draw.normal(n, tokens, options["embed_dim"])
    return Made(options, (x,), dict(grid=grid, prefix_tokens=prefix, key_padding_mask=draw.mask(n, tokens)))


def windows(draw: Draw) -> Made:
    window, version = draw.odd(5) if draw.chance(0.5) else draw.integer(1, 4), draw.choice(("v1", "v2"))
    position = "table" if version == "v2" else draw.choice(("table", "relative", "bilateral", "none"))
    heads = draw.heads(each=2 if position == "relative" else 1)  # sines and cosines in pairs
    options: Options = dict(**heads, window_size=window, version=version, position=position, **draw.dropout())
    if window > 1:
        options["shift_size"] = draw.integer(0, window - 1)
    return Made(options, (draw.normal(draw.batch(), *draw.extents(2, 60), options["embed_dim"]),))


# --- sequences and captioning -------------------------------------------------------------------------------------


def dynamic_conv_1d(draw: Draw) -> Made:
    groups, causal = draw.integer(1, 3), draw.chance(0.4)
    n, length = draw.batch(), draw.extent(40)
    x = draw.normal(n, groups * draw.integer(1, 4), length)
    options = dict(in_channels=x.shape[1], num_groups=groups, **draw.kernel(causal), bias=draw.chance(0.5))
    return Made(options, (x,), dict(key_padding_mask=draw.mask(n, length)))


def alignment(draw: Draw) -> Made:
    score, n, width, other = draw.one(AlignmentScore), draw.batch(), draw.integer(1, 8), draw.integer(1, 8)
    other = width if score in ("cosine", "dot", "scaled-dot") else other
    queries, keys = draw.extent(20), draw.extent(20)
    options = dict(score=score, query_channels=width, source_channels=other)
    return Made(options, (draw.normal(n, queries, width), draw.normal(n, keys, other), draw.mask(n, keys)))


def attended_lstm(draw: Draw) -> Made:
    n, options = draw.batch(), dict(embed_dim=draw.integer(1, 8), **draw.names(), num_layers=draw.integer(1, 2))
    options |= draw.dropout()
    return Made(options, (draw.normal(n, draw.integer(1, 5), options["embed_dim"]), draw.sources(options, n)))


def dual_way(draw: Draw) -> Made:
    n, visual_dim = draw.batch(), draw.integer(1, 8)
    options = dict(visual_dim=visual_dim, **draw.heads(), num_layers=1, ffn_dim=draw.integer(1, 8), **draw.dropout())
    regions, padding = draw.modality(n, visual_dim)
    attributes, absent = draw.modality(n, options["embed_dim"])
    return Made(options, (regions, attributes, padding, absent))


def entangled(draw: Draw) -> Made:
    n, options = draw.batch(), dict(**draw.heads(), **draw.dropout())
    width = options["embed_dim"]
    return Made(options, (draw.normal(n, draw.extent(20), width), draw.modality(n, width), draw.modality(n, width)))


def controller(draw: Draw) -> Made:
    shape = (draw.batch(), draw.extent(20), draw.integer(1, 16))
    pathways = Entangled(*(draw.normal(*shape) for _ in range(4)))
    return Made(dict(embed_dim=shape[2], activation=draw.one(Activation)), (pathways, draw.normal(*shape)))


def gated_conv(draw: Draw) -> Made:
    n, length = draw.batch(), draw.integer(1, 9)
    options: Options = dict(embed_dim=draw.integer(1, 8), kernel_size=draw.integer(1, 5), **draw.names())
    options |= draw.dropout()
    x, words = (draw.normal(n, length, options["embed_dim"]) for _ in range(2))
    return Made(options, (x, words, draw.sources(options, n)))


def decoder_block(draw: Draw) -> Made:
    n, length = draw.batch(), draw.extent(20)
    options = dict(**draw.heads(), ffn_dim=draw.integer(1, 8), **draw.dropout(), fusion=draw.one(Fusion))
    x = draw.normal(n, length, options["embed_dim"])
    both = (draw.modality(n, x.shape[2]), draw.modality(n, x.shape[2]))
    return Made(options, (x, *both, draw.mask(n, length)))


def show_attend_tell(draw: Draw) -> Made:
    n, width, regions = draw.batch(), draw.integer(1, 8), draw.extent(20)
    options = dict(word_dim=draw.integer(1, 8), source_dim=width, hidden_dim=draw.integer(1, 8), **draw.dropout())
    words = draw.normal(n, draw.integer(1, 5), options["word_dim"])
    return Made(options, (words, draw.normal(n, regions, width), draw.mask(n, regions)))


MODULES: dict[str, Callable[[Draw], Made]] = {
    "AAConv2d": augmented,
    "AlignmentAttention": alignment,
    "AttendedLSTM": attended_lstm,
    "BilateralCrissCross2d": bilateral_map,
    "BilateralNonLocal2d": bilateral_map,
    "BilateralSelfAttention": lambda draw: draw.sequence(
        dict(**draw.heads(), **draw.kernel(draw.chance(0.4)), **draw.smoothing(SequenceSmoothing), **draw.dropout(),
             bias=draw.chance(0.5))
    ),
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
    "MultiheadAttention": lambda draw: draw.sequence(dict(**draw.heads(), **draw.dropout(), causal=draw.chance(0.4))),
    "MultiheadSpatialAttention": lambda draw: draw.sequence(
        dict(**draw.heads(3, each=2), attention_type=draw.choice(KINDS), attention_range=draw.choice((-1, 1, 3, 7)),
             causal=draw.chance(0.4), **draw.dropout(), bias=draw.chance(0.5), scale=draw.choice((1.0, 0.5)))
    ),
    "MultimodalDecoderBlock": decoder_block,
    "NonLocal1d": partial(non_local, axes=1),
    "NonLocal2d": partial(non_local, axes=2),
    "NonLocal3d": partial(non_local, axes=3),
    "RelativeSelfAttention": lambda draw: draw.sequence(
        dict(**draw.heads(), max_distance=draw.integer(1, 20), values=draw.chance(0.5), per_head=draw.chance(0.5),
             causal=draw.chance(0.4), **draw.dropout(), bias=draw.chance(0.5))
    ),
    "ShowAttendTell": show_attend_tell,
    "SpaceTimeSelfAttention": space_time,
    "SpatialSelfAttention": spatial,
    "WindowSelfAttention": windows,
}  # fmt: skip
