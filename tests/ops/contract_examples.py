"""Calls of every operator, in three sizes or any others, over which the contract suites run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from attn_plugins import ops

Size = Literal["tiny", "small", "large"]  # for finite differences; for most tests; for threads and accumulation


class Example(NamedTuple):
    """A call, ``call(**tensors)``, and the operations of the call and of its backward, where a formula is simple.

    Options may be passed as well, in place of the example's own.
    """

    call: Callable[..., Tensor]
    tensors: dict[str, Tensor]
    operations: tuple[int, int] | None = None

    def floats(self) -> dict[str, Tensor]:
        return {name: t for name, t in self.tensors.items() if t.is_floating_point()}

    def to(self, device: str, dtype: torch.dtype) -> Example:
        """Return the same numbers elsewhere; places and weights of samples stay float32 beside a half value."""
        moved = {}
        for name, tensor in self.tensors.items():
            beside = name in ("sampling_locations", "attention_weights") and dtype.itemsize == 2
            moved[name] = tensor.to(device, torch.float32 if beside else dtype if tensor.is_floating_point() else None)
        return self._replace(tensors=moved)

    def leaves(self) -> dict[str, Tensor]:
        return {name: t.detach().clone().requires_grad_(t.is_floating_point()) for name, t in self.tensors.items()}


Build = Callable[..., Example]  # of a size and of extents by name, B for the batch


def _extents(size: Size, given: Mapping[str, Any], **sizes: Mapping[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**{**sizes[size], **given})


def _example(
    function: Callable[..., Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    names: str,
    options: dict[str, Any],
    operations: tuple[int, int] | None = None,
    masks: Mapping[str, Tensor] | None = None,
    lone: Mapping[str, tuple[int, ...]] | None = None,
) -> Example:
    """Draw the tensors that are named, of normal numbers that are multiples of 1/1024, with ``lone`` axes of size 1."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name in names.split():
        axes = (lone or {}).get(name, ())
        shape = [1 if axis in axes else size for axis, size in enumerate(shapes[name])]
        tensors[name] = torch.randn(shape, generator=generator, dtype=torch.float64).mul(1024).round() / 1024

    def call(**given: Any) -> Tensor:
        absent = {name: None for name in ("query", "key") if name in shapes}
        return function(**{**absent, **options, **given})

    return Example(call, {**tensors, **(masks or {})}, operations)


def global_attention(names: str) -> Build:
    """Return calls with these tensors; the extents ``lone`` are axes of size 1 by the name of logits."""

    def build(size: Size, **given: Any) -> Example:
        e = _extents(
            size,
            dict(P=2, lone=dict(column_logits=(1, 2), key_logits=(0,))) | given,
            tiny=dict(B=1, M=2, d=2, dv=2, grid=(2, 3), keys=(2, 2)),
            small=dict(B=2, M=3, d=4, dv=6, grid=(3, 4), keys=(2, 5)),
            large=dict(B=2, M=3, d=32, dv=24, grid=(20, 19), keys=(9, 11)),
        )
        (Hq, Wq), (Hk, Wk) = e.grid, e.keys
        shapes = dict(
            query=(e.B, e.M, Hq, Wq, e.d), key=(e.B, e.M, Hk, Wk, e.d), value=(e.B, e.M, Hk, Wk, e.dv),
            row_logits=(e.B, e.M, Hq, Wq, Hk), column_logits=(e.B, e.M, Hq, Wq, Wk), key_logits=(e.B, e.M, Hk, Wk),
            prefix_key=(e.B, e.M, e.P, e.d), prefix_value=(e.B, e.M, e.P, e.dv),
        )  # fmt: skip
        operations = _products(e, Hq * Wq * Hk * Wk, names) if "prefix" not in names else None
        return _example(ops.global_attention, shapes, names, dict(scale=0.7), operations, lone=e.lone)

    return build


def _products(e: SimpleNamespace, pairs: int, names: str) -> tuple[int, int] | None:
    """Return the operations of content, whose backward computes logits again."""
    pairs *= 2 * e.B * e.M
    return (pairs * (e.d + e.dv), pairs * (3 * e.d + 2 * e.dv)) if "query" in names else None


