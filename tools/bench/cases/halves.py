"""bfloat16: operators against SDPA and our own float32, and layers under autocast against the toolkits'."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_plugins import ops

from ..case import Case, Maker, Peer, normal, problem


def content(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return ops.sequence_attention(query, key, value, scale=query.shape[-1] ** -0.5)


def with_logits(query: Tensor, key: Tensor, value: Tensor, logits: Tensor) -> Tensor:
    return ops.sequence_attention(query, key, value, position_logits=logits, scale=query.shape[-1] ** -0.5)


def sdpa(query: Tensor, key: Tensor, value: Tensor, logits: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=logits)


def window(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return ops.window_attention(query, key, value, None, 7)


def dynamic(value: Tensor, logits: Tensor) -> Tensor:
    return ops.window_attention(None, None, value, logits, 7)


def deform(x: Tensor, offset: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    return ops.deform_conv2d(x, offset, weight, padding=1, mask=mask)


SEQUENCE = ((2, 8, 1024, 64),) * 3
# title -> ours, shapes, the peer (None: ours in float32)
OPERATORS: dict[str, tuple[Callable[..., Tensor], tuple, Callable[..., Tensor] | None]] = {
    "content attention, B 2, 8 heads x 64, T 1024": (content, SEQUENCE, sdpa),
    "attention with logits of pairs, B 2, 8 heads x 64, T 1024": (with_logits, (*SEQUENCE, (2, 8, 1024, 1024)), sdpa),
    "Swin's windows, B 4, 56x56, 3 heads x 32": (with_logits, (*[(256, 3, 49, 32)] * 3, (1, 3, 49, 49)), None),
    "window_attention, content, (1,256,56,56), 7x7, 8 heads": (window, ((1, 8, 56, 56, 32),) * 3, None),
    "dynamic convolution, (1,256,56,56), 7x7, 16 groups": (dynamic, ((1, 16, 56, 56, 16), (1, 16, 56, 56, 49)), None),
    "deform_conv2d, (2,256,50,68), 3x3, masks": (
        deform, ((2, 256, 50, 68), (2, 18, 50, 68), (256, 256, 3, 3), (2, 9, 50, 68)), None,
    ),
}  # fmt: skip


# --- layers under autocast ----------------------------------------------------------------------------------------


def generalized(ours: bool) -> nn.Module:
    from .global_attention import module

    return module(ours, "1111", 256, 8, 2)


def criss_cross(ours: bool) -> nn.Module:
    from . import criss_cross as room

    return room.ours(512) if ours else room.mmcv(512)


class TorchvisionLayer(nn.Module):
    """torchvision's operator after a convolution that predicts offsets and masks.

    Neither torchvision's nor mmcv's operator supports bfloat16 on CPUs, so it runs outside autocast.
    """

    def __init__(self, C: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(C, C, 3, 3) / C)
        self.bias = nn.Parameter(torch.zeros(C))
        self.conv_offset = nn.Conv2d(C, 27, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        from torchvision.ops import deform_conv2d

        offset, mask = self.conv_offset(x).float().split((18, 9), 1)
        return deform_conv2d(x.float(), offset, self.weight, self.bias, padding=1, mask=mask.sigmoid())


def deformable_conv(ours: bool) -> nn.Module:
    from attn_plugins.modules import DeformableConv2d

    layer = DeformableConv2d(256, 256, 3, padding=1) if ours else TorchvisionLayer(256)
    nn.init.normal_(layer.conv_offset.weight, std=0.01)
    return layer


def timm_layer(name: str, layer: str) -> Callable[[bool], nn.Module]:
    def make(ours: bool) -> nn.Module:
        import timm

        from attn_plugins.timm import accelerate

        model = timm.create_model(name)
        if ours:
            accelerate(model)
        return model.get_submodule(layer)

    return make


# title -> maker of the layer, its input, the peer's name
LAYERS: dict[str, tuple[Callable[[bool], nn.Module], tuple[int, ...], str]] = {
    "GeneralizedAttention2d 1111, (1,256,50,84), 8 heads": (generalized, (1, 256, 50, 84), "mmcv"),
    "CrissCrossAttention2d, (1,512,65,65)": (criss_cross, (1, 512, 65, 65), "mmcv"),
    "DeformableConv2d, (2,256,50,68)": (deformable_conv, (2, 256, 50, 68), "torchvision"),
    "Swin-T's second block, batch 4": (
        timm_layer("swin_tiny_patch4_window7_224", "layers.0.blocks.1"), (4, 56, 56, 96), "timm",
    ),
    "SAM's attention, 32x32, 12 heads x 64": (
        timm_layer("samvit_base_patch16_224", "blocks.2.attn"), (1, 32, 32, 768), "timm",
    ),
}  # fmt: skip


def cases(device: str) -> list[Case]:
    found = []
    for title, (ours, shapes, peer) in OPERATORS.items():
        peers: dict[str, Maker | Peer] = (
            {"SDPA": lambda peer=peer: peer}
            if peer is not None
            else {"ours, float32": Peer(lambda ours=ours: ours, dtype=torch.float32)}
        )
        found += problem(
            title, device, normal(*shapes), lambda ours=ours: ours, peers, kinds=("bfloat16",), goals=(1.0, 1.0),
            main=peer is not None,
        )  # fmt: skip
    for title, (make, shape, name) in LAYERS.items():
        found += problem(
            title, device, normal(shape), lambda make=make: make(True), {name: lambda make=make: make(False)},
            kinds=("autocast to bfloat16",), goals=(1.0, 1.0), main=False,
        )  # fmt: skip
    return found
