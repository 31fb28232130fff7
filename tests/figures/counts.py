"""Parameters and operations of our models by unit, a function for each group of ``paper_figures.yaml``."""

from __future__ import annotations

import math
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from attn_plugins.modules import (
    CausalDeformableConv1d,
    DeformableConv1d,
    DeformableConv2d,
    DynamicConv1d,
    DynamicConv2d,
    GeneralizedAttention2d,
    LocalBilateralConv2d,
    MultiheadSpatialAttention,
)
from attn_plugins.modules.maps.augmented_conv import AAConv2d
from attn_plugins.terms import relative_position
from tests.figures import conventions, networks
from tests.figures.conventions import Call, calls, executed, parameters

Counts = dict[str, float]


# Bello et al. (2019)


def timm_model(name: str, **options: Any) -> nn.Module:
    """Build a timm model on the meta device."""
    import timm

    import attn_plugins.timm  # noqa: F401  registers our models

    with torch.device("meta"):
        return timm.create_model(name, **options).eval()


def classifiers(name: str, options: dict[str, Any]) -> Counts:
    size = 32 if "wide" in name else 224
    net = timm_model(name, **options)
    return {"M parameters": parameters(net) / 1e6, "GFLOPs": conventions.bello_2019(calls(net, 1, 3, size, size)) / 1e9}


@cache
def augmented_resnet50() -> tuple[nn.Module, list[Call]]:
    net = timm_model("aa_resnet50")
    return net, calls(net, 1, 3, 224, 224)


def attention_operations(layer: str) -> tuple[int, int]:
    """Count a layer's attention in AA-ResNet-50, with and without the weighted sums AV."""
    recorded = augmented_resnet50()[1]
    own = [c for c in recorded if f"{c.module}.".startswith(f"{layer}.") and c.module != f"{layer}.conv"]
    attention = [c for c in own if c.operator == "attn_plugins.global_attention"]
    sums = sum(math.prod(call.shapes[0][:-1]) * math.prod(call.shapes[2][2:]) for call in attention)
    counted = conventions.bello_2019(own)
    return counted, counted - sums


def layers_of(stage: str) -> dict[str, AAConv2d]:
    stage_modules = getattr(augmented_resnet50()[0], stage).named_modules()
    return {f"AAResNet.{stage}.{name}": module for name, module in stage_modules if isinstance(module, AAConv2d)}


def attention_of_a_layer(stage: str, side: int) -> Counts:
    """Count the last layer of a stage, whose map is ``side`` pixels wide."""
    name, layer = list(layers_of(stage).items())[-1]
    counted, without_sums = attention_operations(name)
    return {
        "KB of the map": layer.num_heads * side**4 * 2 / 1024,
        "K parameters": (parameters(layer) - parameters(layer.conv)) / 1e3,
        "MFLOPs": counted / 1e6,
        "MFLOPs without AV": without_sums / 1e6,
    }


def attention_of_all_layers(sides: dict[str, int]) -> Counts:
    layers = [(side, name, layer) for stage, side in sides.items() for name, layer in layers_of(stage).items()]
    return {
        "MB of maps": sum(layer.num_heads * side**4 * 2 for side, _, layer in layers) / 2**20,
        "M parameters": sum(parameters(layer) - parameters(layer.conv) for _, _, layer in layers) / 1e6,
        "MFLOPs": sum(attention_operations(name)[0] for _, name, _ in layers) / 1e6,
    }


@cache
def retinanets(name: str) -> Counts:
    size, recorded = networks.detector(f"aaconv/retinanet_{name}_fpn_crop640-150e_coco.py", 640, 640)
    return {"M parameters": size / 1e6, "GFLOPs": conventions.bello_2019(recorded) / 1e9}


def retinanets_less(name: str, plain: str) -> Counts:
    return {"M parameters": retinanets(name)["M parameters"] - retinanets(plain)["M parameters"]}


# Zhu et al. (2019)

HEADS = 8
# Printed GFLOPs without attention; number, channels and map of the modules: in conv4 and conv5, and behind them.
TASKS = {
    "detection": (213.7, ((6, 256, 50, 84), (3, 512, 25, 42))),
    "segmentation": (449.5, ((6, 256, 96, 96), (3, 512, 96, 96), (1, 512, 96, 96))),
}
DETECTOR = "empirical_attention/faster-rcnn_r50{}_fpn_1x_coco.py"
SEGMENTOR = "empirical_attention/ccnet-{}_r50-d8_8xb1-60k_cityscapes-769x769.py"


@cache
def without(task: str) -> list[Call]:
    """Record the calls of our whole network without attention."""
    if task == "detection":
        return networks.detector(DETECTOR.format(""))[1]
    return networks.segmentor(SEGMENTOR.format("none"))