def sequence_attention(names: str, *, masked=False, segments=False, **options: Any) -> Build:
    """Return calls with these tensors; the extents ``lone`` are axes of size 1 by the name of logits."""

    def build(size: Size, **given: Any) -> Example:
        e = _extents(
            size,
            dict(lone=dict(outside_logits=(1,), position_logits=(0,))) | given,
            tiny=dict(B=2, M=2, T=3, S=4, K=3, d=2, dv=2),
            small=dict(B=2, M=3, T=5, S=7, K=3, d=4, dv=5),
            large=dict(B=2, M=3, T=130, S=140, K=7, d=32, dv=24),
        )
        B, S = e.B, e.S
        shapes = dict(
            query=(B, e.M, e.T, e.d), key=(B, e.M, S, e.d), value=(B, e.M, S, e.dv), band_logits=(B, e.M, e.T, e.K),
            outside_logits=(B, e.M, e.T), position_logits=(B, e.M, e.T, S),
        )  # fmt: skip
        masks = dict(key_padding_mask=torch.arange(S).expand(B, S) == 1) if masked else {}
        if segments:
            masks["segment_ids"] = (torch.arange(S) % 3).int().expand(B, S).contiguous()
        operations = _products(e, e.T * S, names)
        return _example(ops.sequence_attention, shapes, names, dict(options, scale=0.7), operations, masks, e.lone)

    return build


MAPS: dict[str, dict[str, Any]] = dict(
    tiny=dict(B=1, M=2, d=2, dv=3, map=(3, 4)),
    small=dict(B=2, M=3, d=4, dv=5, map=(5, 7)),
    large=dict(B=2, M=3, d=32, dv=24, map=(20, 30)),
)


