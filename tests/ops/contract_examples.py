"""Calls of every operator in three sizes, over which the contract suite runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from attn_plugins import ops

Size = Literal["tiny", "small", "large"]  # for finite differences; for most tests; for threads and accumulation


class Example(NamedTuple):
    """A call, ``call(**tensors)``, and the operations of the call and of its backward, where a formula is simple."""

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


Build = Callable[[Size, "int | None"], Example]


def _example(
    function: Callable[..., Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    names: str,
    options: dict[str, Any],
    operations: tuple[int, int] | None = None,
    masks: Mapping[str, Tensor] | None = None,
) -> Example:
    """Draw the tensors that are named, with normal numbers that are multiples of 1/1024."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shapes[name], generator=generator, dtype=torch.float64).mul(1024).round() / 1024
        for name in names.split()
    }

    def call(**tensors: Tensor) -> Tensor:
        absent = {name: None for name in ("query", "key") if name in shapes and name not in tensors}
        return function(**absent, **tensors, **options)

    return Example(call, {**tensors, **(masks or {})}, operations)


def _global_attention(names: str) -> Build:
    def build(size: Size, batch: int | None = None) -> Example:
        B, M, d, dv = dict(tiny=(1, 2, 2, 2), small=(2, 3, 4, 6), large=(2, 3, 32, 24))[size]
        (Hq, Wq), (Hk, Wk) = dict(tiny=((2, 3), (2, 2)), small=((3, 4), (2, 5)), large=((20, 19), (9, 11)))[size]
        B = B if batch is None else batch
        shapes = dict(
            query=(B, M, Hq, Wq, d), key=(B, M, Hk, Wk, d), value=(B, M, Hk, Wk, dv), row_logits=(B, M, Hq, Wq, Hk),
            column_logits=(B, 1, 1, Wq, Wk), key_logits=(1, M, Hk, Wk), prefix_key=(B, M, 2, d),
            prefix_value=(B, M, 2, dv),
        )  # fmt: skip
        pairs = 2 * B * M * Hq * Wq * Hk * Wk
        counted = "query" in names and "prefix" not in names
        operations = (pairs * (d + dv), pairs * (3 * d + 2 * dv)) if counted else None
        return _example(ops.global_attention, shapes, names, dict(scale=0.7), operations)

    return build


def _sequence_attention(names: str, *, masked=False, segments=False, **options: Any) -> Build:
    def build(size: Size, batch: int | None = None) -> Example:
        B, M, T, S, K, d, dv = dict(
            tiny=(2, 2, 3, 4, 3, 2, 2), small=(2, 3, 5, 7, 3, 4, 5), large=(2, 3, 130, 140, 7, 32, 24)
        )[size]
        B = B if batch is None else batch
        shapes = dict(
            query=(B, M, T, d), key=(B, M, S, d), value=(B, M, S, dv), band_logits=(B, M, T, K),
            outside_logits=(B, 1, T), position_logits=(1, M, T, S),
        )  # fmt: skip
        masks = dict(key_padding_mask=torch.arange(S).expand(B, S) == 1) if masked else {}
        if segments:
            masks["segment_ids"] = (torch.arange(S) % 3).int().expand(B, S).contiguous()
        pairs = 2 * B * M * T * S
        operations = (pairs * (d + dv), pairs * (3 * d + 2 * dv)) if "query" in names else None
        return _example(ops.sequence_attention, shapes, names, dict(options, scale=0.7), operations, masks)

    return build


