"""Figures of the thesis, chapter 4: Tables 4.1, 4.2 and 4.5."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from attn_plugins.modules import LocalBilateralConv2d

from . import convention
from .convention import parameters
from .row import Row

TITLE = "Local bilateral attention (Thesis, chapter 4)"
CONVENTION = (
    "One 3×3 layer, 256 → 256 channels, on 96×96 positions. Operations as the thesis must have counted them: 1 a "
    "multiply-add of a linear layer, 1 a bias, 2 a BatchNorm and 1 a ReLU for each output; QKᵀ, AV, the softmax and "
    "the refinement of attention are free. The printed GFLOPs suppose a ReLU after every BatchNorm but the geometric "
    "logits', which is `activation='relu'`. Eq. 4.4 and our default have none: *linear*. `=`: ours rounds to the "
    "printed figure. *executed*: the multiply-adds that our module runs, those of attention included.\n\n"
    "Table 4.1 prints orders, in k, d_i, d_o and M: here with k = 3, 256 channels and 8 heads, for one position. It "
    "counts weights without biases, 1 a multiply-add of a linear layer, and 2 of what is summed over a window. A "
    "convolution's sums (k²·d_o) have no row: they are in its product."
)

SIZE = (96, 96)

CONTENT, GEOMETRIC = dict(geometric=False), dict(content=False)
REFINED = dict(geometric=False, shared=True, iterations=3)
SOME = "counts some of the refinement, where row g counts none"
# Table 4.2: label, arguments, printed parameters (K), printed GFLOPs, remarks on both.
LAYERS = (
    ("a: content", CONTENT, "265.22", "2.45", "", ""),
    ("b: geometric", GEOMETRIC, "217.56", "2.01", "", ""),
    ("c: both, 1 head", dict(num_heads=1), "267.55", "2.48", "", ""),
    ("d: both, 4 heads", dict(num_heads=4), "274.54", "2.54", "", ""),
    ("e: both", {}, "283.86", "2.63", "", ""),
    ("f: both, 16 heads", dict(num_heads=16), "302.51", "2.80", "", ""),
    ("g: content, shared, 3 iterations", REFINED, "1.3184", "1.22", "a misprint of 131.84", ""),
    ("h: both, shared", dict(shared=True), "150.27", "1.39", "", ""),
    ("i: both, shared, 3 iterations", dict(shared=True, iterations=3), "150.27", "1.71", "", SOME),
    ("j: 3×3 convolution", None, "590.08", "5.44", "", ""),
)

OTHERS = "the table has the value's projection alone, a layer also those of the query and of the output"
# Table 4.1: label, arguments, the part, its formula, that with k = 3, 256 channels and 8 heads, a remark.
ORDERS = (
    ("convolution", None, "weights", "k²·d_i·d_o", 9 * 256 * 256, ""),
    ("convolution", None, "linear", "k²·d_i·d_o", 9 * 256 * 256, ""),
    ("content", CONTENT, "weights", "4·d_i·d_o", 4 * 256 * 256, ""),
    ("content", CONTENT, "linear", "4·d_i·d_o", 4 * 256 * 256, ""),
    ("content", CONTENT, "spatial", "4·d_o·k²", 4 * 256 * 9, ""),
    ("geometric", GEOMETRIC, "position's weights", "k²·d_i·M", 9 * 256 * 8, ""),
    ("geometric", GEOMETRIC, "linear", "d_i·d_o", 256 * 256, OTHERS),
    ("geometric", GEOMETRIC, "spatial", "2·(M + 1)·d_o·k²", 2 * 9 * 256 * 9, ""),
    ("content, 3 iterations", REFINED, "weights", "2·d_i·d_o", 2 * 256 * 256, ""),
    ("content, 3 iterations", REFINED, "linear", "2·d_i·d_o", 2 * 256 * 256, ""),
    ("content, 3 iterations", REFINED, "spatial", "12·d_o·k²", 12 * 256 * 9, ""),
)
PARTS = {  # unit
    "weights": "weights",
    "position's weights": "weights",
    "linear": "multiply-adds of linear layers",
    "spatial": "operations in windows",
}

# Table 4.5: label, channels, arguments, parameters of the attention and of the convolution in its place.
DECODER = (
    ("up-1", (768, 512), dict(num_heads=8, shared=True, iterations=3), 693_760, 3_539_456),
    ("up-2", (640, 256), dict(num_heads=8), 578_776, 1_474_816),
    ("up-3", (320, 256), dict(num_heads=4), 323_692, 737_536),
    ("up-4", (320, 128), dict(num_heads=4), 145_516, 368_768),
)
LINEAR = "the printed figure has a ReLU after every BatchNorm"
NOT_PRINTED = "not printed: counted by hand from the table's configuration"


def layer(in_channels: int, out_channels: int, options: Mapping | None) -> nn.Module:
    """Build a bilateral layer, or a 3×3 convolution if ``options`` is None, on the meta device."""
    with torch.device("meta"):
        if options is None:
            return nn.Conv2d(in_channels, out_channels, 3, padding=1)
        return LocalBilateralConv2d(in_channels, out_channels, **options)


def operations(options: Mapping | None, activation: str = "none") -> tuple[float, float]:
    """Count the GFLOPs of a layer of Table 4.2, by the thesis' convention and as executed."""
    if options is not None:
        options = {**options, "activation": activation}
    calls = convention.calls(layer(256, 256, options), 1, 256, *SIZE)
    return convention.thesis(calls) / 1e9, convention.executed(calls) / 1e9