def map_modules(setting: str, channels: int) -> tuple[nn.Module, nn.Module | None]:
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
def of_a_module(setting: str, channels: int, height: int, width: int) -> tuple[int, int]:
    """Count what one module adds to a network: by the paper's convention, and as executed."""
    counted = run = 0
    for module, sign in zip(map_modules(setting, channels), (1, -1)):
        if module is not None:
            run += sign * executed(calls(module, 1, channels, height, width))
            with mock.patch.object(relative_position, "_FEW_LINES", 0):  # small maps multiply by all offsets at once
                recorded = calls(module, 1, channels, height, width)
            counted += sign * conventions.zhu_2019(recorded, height * width, channels // HEADS)
    return counted, run


def added(setting: str, task: str) -> tuple[float, float]:
    """Count what all modules add to a network, likewise, in GFLOPs."""
    stages = TASKS[task][1][: 2 if setting == "deformable" else None]
    once = [(number, of_a_module(setting, *shape)) for number, *shape in stages]
    return sum(n * pair[0] for n, pair in once) / 1e9, sum(n * pair[1] for n, pair in once) / 1e9


def networks_on_images(task: str, setting: str) -> Counts:
    if setting == "w/o":
        return {"GFLOPs": executed(without(task)) / 1e9}
    counted, run = (TASKS[task][0] + more for more in added(setting, task))
    return {"GFLOPs": counted, "executed": run}


TOKENS, CHANNELS, HIDDEN, LAYERS = 50, 512, 2048, 6


class CrossAttention(nn.Module):
    """Cross-attention between two sequences of equal length."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, torch.empty_like(x))


def sequence_attention(kind: str, attention_range: int = -1, causal: bool = False) -> nn.Module:
    scale = (CHANNELS // HEADS) ** -0.5
    return MultiheadSpatialAttention(CHANNELS, HEADS, kind, attention_range, causal, scale=scale)


def self_attention(setting: str, causal: bool) -> list[list[Call]]:
    """Record the calls of the modules in place of self-attention in one layer, a list per module."""
    kind, _, unit = setting.partition(" + ")
    kind, _, size = kind.partition(" n=")
    recorded, shape = [], (CHANNELS, CHANNELS, 3)
    with torch.device("meta"):
        if unit:
            deformable = CausalDeformableConv1d(*shape) if causal else DeformableConv1d(*shape, padding=1)
            recorded.append(calls(deformable, 1, CHANNELS, TOKENS))
        if kind == "dynamic":
            recorded.append(calls(DynamicConv1d(CHANNELS, int(size), causal=causal), 1, CHANNELS, TOKENS))
        elif kind != "w/o":
            recorded.append(calls(sequence_attention(kind, int(size or -1), causal), 1, TOKENS, CHANNELS))
    return recorded


@cache
def others() -> list[list[Call]]:
    """Record the calls of an encoder layer and a decoder layer without self-attention."""
    with torch.device("meta"):
        feed_forward = nn.Sequential(nn.Linear(CHANNELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CHANNELS))
        cross = CrossAttention(sequence_attention("1111"))
    return [calls(module, 1, TOKENS, CHANNELS) for module in (feed_forward, feed_forward, cross)]


@cache
def of_a_translator(setting: str) -> tuple[int, int]:
    """Count the whole network: by the paper's convention, with the decoder charged as an encoder, and as executed."""
    encoder, decoder, rest = self_attention(setting, False), self_attention(setting, True), others()
    counted = sum(conventions.zhu_2019_sequence(each, TOKENS) for each in [*encoder, *encoder, *rest])
    return LAYERS * counted, LAYERS * sum(map(executed, [*encoder, *decoder, *rest]))


def translators(setting: str) -> Counts:
    if setting == "w/o":  # fairseq's whole network
        recorded = networks.translator(TOKENS, encoder_attention="none", decoder_attention="none")
        counted, run = conventions.zhu_2019_sequence(recorded, TOKENS), executed(recorded)
    else:
        counted, run = of_a_translator(setting)
    return {"GFLOPs": counted / 1e9, "executed": run / 1e9}


# The thesis, chapter 4


def bilateral(in_channels: int, out_channels: int, options: dict[str, Any] | None) -> nn.Module:
    """Build a bilateral layer, or a 3×3 convolution if ``options`` is None, on the meta device."""
    with torch.device("meta"):
        if options is None:
            return nn.Conv2d(in_channels, out_channels, 3, padding=1)
        return LocalBilateralConv2d(in_channels, out_channels, **options)


def orders(options: dict[str, Any] | None) -> Counts:
    """Count the parts of Table 4.1: weights, and operations at one position."""
    module = bilateral(256, 256, options)
    weights = {name: p.numel() for name, p in module.named_parameters() if p.ndim == 4}
    position = sum(n for name, n in weights.items() if name.startswith("position."))
    recorded = calls(module, 1, 256, 96, 96)
    # The weights of a window count as spatial, including geometric logits.
    spatial = sum(c.operations for c in recorded if c.operator.endswith("window_attention") or ".position" in c.module)
    return {
        "weights": sum(weights.values()) - position,
        "position's weights": position,
        "linear": (sum(call.operations for call in recorded) - spatial) // 2 // 96**2,
        "spatial": spatial // 96**2,
    }


def bilateral_layers(options: dict[str, Any] | None) -> Counts:
    counts = {"K parameters": parameters(bilateral(256, 256, options)) / 1e3}
    for suffix, activation in (("", "relu"), (", linear", "none")):
        given = None if options is None else {**options, "activation": activation}
        recorded = calls(bilateral(256, 256, given), 1, 256, 96, 96)
        counts |= {f"GFLOPs{suffix}": conventions.thesis(recorded) / 1e9, "executed": executed(recorded) / 1e9}
    return counts


def decoder_layers(channels: list[int], options: dict[str, Any]) -> Counts:
    return {
        "attention": parameters(bilateral(*channels, options)),
        "convolution": parameters(bilateral(*channels, None)),
    }


# Bertasius et al. (2021)

VIEWS, SSV2_CLASSES = 3, 174  # spatial crops in the paper's cost of inference; classes in its Table 1


@cache
def timesformers(pattern: str, frames: int, size: int) -> Counts:
    name, options = "timesformer_base_patch16_224", dict(pattern=pattern, num_frames=frames, img_size=size)
    model = timm_model(name, **options, num_classes=SSV2_CLASSES)
    clip = executed(calls(model, 1, frames, 3, size, size)) / 1e12
    return {"M parameters": parameters(model) / 1e6, "TFLOPs of a clip": clip, "TFLOPs": VIEWS * clip}
