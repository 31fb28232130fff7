"""Image encoders beside themselves with ``accelerate``, and torchvision's deformable function with its drop-in.

SAM's and Swin's encoders of transformers and torchvision, from configs with random weights. The loss is a mean of the
outputs with random weights: the mean square of a layer norm's output is constant.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..case import Case, tensors
from .whole import Steps, accelerated, choosing, rows, steps

STOCK = "stock"


class Encoder(NamedTuple):
    """A stock model, and the shape of its images."""

    build: Callable[[], nn.Module]
    shape: tuple[int, int, int, int]


def of_transformers(name: str, model: str, **options: Any) -> nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, f"{name}Config")(**options))


def of_torchvision(name: str) -> nn.Module:
    import torchvision

    return getattr(torchvision.models, name)(weights=None)


class DeformableASPP(nn.Module):
    """Parallel deformable convolutions 1×1, 3×3 and 7×7 by torchvision's function, as in BiRefNet's decoder."""

    def __init__(self, channels: int = 64, width: int = 256) -> None:
        super().__init__()
        self.offsets, self.weights = nn.ModuleList(), nn.ParameterList()
        for k in (1, 3, 7):
            self.offsets.append(nn.Conv2d(channels, 3 * k * k, k, padding=k // 2))
            self.weights.append(nn.Parameter(torch.randn(width, channels, k, k) / (channels * k * k) ** 0.5))

    def forward(self, x: Tensor) -> Tensor:
        from torchvision.ops import deform_conv2d

        outputs = []
        for layer, weight in zip(self.offsets, self.weights):
            taps = weight.shape[2] * weight.shape[3]
            offset, mask = layer(x).split([2 * taps, taps], 1)
            outputs.append(deform_conv2d(x, offset, weight, padding=weight.shape[2] // 2, mask=2 * mask.sigmoid()))
        return torch.cat(outputs, 1)


SWIN_TINY = dict(embed_dim=96, depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24], window_size=7)
SAM = dict(initializer_range=0.02)  # by default 1e-10, whose gradients are denormal numbers and take 20 times as long
VIT_LARGE = dict(SAM, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, mlp_dim=4096)
# Cellpose's encoder attends globally in all blocks, to 32×32 patches of 8 pixels.
CELLPOSE = dict(VIT_LARGE, image_size=256, patch_size=8, window_size=0, global_attn_indexes=list(range(24)))
FUNCTION = "ASPP by torchvision's function"
ENCODERS = {
    "SAM ViT-B of transformers": Encoder(
        partial(of_transformers, "SamVision", "SamVisionModel", **SAM), (1, 3, 1024, 1024)
    ),
    "SAM ViT-L as in Cellpose": Encoder(
        partial(of_transformers, "SamVision", "SamVisionModel", **CELLPOSE), (1, 3, 256, 256)
    ),
    "Swin-T of transformers": Encoder(partial(of_transformers, "Swin", "SwinModel", **SWIN_TINY), (2, 3, 224, 224)),
    "Swin-T of torchvision": Encoder(partial(of_torchvision, "swin_t"), (2, 3, 224, 224)),
    "Swin V2-T of torchvision": Encoder(partial(of_torchvision, "swin_v2_t"), (2, 3, 256, 256)),
    FUNCTION: Encoder(DeformableASPP, (1, 64, 128, 128)),
}


@contextmanager
def by_drop_in() -> Iterator[None]:
    """Let torchvision's function run on our kernels."""
    from attn_plugins.torchvision import drop_in

    drop_in.replace()
    try:
        yield
    finally:
        drop_in.restore()


def loss(outputs: Any) -> Tensor:
    found = [outputs] if isinstance(outputs, Tensor) else tensors(dict(outputs))
    device = found[0].device
    weights = torch.Generator(device).manual_seed(0)
    drawn = (torch.randn(t.shape, generator=weights, device=device) * t.float() for t in found if t.requires_grad)
    return torch.stack([t.mean() for t in drawn]).sum()


@lru_cache(maxsize=1)
def built(title: str, shape: tuple[int, ...], device: str) -> Mapping[str, Steps]:
    torch.manual_seed(0)
    stock = ENCODERS[title].build().to(device)
    x = torch.randn(shape, device=device)
    if title != FUNCTION:
        return accelerated(STOCK, stock, loss, x)
    ours = steps(choosing(copy.deepcopy(stock), True), loss, x)
    return {STOCK: steps(choosing(stock, False), loss, x), "ours": replace(ours, layers=by_drop_in)}


def cases(device: str) -> list[Case]:
    made = []
    for title, encoder in ENCODERS.items():
        B, _, H, W = encoder.shape
        if device == "cpu" or title != FUNCTION:  # the drop-in replaces torchvision's kernels for CPUs alone
            made += rows(f"{title}, {H}x{W}, batch {B}", STOCK, partial(built, title, encoder.shape), device)
    return made