def _window_attention(names: str, kernel=(3, 3), stride=(1, 1), **options: Any) -> Build:
    def build(size: Size, batch: int | None = None) -> Example:
        B, M, d, dv = dict(tiny=(1, 2, 2, 3), small=(2, 3, 4, 5), large=(2, 3, 32, 24))[size]
        H, W = dict(tiny=(3, 4), small=(5, 7), large=(20, 30))[size]
        B, grid = B if batch is None else batch, (-(-H // stride[0]), -(-W // stride[1]))
        taps = math.prod(kernel)
        shapes = dict(
            query=(B, M, *grid, d), key=(B, M, H, W, d), value=(B, M, H, W, dv), position_logits=(B, 1, *grid, taps)
        )
        pairs = 2 * B * M * math.prod(grid) * taps
        operations = (pairs * (d + dv), pairs * (3 * d + 2 * dv)) if "query" in names else None
        given = dict(options, kernel_size=kernel, stride=stride, scale=0.7)
        absent = {} if "position_logits" in names else dict(position_logits=None)
        return _example(ops.window_attention, shapes, names, {**given, **absent}, operations)

    return build


def _criss_cross_attention(names: str) -> Build:
    def build(size: Size, batch: int | None = None) -> Example:
        B, M, d, dv = dict(tiny=(1, 2, 2, 3), small=(2, 3, 4, 5), large=(2, 3, 32, 24))[size]
        H, W = dict(tiny=(3, 4), small=(5, 7), large=(20, 30))[size]
        B = B if batch is None else batch
        shapes = dict(
            query=(B, M, H, W, d), key=(B, M, H, W, d), value=(B, M, H, W, dv), position_logits=(1, M, H, W, H + W)
        )
        products = 2 * B * M * H * W * (H + W) * (d + dv)  # of logits that are kept
        operations = (products, 2 * products) if "query" in names else None
        return _example(ops.criss_cross_attention, shapes, names, dict(scale=0.7), operations)

    return build


def _deform_conv2d(names: str, groups: int = 2) -> Build:
    def build(size: Size, batch: int | None = None) -> Example:
        B, C, H, W, C_out, taps = dict(
            tiny=(1, 4, 3, 4, 2, (2, 3)), small=(2, 6, 5, 9, 4, (3, 3)), large=(2, 64, 21, 23, 48, (3, 3))
        )[size]
        B, D = B if batch is None else batch, 2
        grid = (H + 2 - taps[0] + 1, W + 2 - taps[1] + 1)
        shapes = dict(
            input=(B, C, H, W), offset=(B, 2 * D * math.prod(taps), *grid), weight=(C_out, C // groups, *taps),
            bias=(C_out,), mask=(B, D * math.prod(taps), *grid),
        )  # fmt: skip
        products = 2 * B * math.prod(grid) * C_out * (C // groups) * math.prod(taps)
        return _between_pixels(_example(ops.deform_conv2d, shapes, names, dict(padding=1), (products, 2 * products)))

    return build


def _deform_conv1d(size: Size, batch: int | None = None) -> Example:
    B, C, L, C_out = dict(tiny=(1, 4, 5, 2), small=(2, 6, 9, 4), large=(2, 64, 130, 32))[size]
    B = B if batch is None else batch
    shapes = dict(input=(B, C, L), offset=(B, 2 * 3, L), weight=(C_out, C, 3), mask=(B, 2 * 3, L))
    products = 2 * B * L * C_out * C * 3
    names = "input offset weight mask"
    return _between_pixels(_example(ops.deform_conv1d, shapes, names, dict(padding=1), (products, 2 * products)))


def _deformable_attention(size: Size, batch: int | None = None) -> Example:
    B, Q, M, d, K = dict(tiny=(1, 3, 2, 3, 2), small=(2, 6, 3, 4, 2), large=(2, 700, 4, 32, 4))[size]
    levels = dict(tiny=((3, 4), (1, 2)), small=((5, 7), (3, 4), (1, 2)), large=((20, 30), (3, 200)))[size]
    B, L = B if batch is None else batch, len(levels)
    shapes = dict(
        value=(B, sum(h * w for h, w in levels), M, d), sampling_locations=(B, Q, M, L, K, 2),
        attention_weights=(B, Q, M, L, K),
    )  # fmt: skip
    samples = B * Q * M * L * K * d
    example = _example(
        ops.deformable_attention,
        shapes,
        " ".join(shapes),
        dict(spatial_shapes=levels),
        (2 * 5 * samples, 2 * 8 * samples),
    )
    sides = torch.tensor([(w, h) for h, w in levels]).view(L, 1, 2)
    pixels = (example.tensors["sampling_locations"] * 0.4 + 0.5) * sides
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
    "global_attention": _global_attention(f"{CONTENT} row_logits column_logits key_logits"),
    "global_attention, content": _global_attention(CONTENT),
    "global_attention, position": _global_attention("value row_logits column_logits key_logits"),
    "global_attention, prefix": _global_attention(f"{CONTENT} row_logits key_logits prefix_key prefix_value"),
    "sequence_attention": _sequence_attention(
        f"{CONTENT} band_logits outside_logits position_logits", masked=True, start=1
    ),
    "sequence_attention, causal band": _sequence_attention("value band_logits", causal=True),
    "sequence_attention, range": _sequence_attention(f"{CONTENT} band_logits", outside_logits=-math.inf, masked=True),
    "sequence_attention, segments": _sequence_attention(f"{CONTENT} position_logits", segments=True),
    "window_attention": _window_attention(f"{CONTENT} position_logits"),
    "window_attention, content": _window_attention(CONTENT, stride=(1, 2)),
    "window_attention, position": _window_attention("value position_logits", kernel=(1, 7), border="zero"),
    "criss_cross_attention": _criss_cross_attention(f"{CONTENT} position_logits"),
    "criss_cross_attention, content": _criss_cross_attention(CONTENT),
    "criss_cross_attention, position": _criss_cross_attention("value position_logits"),
    "deform_conv2d": _deform_conv2d("input offset weight bias mask"),
    "deform_conv2d, version 1": _deform_conv2d("input offset weight", groups=1),
    "deform_conv1d": _deform_conv1d,
    "deformable_attention": _deformable_attention,
}
# One of each operator, where one call shows enough.
OPERATORS = [name for name in EXAMPLES if "," not in name]
