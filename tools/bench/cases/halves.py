"""bfloat16: operators against SDPA and our own float32, and layers under autocast against the toolkits'."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from attn_plugins import ops

from ..case import Case, Peer, normal, problem
from . import criss_cross, global_attention
from .vision_transformers import built


def attend(query: Tensor, key: Tensor, value: Tensor, logits: Tensor | None = None) -> Tensor:
    return ops.sequence_attention(query, key, value, position_logits=logits, scale=query.shape[-1] ** -0.5)


def sdpa(query: Tensor, key: Tensor, value: Tensor, logits: Tensor | None = None) -> Tensor:
    return scaled_dot_product_attention(query, key, value, attn_mask=logits)


SEQUENCE = ((2, 8, 1024, 64),) * 3
# title -> ours, shapes, the peer (None: ours in float32)
OPERATORS: dict[str, tuple[Any, tuple, Any]] = {
    "content attention, B 2, 8 heads x 64, T 1024": (attend, SEQUENCE, sdpa),
    "attention with logits of pairs, B 2, 8 heads x 64, T 1024": (attend, (*SEQUENCE, (2, 8, 1024, 1024)), sdpa),
    "Swin's windows, B 4, 56x56, 3 heads x 32": (attend, (*[(256, 3, 49, 32)] * 3, (1, 3, 49, 49)), None),
    "window_attention, content, (1,256,56,56), 7x7, 8 heads": (
        lambda q, k, v: ops.window_attention(q, k, v, None, 7), ((1, 8, 56, 56, 32),) * 3, None,
    ),
    "dynamic convolution, (1,256,56,56), 7x7, 16 groups": (
        lambda value, logits: ops.window_attention(None, None, value, logits, 7),
        ((1, 16, 56, 56, 16), (1, 16, 56, 56, 49)), None,
    ),
    "deform_conv2d, (2,256,50,68), 3x3, masks": (
        lambda x, offset, weight, mask: ops.deform_conv2d(x, offset, weight, padding=1, mask=mask),
        ((2, 256, 50, 68), (2, 18, 50, 68), (256, 256, 3, 3), (2, 9, 50, 68)), None,
    ),
}  # fmt: skip


# --- layers under autocast ----------------------------------------------------------------------------------------


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


# title -> maker of our layer or the peer's, its input, the peer's name
LAYERS: dict[str, tuple[Any, tuple[int, ...], str]] = {
    "GeneralizedAttention2d 1111, (1,256,50,84), 8 heads": (
        lambda ours: global_attention.module(ours, "1111", 256, 8, 2), (1, 256, 50, 84), "mmcv",
    ),
    "CrissCrossAttention2d, (1,512,65,65)": (
        lambda ours: (criss_cross.ours if ours else criss_cross.mmcv)(512), (1, 512, 65, 65), "mmcv",
    ),
    "DeformableConv2d, (2,256,50,68)": (deformable_conv, (2, 256, 50, 68), "torchvision"),
    "Swin-T's second block, batch 4": (
        partial(built, layer="layers.0.blocks.1"), (4, 56, 56, 96), "timm",
    ),
    "SAM's attention, 32x32, 12 heads x 64": (
        partial(built, layer="blocks.2.attn", name="samvit_base_patch16_224"), (1, 32, 32, 768), "timm",
    ),
}  # fmt: skip


def cases(device: str) -> list[Case]:
    rows = []
    for title, (ours, shapes, peer) in OPERATORS.items():
        in_float32 = {"ours, float32": Peer(lambda ours=ours: ours, dtype=torch.float32)}
        rows += problem(
            title, device, normal(*shapes), lambda ours=ours: ours,
            {"SDPA": lambda peer=peer: peer} if peer else in_float32, kinds=("bfloat16",), goals=(1.0, 1.0),
            main=peer is not None,
        )  # fmt: skip
    for title, (make, shape, name) in LAYERS.items():
        rows += problem(
            title, device, normal(shape), partial(make, True), {name: partial(make, False)},
            kinds=("autocast to bfloat16",), goals=(1.0, 1.0), main=False,
        )  # fmt: skip
    return rows
