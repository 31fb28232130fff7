"""Figures of Bello et al. (2019): Tables 1, 3, 4, 5, 6 and 9."""

from __future__ import annotations

import torch
from torch import nn

from attn_plugins.modules.augmented_conv import AAConv2d
from tools.requires import extras

from . import convention
from .convention import parameters
from .row import Row

TITLE = "Attention-augmented convolution (Bello et al. 2019)"
CONVENTION = (
    "Operations at 224×224 (32×32 for CIFAR) as the paper must have counted them: 2 a multiply-add in convolutions, "
    "linear layers and projections, 1 in QKᵀ and in AV, 0 in the logits of relative positions. `=`: ours rounds to "
    "the printed figure."
)


def model(name: str, **options: object) -> nn.Module:
    """A timm model without memory: shapes alone are counted."""
    with extras("timm"):
        import timm

        import attn_plugins.timm  # noqa: F401

    with torch.device("meta"):
        return timm.create_model(name, **options).eval()


def operations(module: nn.Module, size: int) -> int:
    """Of one image, by the paper's convention."""
    return convention.bello_2019(convention.calls(module, 1, 3, size, size))


# Table, model, options, printed parameters (M), printed GFLOPs, remarks on both.
MODELS = (
    ("1", "aa_wide_resnet28_10", dict(nu=0), "36.3", "10.4", "", ""),
    (
        "1", "aa_wide_resnet28_10", {}, "36.2", "10.9",
        "the least key depth of 20 a head and the text's placement give this", "likewise",
    ),
    ("3", "aa_resnet34", {}, "20.7", "7.1", "", ""),
    ("3", "aa_resnet50", {}, "25.8", "8.3", "", ""),
    ("3", "aa_resnet101", {}, "45.4", "16.1", "", ""),
    ("3", "aa_resnet152", {}, "61.6", "23.8", "", ""),
    ("4", "aa_mnasnet_075", {}, "3.02", "0.51", "the paper's rounding of 0.75 × channels is unknown", "likewise"),
    ("4", "aa_mnasnet_100", {}, "4.06", "0.70", "", "the paper's own count is unknown, its plain MnasNets included"),
    ("4", "aa_mnasnet_125", {}, "5.53", "1.11", "", "likewise"),
    ("4", "aa_mnasnet_140", {}, "6.44", "1.29", "", "likewise"),
    ("6", "aa_resnet50", dict(kappa=0.25, nu=0.25), "24.3", "7.9", "", ""),
    ("6", "aa_resnet50", dict(kappa=0.5, nu=0.5), "22.3", "7.3", "", ""),
    ("6", "aa_resnet50", dict(kappa=0.75, nu=0.75), "20.7", "6.8", "", ""),
    ("6", "aa_resnet50", dict(kappa=1.0, nu=1.0), "19.4", "6.3", "", "all other ratios agree; 6.38 by this convention"),
)  # fmt: skip

# Table 9: stage, its attention map in KB, and its map's side.
MAPS = (("layer2", "600", 14), ("layer3", "600", 14), ("layer4", "37.5", 7))

DETECTION = dict(num_heads=2, img_size=640)  # as configs/mmdet/aaconv
HEADS = "the paper's number of heads in detection is unknown, and it prints a difference of two rounded figures"


def rows() -> list[Row]:
    """All figures."""
    found = []
    for table, name, options, millions, giga, remark, remark_on_operations in MODELS:
        net = model(name, **options)
        size = 32 if "wide" in name else 224
        label = f"Table {table}: {name}" + "".join(f" {k}={v}" for k, v in options.items())
        found.append(Row(label, "M parameters", millions, parameters(net) / 1e6, remark))
        found.append(Row(label, "GFLOPs", giga, operations(net, size) / 1e9, remark_on_operations))
    net = model("aa_resnet50")
    total = 0
    for stage, kilobytes, side in MAPS:
        layers = [m for m in getattr(net, stage).modules() if isinstance(m, AAConv2d)]
        heads = layers[0].num_heads
        found.append(Row(f"Table 9: {stage}, attention map in bfloat16", "KB", kilobytes, heads * side**4 * 2 / 1024))
        # A first layer's stride changes no parameter, so all of a stage have as many.
        total += sum(parameters(m) - parameters(m.conv) for m in layers if m.conv is not None)
    found.append(Row("Table 9: all attention parameters", "M parameters", "1.3", total / 1e6))
    for depth, printed, remark in ((50, "-0.3", HEADS), (101, "-0.7", "")):
        plain, ours = parameters(model(f"resnet{depth}")), parameters(model(f"aa_resnet{depth}", **DETECTION))
        label = f"Table 5: AA-ResNet-{depth} less ResNet-{depth}"
        found.append(Row(label, "M parameters", printed, (ours - plain) / 1e6, remark))
    return found
