"""Models of Hugging Face transformers beside themselves with ``accelerate``, from configs with random weights.

The products of ours are oneDNN's where ``accelerate`` would choose it, those of stock models PyTorch's default. A loss
is the mean square of all outputs, without matching. For a quick look: ``--rounds 1 --min-rounds 1 --seconds 0``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..case import Case, problem, tensors
from .deformable_attention import DETR, operands
from .whole import Steps, accelerated, rows

Size = tuple[int, int]
PEER = "transformers"
PLAIN = dict(use_timm_backbone=False, use_pretrained_backbone=False, backbone=None)  # for transformers 4
WORDS = 6  # of Grounding DINO's text


def resnet50(config: str) -> Any:
    import transformers

    return getattr(transformers, config)(out_features=["stage2", "stage3", "stage4"])


def swin_tiny(stages: tuple[int, ...]) -> Any:
    import transformers

    depths = dict(embed_dim=96, depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24], window_size=7)
    return transformers.SwinConfig(**depths, out_features=[f"stage{stage}" for stage in stages])


def rf_detr_backbone(size: Size) -> Any:
    import transformers

    return transformers.RfDetrDinov2Config(image_size=size[0], out_features=["stage3", "stage6", "stage9", "stage12"])


class Model(NamedTuple):
    """A model of transformers, and the size of its pictures."""

    prefix: str  # of its classes
    size: Size
    config: Callable[[Size], dict[str, Any]] = lambda size: {}  # arguments
    task: str = "ObjectDetection"


MODELS = {
    "Deformable DETR R-50": Model(
        "DeformableDetr", (512, 640), lambda _: PLAIN | dict(backbone_config=resnet50("ResNetConfig"))
    ),
    "Grounding DINO Swin-T": Model(
        "GroundingDino", (384, 480), lambda _: PLAIN | dict(backbone_config=swin_tiny((2, 3, 4)))
    ),
    "Mask2Former Swin-T": Model(
        "Mask2Former", (256, 256), lambda _: dict(backbone_config=swin_tiny((1, 2, 3, 4))), "UniversalSegmentation"
    ),
    "RT-DETR R-50": Model("RTDetr", (640, 640), lambda _: dict(backbone_config=resnet50("RTDetrResNetConfig"))),
    "RF-DETR": Model("RfDetr", (448, 448), lambda size: dict(backbone_config=rf_detr_backbone(size))),
    "PP-DocLayoutV3": Model("PPDocLayoutV3", (640, 640)),
}


def build(title: str, size: Size) -> nn.Module:
    """Return a stock model with random weights."""
    import transformers

    model = MODELS[title]
    config = getattr(transformers, f"{model.prefix}Config")(**model.config(size))
    if hasattr(config, "num_denoising"):
        config.num_denoising = 0  # it needs labels
    torch.manual_seed(0)
    return getattr(transformers, f"{model.prefix}For{model.task}")(config)


def loss(outputs: Mapping[str, Any]) -> Tensor:
    differentiable = [t for t in tensors(dict(outputs)) if t.requires_grad]
    finite = [torch.nan_to_num(t.float(), posinf=0.0, neginf=0.0) for t in differentiable]
    return torch.stack([t.square().mean() for t in finite]).sum()


@lru_cache(maxsize=1)
def built(title: str, size: Size, device: str) -> Mapping[str, Steps]:
    """Return both models' steps for one picture, and six words where they take text."""
    stock = build(title, size).to(device)
    given = dict(pixel_values=torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0)).to(device))
    if "text_config" in vars(stock.config):
        given["input_ids"] = torch.arange(1000, 1000 + WORDS, device=device)[None]
    return accelerated(PEER, stock, loss, **given)


# --- the operator -------------------------------------------------------------------------------------------------

# title: levels, queries, heads, their width, points
OPERATORS = {
    "decoder of DETR": (DETR, 300, 8, 32, 4),
    "decoder of RF-DETR, 13 groups of 100 queries": (((40, 40),), 1300, 16, 16, 2),
}


def layer(shapes: tuple[Size, ...], ours: bool) -> Callable[..., Tensor]:
    """Return transformers' layer without parameters, which calls ``grid_sample``, stock or accelerated."""
    from transformers.models.deformable_detr.modeling_deformable_detr import MultiScaleDeformableAttention

    from attn_plugins.transformers import accelerate

    attend = MultiScaleDeformableAttention()
    if ours:
        accelerate(attend, onednn=False)
    sizes = torch.tensor(shapes)
    starts = torch.cat((sizes.new_zeros(1), sizes.prod(1).cumsum(0)[:-1]))
    return lambda value, locations, weights: attend(value, sizes, list(shapes), starts, locations, weights, 64)


def cases(device: str) -> list[Case]:
    cpu, made = device == "cpu", []
    for title, (shapes, Q, M, d, K) in OPERATORS.items() if cpu else ():
        made += problem(
            f"{title} (Q {Q}, L {len(shapes)}, K {K}, {M} x {d})", device, operands(shapes, Q, 1, M, d, K),
            partial(layer, shapes, True), {PEER: partial(layer, shapes, False)},
        )  # fmt: skip
    for title, model in MODELS.items():
        name = f"{title}, {model.size[0]}x{model.size[1]}, batch 1"
        made += rows(name, PEER, partial(built, title, model.size), device)
    return made
