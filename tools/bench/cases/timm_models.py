"""timm's models beside themselves with ``accelerate``, and this package's beside ResNet-50; on CPUs at tiny sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from attn_plugins.modules.tokens.parts.window_speed import Version

from ..case import Case
from . import whole
from .whole import ALONE, COMPILED, Steps, operators_alone, rows, steps

# timm's name: batch, side of the picture, and what the windows compute
ACCELERATED: dict[str, tuple[int, int, Version | None]] = {
    "swin_tiny_patch4_window7_224": (64, 224, "Swin"),
    "swinv2_tiny_window8_256": (32, 256, "Swin V2"),
    "samvit_base_patch16": (1, 1024, None),
}
RESNETS = ("aa_resnet50", "attn1111_resnet50", "attn0010_dcn_resnet50", "dcn_resnet50")
TINY = (2, 64)  # batch and side on CPUs


def pictures(batch: int, side: int, device: str) -> Tensor:
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(0)).to(device)


def loss(logits: Tensor) -> Tensor:
    return logits.float().square().mean()


@lru_cache(maxsize=1)
def accelerated(name: str, batch: int, side: int, device: str) -> Mapping[str, Steps]:
    import timm

    torch.manual_seed(0)
    stock = timm.create_model(name, num_classes=10, img_size=side).to(device)
    made = whole.accelerated("timm", stock, loss, pictures(batch, side, device))
    return made | {ALONE: replace(made["ours"], layers=operators_alone)}


@lru_cache(maxsize=1)
def beside_resnet50(name: str, batch: int, side: int, device: str) -> Mapping[str, Steps]:
    import timm

    import attn_plugins.timm  # noqa: F401  registers our models

    stock, model = (timm.create_model(of, num_classes=10).to(device) for of in ("resnet50", name))
    models = {"resnet50": stock, "ours": model, COMPILED: torch.compile(model)}
    return {title: steps(of, loss, pictures(batch, side, device)) for title, of in models.items()}


def cases(device: str) -> list[Case]:
    made = []
    for name, (*size, version) in ACCELERATED.items():
        batch, side = size if device == "cuda" else TINY
        title = f"{name}, {side}x{side}, batch {batch}"
        made += rows(title, "timm", partial(accelerated, name, batch, side), device, version=version)
    for name in RESNETS:
        batch, side = (32, 224) if device == "cuda" else TINY
        title = f"{name}, {side}x{side}, batch {batch}"
        made += rows(title, "resnet50", partial(beside_resnet50, name, batch, side), device, compiled=True)
    return made