def complexity(options: Mapping | None, part: str) -> int:
    """Count a part (of ``PARTS``) of Table 4.1 in a layer: weights, or operations at one position."""
    module = layer(256, 256, options)
    weights = {name: p.numel() for name, p in module.named_parameters() if p.ndim == 4}
    position = sum(n for name, n in weights.items() if name.startswith("position."))
    if part == "position's weights":
        return position
    if part == "weights":
        return sum(weights.values()) - position
    recorded = convention.calls(module, 1, 256, *SIZE)
    everything = sum(call.operations for call in recorded)
    # The weights of a window count as spatial, including geometric logits.
    spatial = sum(c.operations for c in recorded if c.operator.endswith("window_attention") or ".position" in c.module)
    return (spatial if part == "spatial" else (everything - spatial) // 2) // math.prod(SIZE)


def rows() -> list[Row]:
    """Return all figures."""
    table = [
        Row(f"Table 4.1 {name}, {formula}", PARTS[part], str(printed), complexity(options, part), remark)
        for name, options, part, formula, printed, remark in ORDERS
    ]
    for name, options, thousands, giga, remark, remark_on_operations in LAYERS:
        label = f"Table 4.2 {name}"
        table.append(Row(label, "K parameters", thousands, parameters(layer(256, 256, options)) / 1e3, remark))
        ours, executed = operations(options, "relu")
        table.append(Row(label, "GFLOPs", giga, ours, remark_on_operations, executed))
        if options is not None:
            ours, executed = operations(options, "none")
            reason = remark_on_operations or LINEAR
            table.append(Row(f"{label}, linear", "GFLOPs", giga, ours, executed=executed, reason=reason))
    return table + decoder_rows()


def decoder_rows() -> list[Row]:
    """Return the rows of Table 4.5."""
    names = [*(name for name, *_ in DECODER), "all four"]
    expected = np.array([row[3:] for row in DECODER])
    ours = np.array([[parameters(layer(*row[1], options)) for options in (row[2], None)] for row in DECODER])
    return [
        Row(f"Table 4.5 {name}, {kind}", "parameters", str(printed), int(count), NOT_PRINTED)
        for name, *pairs in zip(names, *(np.vstack((n, n.sum(0))).tolist() for n in (expected, ours)))
        for kind, printed, count in zip(("attention", "3×3 convolution"), *pairs)
    ]
