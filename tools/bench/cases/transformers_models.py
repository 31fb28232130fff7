"""Models of Hugging Face transformers beside themselves with ``accelerate``, from configs with random weights.

The products of ours are oneDNN's where ``accelerate`` would choose it, those of stock models PyTorch's default. A loss
is the mean square of all outputs, without matching. For a quick look: ``--rounds 1 --min-rounds 1 --seconds 0``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..case import Case, problem, tensors
from .deformable_attention import DETR
from .end_to_end import LEARNING_RATE
from .whole import Steps, choosing, rows

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


def steps(model: nn.Module, size: Size, ours: bool, device: str) -> Steps:
    """Return a model's steps for one picture, and six words where it takes text."""
    choosing(model.to(device), ours)
    generator = torch.Generator().manual_seed(0)
    given = dict(pixel_values=torch.randn(1, 3, *size, generator=generator).to(device))
    if "text_config" in vars(model.config):
        given["input_ids"] = torch.arange(1000, 1000 + WORDS, device=device)[None]

    def loss() -> Tensor:
        outputs = [t for t in tensors(dict(model(**given))) if t.requires_grad]
        finite = [torch.nan_to_num(t.float(), posinf=0.0, neginf=0.0) for t in outputs]
        return torch.stack([t.square().mean() for t in finite]).sum()

    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    return Steps(model, optimizer, loss, lambda: model(**given))


@lru_cache(maxsize=1)
def built(title: str, size: Size, device: str) -> Mapping[str, Steps]:
    from attn_plugins.transformers import accelerate

    stock = build(title, size)
    ours = copy.deepcopy(stock)
    accelerate(ours, onednn=False)
    return {PEER: steps(stock, size, False, device), "ours": steps(ours, size, True, device)}


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


def operands(shapes: tuple[Size, ...], Q: int, M: int, d: int, K: int) -> Callable[[torch.dtype], list[Tensor]]:
    """Return a function that draws values, locations about two pixels from reference points, and weights."""

    def draw(dtype: torch.dtype) -> list[Tensor]:
        sizes = torch.tensor([(w, h) for h, w in shapes]).view(-1, 1, 2)
        locations = torch.rand(1, Q, 1, 1, 1, 2) + 2 * torch.randn(1, Q, M, len(shapes), K, 2) / sizes
        weights = torch.rand(1, Q, M, len(shapes) * K).softmax(-1).view(1, Q, M, len(shapes), K)
        return [t.to(dtype) for t in (torch.randn(1, sum(h * w for h, w in shapes), M, d), locations, weights)]

    return draw


def cases(device: str) -> list[Case]:
    cpu, made = device == "cpu", []
    for title, (shapes, Q, M, d, K) in OPERATORS.items() if cpu else ():
        made += problem(
            f"{title} (Q {Q}, L {len(shapes)}, K {K}, {M} x {d})", device, operands(shapes, Q, M, d, K),
            partial(layer, shapes, True), {PEER: partial(layer, shapes, False)}, goals=(10.0, 10.0),
        )  # fmt: skip
    for title, model in MODELS.items():
        name = f"{title}, {model.size[0]}x{model.size[1]}, batch 1"
        of_model = rows(name, PEER, partial(built, title, model.size), device)
        made += [replace(case, timing="graph", heavy=True) for case in of_model] if cpu else of_model
    return made