def _window_attention(names: str, kernel=(3, 3), stride=(1, 1), **options: Any) -> Build:
    def build(size: Size, **given: Any) -> Example:
        e = _extents(size, given, **{n: dict(kernel=kernel, stride=stride, options={}, **m) for n, m in MAPS.items()})
        grid, taps = tuple(-(-n // step) for n, step in zip(e.map, e.stride)), math.prod(e.kernel)
        shapes = dict(
            query=(e.B, e.M, *grid, e.d), key=(e.B, e.M, *e.map, e.d), value=(e.B, e.M, *e.map, e.dv),
            position_logits=(e.B, 1, *grid, taps),
        )  # fmt: skip
        operations = _products(e, math.prod(grid) * taps, names)
        geometry = dict(kernel_size=e.kernel, stride=e.stride, scale=0.7, position_logits=None)
        return _example(ops.window_attention, shapes, names, {**geometry, **options, **e.options}, operations)

    return build


def _criss_cross_attention(names: str) -> Build:
    def build(size: Size, **given: Any) -> Example:
        e = _extents(size, given, **MAPS)
        B, M, H, W = e.B, e.M, *e.map
        shapes = dict(
            query=(B, M, H, W, e.d), key=(B, M, H, W, e.d), value=(B, M, H, W, e.dv),
            position_logits=(1, M, H, W, H + W),
        )  # fmt: skip
        products = 2 * B * M * H * W * (H + W) * (e.d + e.dv)  # of logits that are kept
        operations = (products, 2 * products) if "query" in names else None
        return _example(ops.criss_cross_attention, shapes, names, dict(scale=0.7), operations)

    return build


def deform_conv2d(names: str, groups: int = 2) -> Build:
    def build(size: Size, **given: Any) -> Example:
        geometry = dict(groups=groups, D=2, stride=(1, 1), padding=(1, 1), dilation=(1, 1), far=1)
        e = _extents(
            size,
            {**geometry, **given},
            tiny=dict(B=1, C=4, map=(3, 4), out=2, kernel=(2, 3)),
            small=dict(B=2, C=6, map=(5, 9), out=4, kernel=(3, 3)),
            large=dict(B=2, C=64, map=(21, 23), out=48, kernel=(3, 3)),
        )
        grid = tuple(
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(e.map, e.kernel, e.stride, e.padding, e.dilation)
        )
        taps = math.prod(e.kernel)
        shapes = dict(
            input=(e.B, e.C, *e.map), offset=(e.B, 2 * e.D * taps, *grid), bias=(e.out,),
            weight=(e.out, e.C // e.groups, *e.kernel), mask=(e.B, e.D * taps, *grid),
        )  # fmt: skip
        products = 2 * e.B * math.prod(grid) * e.out * (e.C // e.groups) * taps
        options = dict(stride=e.stride, padding=e.padding, dilation=e.dilation)
        example = _example(ops.deform_conv2d, shapes, names, options, (products, 2 * products))
        example.tensors["offset"] *= e.far
        return _between_pixels(example)

    return build


def _deform_conv1d(size: Size, **given: Any) -> Example:
    e = _extents(
        size,
        given,
        tiny=dict(B=1, C=4, L=5, out=2),
        small=dict(B=2, C=6, L=9, out=4),
        large=dict(B=2, C=64, L=130, out=32),
    )
    shapes = dict(input=(e.B, e.C, e.L), offset=(e.B, 6, e.L), weight=(e.out, e.C, 3), mask=(e.B, 6, e.L))
    products = 2 * e.B * e.L * e.out * e.C * 3
    names = "input offset weight mask"
    return _between_pixels(_example(ops.deform_conv1d, shapes, names, dict(padding=1), (products, 2 * products)))


def _deformable_attention(size: Size, **given: Any) -> Example:
    e = _extents(
        size,
        dict(far=1) | given,
        tiny=dict(B=1, Q=3, M=2, d=3, K=2, levels=((3, 4), (1, 2))),
        small=dict(B=2, Q=6, M=3, d=4, K=2, levels=((5, 7), (3, 4), (1, 2))),
        large=dict(B=2, Q=700, M=4, d=32, K=4, levels=((20, 30), (3, 200))),
    )
    L = len(e.levels)
    shapes = dict(
        value=(e.B, sum(h * w for h, w in e.levels), e.M, e.d), sampling_locations=(e.B, e.Q, e.M, L, e.K, 2),
        attention_weights=(e.B, e.Q, e.M, L, e.K),
    )  # fmt: skip
    samples = e.B * e.Q * e.M * L * e.K * e.d
    example = _example(
        ops.deformable_attention,
        shapes,
        " ".join(shapes),
        dict(spatial_shapes=e.levels),
        (2 * 5 * samples, 2 * 8 * samples),
    )
    sides = torch.tensor([(w, h) for h, w in e.levels]).view(L, 1, 2)
    pixels = (example.tensors["sampling_locations"] * 0.4 * e.far + 0.5) * sides
    example.tensors["sampling_locations"] = _off_whole_pixels(pixels - 0.5).add(0.5) / sides
    return example


def _between_pixels(example: Example) -> Example:
    example.tensors["offset"] = _off_whole_pixels(example.tensors["offset"])
    return example


def _off_whole_pixels(places: Tensor) -> Tensor:
    """Move places to where interpolation has a derivative."""
    return places.floor() + 0.125 + 0.75 * (places - places.floor())


CONTENT = "query key value"
EXAMPLES: dict[str, Build] = {
    "global_attention": global_attention(f"{CONTENT} row_logits column_logits key_logits"),
    "global_attention, content": global_attention(CONTENT),
    "global_attention, position": global_attention("value row_logits column_logits key_logits"),
    "global_attention, prefix": global_attention(f"{CONTENT} row_logits key_logits prefix_key prefix_value"),
    "sequence_attention": sequence_attention(
        f"{CONTENT} band_logits outside_logits position_logits", masked=True, start=1
    ),
    "sequence_attention, causal band": sequence_attention("value band_logits", causal=True),
    "sequence_attention, range": sequence_attention(f"{CONTENT} band_logits", outside_logits=-math.inf, masked=True),
    "sequence_attention, segments": sequence_attention(f"{CONTENT} position_logits", segments=True),
    "window_attention": _window_attention(f"{CONTENT} position_logits"),
    "window_attention, content": _window_attention(CONTENT, stride=(1, 2)),
    "window_attention, position": _window_attention("value position_logits", kernel=(1, 7), border="zero"),
    "window_attention, inside": _window_attention(f"{CONTENT} position_logits", kernel=(2, 3), border="inside"),
    "criss_cross_attention": _criss_cross_attention(f"{CONTENT} position_logits"),
    "criss_cross_attention, content": _criss_cross_attention(CONTENT),
    "criss_cross_attention, position": _criss_cross_attention("value position_logits"),
    "deform_conv2d": deform_conv2d("input offset weight bias mask"),
    "deform_conv2d, version 1": deform_conv2d("input offset weight", groups=1),
    "deform_conv1d": _deform_conv1d,
    "deformable_attention": _deformable_attention,
}
# One of each operator, where one call shows enough.
OPERATORS = [name for name in EXAMPLES if "," not in name]
