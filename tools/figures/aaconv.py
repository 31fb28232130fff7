"""Figures of Bello et al. (2019): Tables 1 to 6 and 9."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from attn_plugins.modules.maps.augmented_conv import AAConv2d

from . import convention, networks
from .convention import parameters
from .row import Row

TITLE = "Attention-augmented convolution (Bello et al. 2019)"
CONVENTION = (
    "Operations at 224×224 (32×32 for CIFAR, 640×640 in Table 5) as the paper must have counted them: 2 a multiply-add "
    "in convolutions, linear layers and projections, 1 in QKᵀ and in AV, 0 in the logits of relative positions. `=`: "
    "ours rounds to the printed figure.\n\n"
    "BAM and GALA (Table 2) and SE in a detector (Table 5) are in neither timm nor mmdet, and have no row. Nor have "
    "latencies (Table 2), which are of a Tesla V100 under TensorFlow. Figures 1, 3, 5 and 6 plot what the tables print."
)


def model(name: str, **options: object) -> nn.Module:
    """Build a timm model on the meta device."""
    import timm

    import attn_plugins.timm  # noqa: F401

    with torch.device("meta"):
        return timm.create_model(name, **options).eval()


def operations(module: nn.Module, size: int) -> int:
    """Count the operations of one image by the paper's convention."""
    return convention.bello_2019(convention.calls(module, 1, 3, size, size))


SQUEEZE = dict(nu=0, attn_layer="se", attn_args=dict(rd_divisor=1))
GATHER = dict(nu=0, attn_layer="ge", attn_args=dict(use_mlp=False))
CBAM = dict(block_args=dict(attn_layer="cbam"))

PLACED = "the least key depth of 20 a head and the text's placement give this"
UNKNOWN = "the paper's own count is unknown; its AA-ResNet-34 agrees"
# Table, model, options, printed parameters (M), printed GFLOPs ('': not printed), remarks on both.
MODELS = (
    ("1", "aa_wide_resnet28_10", dict(nu=0), "36.3", "10.4", "", ""),
    ("1", "aa_wide_resnet28_10", GATHER, "36.3", "10.4", "", ""),
    ("1", "aa_wide_resnet28_10", SQUEEZE, "36.5", "10.4", "timm's SE has biases, which are 0.005 M", ""),
    ("1", "aa_wide_resnet28_10", {}, "36.2", "10.9", PLACED, "likewise"),
    ("2", "resnet50", CBAM, "28.1", "", "", ""),
    ("3", "resnet34", {}, "21.8", "7.4", "", UNKNOWN),
    ("3", "seresnet34", {}, "22.0", "7.4", "", UNKNOWN),
    ("3", "aa_resnet34", {}, "20.7", "7.1", "", ""),
    ("3", "resnet50", {}, "25.6", "8.2", "", ""),
    ("3", "seresnet50", {}, "28.1", "8.2", "", ""),
    ("3", "aa_resnet50", {}, "25.8", "8.3", "", ""),
    ("3", "resnet101", {}, "44.5", "15.6", "", ""),
    ("3", "seresnet101", {}, "49.3", "15.6", "", ""),
    ("3", "aa_resnet101", {}, "45.4", "16.1", "", ""),
    ("3", "resnet152", {}, "60.2", "23.0", "", ""),
    ("3", "seresnet152", {}, "66.8", "23.1", "", "SE adds 0.013 here, and 0.1 from one rounded figure to the other"),
    ("3", "aa_resnet152", {}, "61.6", "23.8", "", ""),
    ("4", "aa_mnasnet_075", dict(nu=0), "2.91", "0.45", "", ""),
    ("4", "aa_mnasnet_075", {}, "3.02", "0.51", "the paper's rounding of 0.75 × channels is unknown", "likewise"),
    ("4", "aa_mnasnet_100", dict(nu=0), "3.89", "0.63", "", "the paper's own count is unknown"),
    ("4", "aa_mnasnet_100", {}, "4.06", "0.70", "", "likewise"),
    ("4", "aa_mnasnet_125", dict(nu=0), "5.26", "1.01", "", ""),
    ("4", "aa_mnasnet_125", {}, "5.53", "1.11", "", "likewise"),
    ("4", "aa_mnasnet_140", dict(nu=0), "6.10", "1.17", "6.106, which the paper cuts off", ""),
    ("4", "aa_mnasnet_140", {}, "6.44", "1.29", "", "likewise"),
    ("6", "aa_resnet50", dict(kappa=0.25, nu=0.25), "24.3", "7.9", "", ""),
    ("6", "aa_resnet50", dict(kappa=0.5, nu=0.5), "22.3", "7.3", "", ""),
    ("6", "aa_resnet50", dict(kappa=0.75, nu=0.75), "20.7", "6.8", "", ""),
    ("6", "aa_resnet50", dict(kappa=1.0, nu=1.0), "19.4", "6.3", "", "all other ratios agree; 6.38 by this convention"),
)  # fmt: skip

