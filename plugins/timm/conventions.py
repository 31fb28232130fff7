"""What our timm models share: default configurations, initialisation, parameter groups."""

from __future__ import annotations

from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import register_notrace_module
from torch import nn

from ..modules.augmented_conv import AAConv2d
from ..modules.deformable_conv import DeformableConv2d
from ..modules.generalized_attention import GeneralizedAttention2d


def imagenet_cfg(**changes: Any) -> dict[str, Any]:
    """timm's default configuration of a ResNet on ImageNet, without weights."""
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


def initialise_ours(model: nn.Module) -> None:
    """Draw anew what timm's loops over every ``Conv2d`` spoil: attention's projections and offset predictors."""
    for module in model.modules():
        if isinstance(module, DeformableConv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            module.zero_offset()
        elif isinstance(module, GeneralizedAttention2d):
            module.init_weights()
        elif isinstance(module, AAConv2d):
            module.reset_attention()


def table_names(model: nn.Module) -> set[str]:
    """The names of all tables of relative positions, which take no weight decay."""
    return {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, AAConv2d)
        for name in ("height_rel", "width_rel")
        if getattr(module, name) is not None
    }


def param_groups(model: nn.Module, lr: float, offset_lr_scale: float = 0.1) -> list[dict[str, Any]]:
    """Parameter groups that train the predictors of sampling offsets more slowly (Empirical, footnote 2).

    For any optimizer of torch's, or ``timm.optim.create_optimizer_v2(model, lr=lr, param_group_fn=partial(
    param_groups, lr=lr))``; learning-rate schedules keep the ratio.
    """
    offsets = [
        parameter
        for module in model.modules()
        if isinstance(module, DeformableConv2d)
        for parameter in module.conv_offset.parameters()
        if parameter.requires_grad
    ]
    known = {id(parameter) for parameter in offsets}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    groups = [dict(params=rest, lr=lr), dict(params=offsets, lr=lr * offset_lr_scale)]
    return [group for group in groups if group["params"]]


# Leaves to timm's feature extraction by FX: their argument checks look at shapes.
for _module in (AAConv2d, DeformableConv2d, GeneralizedAttention2d):
    register_notrace_module(_module)
