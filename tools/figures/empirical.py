"""Figures of Zhu et al. (2019), Tables 2 and 3: detection and segmentation here, translation in its own file."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from attn_plugins.modules import DeformableConv2d, DynamicConv2d, GeneralizedAttention2d

from . import convention, networks, translation
from .row import Row

TITLE = "An empirical study of spatial attention (Zhu et al. 2019)"
CONVENTION = (
    "GFLOPs of whole networks: the paper's own figure without attention (w/o) and our modules' operations, counted as "
    "the paper must have: 1 a multiply-add; softmax, biases, sampling and the prediction of offsets free; all "
    "projections at every position and all weighted sums over all keys; q·R free beside q·k. Detection (800×1333 "
    "pixels): 6 modules of 256 channels at 50×84 and 3 of 512 at 25×42; segmentation (768×768, output stride 8): 6 of "
    "256 and 4 of 512, one of them behind the backbone, at 96×96. `=`: ours rounds to the printed figure. The figures "
    "without attention are printed rounded, as 213.7 and 449.5: with 213.69 and 449.546 in their place ours rounds to "
    "every printed figure, but segmentation's 1010 and 1000. *executed*: with the multiply-adds that our modules run "
    "in truth.\n\n" + translation.CONVENTION
)

HEADS = 8

# Task: printed GFLOPs without attention; number, channels and map of the modules: in conv4 and conv5, and behind them.
TASKS = {
    "detection": ("213.7", ((6, 256, 50, 84), (3, 512, 25, 42))),
    "segmentation": ("449.5", ((6, 256, 96, 96), (3, 512, 96, 96), (1, 512, 96, 96))),
}

# Before its rounding: every printed figure follows from these, but two of segmentation.
UNROUNDED = {"detection": 213.69, "segmentation": 449.546}

ROUNDED = "within the rounding of {}"
DETECTOR = "empirical_attention/faster-rcnn_r50{}_fpn_1x_coco.py"
SEGMENTOR = "empirical_attention/ccnet-{}_r50-d8_8xb1-60k_cityscapes-769x769.py"
NETWORKS = {
    "detection": "the whole network: our config on 800×1344 pixels with 1000 proposals; the paper's is not described "
    "to that detail",
    "segmentation": "the whole network: our config, ResNet-50-V1c and CCNet's head without its attention; the paper's "
    "is not described to that detail",
}
CONTENT_ALONE = (
    "the paper has 0.9 less than with q·R, which costs but 0.55: the projection of 2 · 191 offsets in all modules"
)
ONCE = "executed: one query, since all see the same weights"
BY_AXES = "executed: over columns, then over rows, since the weights are a product of both"
PREDICTED = "executed: the offsets' prediction as well; every row with deformable convolution gains the same"

# Settings: printed GFLOPs of both tasks, what we do otherwise.
PRINTED = (
    ("1111, 1110, 1101, 1100, 1011, 1001", "281.4", "1112.1", ""),
    ("1010, 1000", "281.2", "1111.2", ""),
    ("0111, 0110", "253.6", "814.0", ""),
    ("0101, 0100", "251.1", "800.7", ""),
    ("0011", "250.1", "794.4", ""),
    ("0010", "221.1", "489.5", ONCE),
    ("0001", "247.6", "781.1", BY_AXES),
    ("deformable", "213.7", "449.5", PREDICTED),
    ("0100 n=31", "229.4", "523.3", ""),
    ("0100 n=25", "226.6", "511.8", ""),
    ("0100 n=19", "224.4", "502.6", ""),
    ("0100 n=13", "222.7", "495.9", ""),
    ("dynamic n=31", "352.9", "1029.0", ""),
    ("dynamic n=25", "306.8", "840.4", ""),
    ("dynamic n=19", "270.6", "692.1", ""),
    ("dynamic n=13", "244.3", "584.3", ""),
)
SETTINGS = tuple((setting, *printed) for settings, *printed in PRINTED for setting in settings.split(", "))


def modules(setting: str, channels: int) -> tuple[nn.Module, nn.Module | None]:
    """Build the module of a setting on the meta device, and the one that it replaces."""
    kind, _, side = setting.partition(" n=")
    with torch.device("meta"):
        if kind == "deformable":
            shape = (channels, channels, 3)
            return DeformableConv2d(*shape, padding=1, bias=False), nn.Conv2d(*shape, padding=1, bias=False)
        if kind == "dynamic":
            return DynamicConv2d(channels, int(side)), None
        return GeneralizedAttention2d(channels, HEADS, kind, spatial_range=int(side or -1)), None


@cache
def operations(setting: str, channels: int, height: int, width: int) -> tuple[int, int]:
    """Count what one module adds to a network: by the paper's convention, and as executed."""
    counted = executed = 0
    for module, sign in zip(modules(setting, channels), (1, -1)):
        if module is not None:
            calls = convention.calls(module, 1, channels, height, width)
            counted += sign * convention.zhu_2019(calls, height * width, channels // HEADS)
            executed += sign * convention.executed(calls)
    return counted, executed


def added(setting: str, task: str) -> tuple[float, float]:
    """Count what all modules add to a network, likewise, in GFLOPs."""
    counted = executed = 0
    stages = TASKS[task][1]
    for number, *shape in stages[:2] if setting == "deformable" else stages:
        once = operations(setting, *shape)
        counted, executed = counted + number * once[0], executed + number * once[1]
    return counted / 1e9, executed / 1e9


@cache
def without(task: str) -> list[convention.Call]:
    """Record the calls of our whole network without attention."""
    if task == "detection":
        return networks.detector(DETECTOR.format(""))[1]
    return networks.segmentor(SEGMENTOR.format("none"))


def rows() -> list[Row]:
    """Return all figures."""
    table = []
    for column, (task, (baseline, _)) in enumerate(TASKS.items()):
        table.append(Row(f"{task}: w/o", "GFLOPs", baseline, convention.executed(without(task)) / 1e9, NETWORKS[task]))
        for setting, *printed, difference in SETTINGS:
            label = f"{task}: {'w/o, deformable' if setting == 'deformable' else setting}"
            ours, executed = (float(baseline) + giga for giga in added(setting, task))
            remarks = [difference]
            if not Row(label, "GFLOPs", printed[column], ours).agrees:
                exact = Row(label, "GFLOPs", printed[column], ours - float(baseline) + UNROUNDED[task])
                if exact.agrees:
                    remarks.append(ROUNDED.format(baseline))
                elif setting in ("1010", "1000"):
                    remarks.append(CONTENT_ALONE)
            table.append(Row(label, "GFLOPs", printed[column], ours, "; ".join(filter(None, remarks)), executed))
    return table + translation.rows()