# Table 9: stage, its attention map in KB, its map's side, parameters (K) and MFLOPs of a layer's attention.
LAYERS = (("layer2", "600", 14, "43", "22"), ("layer3", "600", 14, "90", "40"), ("layer4", "37.5", 7, "190", "19"))
WITHOUT_SUMS = "without AV {:.1f}, which cut off is the printed figure"

# Table 5: config, printed parameters (M) and GFLOPs.
DETECTORS = (("r50", "33.4", "182"), ("aa-r50", "33.1", "182"), ("r101", "52.4", "243"), ("aa-r101", "51.7", "245"))
DETECTOR = "aaconv/retinanet_{}_fpn_crop640-150e_coco.py"
CODE_BASE = "mmdet's RetinaNet is larger than that of the paper's code base, alike with all four backbones"
HEADS = "the paper's number of heads in detection is unknown, and it prints a difference of two rounded figures"


def rows() -> list[Row]:
    """Return all figures."""
    table = []
    for number, name, options, millions, giga, remark, remark_on_operations in MODELS:
        net, size = model(name, **options), 32 if "wide" in name else 224
        flat = {**options, **options.get("block_args", {})}
        shown = "".join(f" {key}={value}" for key, value in flat.items() if not isinstance(value, dict))
        label = f"Table {number}: {name}{shown}"
        table.append(Row(label, "M parameters", millions, parameters(net) / 1e6, remark))
        if giga:
            table.append(Row(label, "GFLOPs", giga, operations(net, size) / 1e9, remark_on_operations))
    return table + attention_rows() + detection_rows()


def attention_rows() -> list[Row]:
    """Return Table 9, attention in AA-ResNet-50: memory of maps, parameters and operations per layer and in total."""
    net, table, totals = model("aa_resnet50"), [], [0.0, 0.0, 0.0]
    calls = convention.calls(net, 1, 3, 224, 224)
    for stage, kilobytes, side, thousands, mega in LAYERS:
        layers = {n: m for n, m in getattr(net, stage).named_modules() if isinstance(m, AAConv2d)}
        layer = [*layers.values()][-1]
        # The stride of a first layer does not change its parameters, so all layers of a stage have equally many.
        own = parameters(layer) - parameters(layer.conv)
        memory = layer.num_heads * side**4 * 2
        counts = [attention_operations(calls, f"AAResNet.{stage}.{name}") for name in layers]
        counted, without_sums = (count / 1e6 for count in counts[-1])
        label, attention = f"Table 9: {stage}", f"Table 9: {stage}, a layer's attention"
        two_digits = "printed with two digits" if own > 1e5 else ""
        table += [
            Row(f"{label}, attention map in bfloat16", "KB", kilobytes, memory / 1024),
            Row(attention, "K parameters", thousands, own / 1e3, two_digits),
            Row(attention, "MFLOPs", mega, counted, reason=WITHOUT_SUMS.format(without_sums)),
        ]
        sums = len(layers) * memory, len(layers) * own, sum(count for count, _ in counts)
        totals = [total + more for total, more in zip(totals, sums)]
    remark = "printed with two digits; without AV, as its layers"
    return [
        *table,
        Row("Table 9: all attention maps, for training", "MB", "6", totals[0] / 2**20),
        Row("Table 9: all attention parameters", "M parameters", "1.3", totals[1] / 1e6),
        Row("Table 9: all attention", "MFLOPs", "390", totals[2] / 1e6, remark),
    ]


def attention_operations(calls: Sequence[convention.Call], layer: str) -> tuple[int, int]:
    """Count a layer's attention by the paper's convention, with and without the weighted sums AV."""
    own = [c for c in calls if (c.module == layer or c.module.startswith(f"{layer}.")) and c.module != f"{layer}.conv"]
    sums = 0
    for call in own:
        if call.operator == "attn_plugins.global_attention":
            sums += math.prod(call.shapes[0][:-1]) * math.prod(call.shapes[2][2:])
    counted = convention.bello_2019(own)
    return counted, counted - sums


def detection_rows() -> list[Row]:
    """Return Table 5: our configs, and the effect of augmentation on them."""
    table, sizes = [], {}
    for name, millions, giga in DETECTORS:
        sizes[name], calls = networks.detector(DETECTOR.format(name), 640, 640)
        label = f"Table 5: RetinaNet, {name}"
        table.append(Row(label, "M parameters", millions, sizes[name] / 1e6, CODE_BASE))
        table.append(Row(label, "GFLOPs", giga, convention.bello_2019(calls) / 1e9, CODE_BASE))
    for depth, printed, remark in ((50, "-0.3", HEADS), (101, "-0.7", "")):
        label = f"Table 5: AA-ResNet-{depth} less ResNet-{depth}"
        change = sizes[f"aa-r{depth}"] - sizes[f"r{depth}"]
        table.append(Row(label, "M parameters", printed, change / 1e6, remark))
    return table
