"""timm's models beside themselves with ``accelerate``, and this package's beside ResNet-50; on CPUs at tiny sizes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import nn

from attn_plugins.modules.tokens.parts.window_speed import Version

from ..case import Case
from .end_to_end import LEARNING_RATE
from .whole import ALONE, COMPILED, Steps, operators_alone, rows

# timm's name: batch, side of the picture, and what the windows compute
ACCELERATED: dict[str, tuple[int, int, Version | None]] = {
    "swin_tiny_patch4_window7_224": (64, 224, "Swin"),
    "swinv2_tiny_window8_256": (32, 256, "Swin V2"),
    "samvit_base_patch16": (1, 1024, None),
}
RESNETS = ("aa_resnet50", "attn1111_resnet50", "attn0010_dcn_resnet50", "dcn_resnet50")
TINY = (2, 64)  # batch and side on CPUs


def steps(network: nn.Module, batch: int, side: int, device: str) -> Steps:
    """Return the steps of a classifier, whose loss is the mean square of its logits."""
    network.to(device)
    pictures = torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(0)).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), LEARNING_RATE)
    return Steps(network, optimizer, lambda: network(pictures).float().square().mean(), lambda: network(pictures))


@lru_cache(maxsize=1)
def accelerated(name: str, batch: int, side: int, device: str) -> Mapping[str, Steps]:
    import timm

    from attn_plugins.timm import accelerate

    torch.manual_seed(0)
    stock = timm.create_model(name, num_classes=10, img_size=side)
    model = copy.deepcopy(stock)
    accelerate(model, onednn=False)
    ours = steps(model, batch, side, device)
    return {"timm": steps(stock, batch, side, device), "ours": ours, ALONE: replace(ours, layers=operators_alone)}


@lru_cache(maxsize=1)
def beside_resnet50(name: str, batch: int, side: int, device: str) -> Mapping[str, Steps]:
    import timm

    import attn_plugins.timm  # noqa: F401  registers our models

    stock, model = (timm.create_model(of, num_classes=10) for of in ("resnet50", name))
    return {
        "resnet50": steps(stock, batch, side, device),
        "ours": steps(model, batch, side, device),
        COMPILED: steps(torch.compile(model), batch, side, device),
    }


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
