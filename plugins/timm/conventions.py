"""Shared parts of the timm models: default configurations, initialization, parameter groups."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import register_notrace_module
from torch import nn

from ..modules.maps.augmented_conv import AAConv2d
from ..modules.maps.criss_cross import CrissCross
from ..modules.maps.deformable_conv import DeformableConv2d
from ..modules.maps.dynamic_conv import DynamicConv2d
from ..modules.maps.generalized_attention import GeneralizedAttention2d

OURS = (AAConv2d, DeformableConv2d, GeneralizedAttention2d)  # this package's layers in the timm models


def imagenet_cfg(**changes: Any) -> dict[str, Any]:
    """Return timm's default configuration of a ResNet on ImageNet, without weights."""
    cfg = dict(
        url="",
        num_classes=1000,
        input_size=(3, 224, 224),
        pool_size=(7, 7),
        crop_pct=0.875,
        interpolation="bilinear",
        mean=IMAGENET_DEFAULT_MEAN,
        std=IMAGENET_DEFAULT_STD,
        first_conv="conv1",
        classifier="fc",
    )
    return {**cfg, **changes}


def transformer_cfg(**changes: Any) -> dict[str, Any]:
    """Return timm's default configuration of a ViT for images of one size, without weights."""
    cfg = dict(pool_size=None, crop_pct=0.9, interpolation="bicubic", fixed_input_size=True)
    return imagenet_cfg(**{**cfg, "first_conv": "patch_embed.proj", "classifier": "head", **changes})


def initialize_ours(model: nn.Module) -> None:
    """Restore the initialization of this package's layers, which timm's loops over every ``Conv2d`` overwrite."""
    for module in model.modules():
        if isinstance(module, DeformableConv2d):  # timm's rule for convolutions, and zeros for the predictor
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            for parameter in module.conv_offset.parameters():
                nn.init.zeros_(parameter)
        elif isinstance(module, OURS):
            module.reset_parameters()


class Augmented(nn.Module):
    """Mixin of models with augmented convolutions, whose relative position tables are exempt from weight decay."""

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Return the names of the relative position tables."""
        return {
            f"{prefix}.{name}"
            for prefix, module in self.named_modules()
            if isinstance(module, AAConv2d)
            for name in ("height_rel", "width_rel")
            if getattr(module, name) is not None
        }


def param_groups(
    model: nn.Module, lr: float, offset_lr_scale: float = 0.1, weight_decay: float | None = None
) -> list[dict[str, Any]]:
    """Create parameter groups that train the predictors of sampling offsets more slowly (Empirical, footnote 2).

    They fit any optimizer of torch, and ``timm.optim.create_optimizer_v2(model, lr=lr, param_group_fn=partial(
    param_groups, lr=lr))``; learning-rate schedules keep the ratio.

    Args:
        model: Any model. Its predictors are the layers named ``conv_offset``, in this package as in mmcv.
        lr: Learning rate of all other parameters.
        offset_lr_scale: Learning rate of the predictors relative to ``lr``.
        weight_decay: Weight decay of the groups by timm's rule: 0 for biases, normalizations and the patterns in the
            model's ``no_weight_decay()``. None leaves it to the optimizer.
    """
    exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else set()  # type: ignore[operator]
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            free = any(fnmatch(name, pattern) for pattern in exempt)
            decays = parameter.ndim > 1 and not free and not name.endswith(".bias")
            key = ("conv_offset" in name.split("."), decays or weight_decay is None)
            groups.setdefault(key, []).append(parameter)
    return [
        dict(params=groups[slow, decays], lr=lr * (offset_lr_scale if slow else 1))
        | ({} if weight_decay is None else dict(weight_decay=weight_decay if decays else 0.0))
        for slow, decays in sorted(groups)
    ]


# Leaf modules for timm's feature extraction by FX, because their argument checks read shapes.
for _module in (*OURS, CrissCross, DynamicConv2d):
    register_notrace_module(_module)
