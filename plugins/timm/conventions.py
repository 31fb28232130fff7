"""What our timm models share: default configurations, initialisation, parameter groups."""

from __future__ import annotations

from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import register_notrace_module
from torch import nn

from ..modules.augmented_conv import AAConv2d
from ..modules.deformable_conv import DeformableConv2d
from ..modules.generalized_attention import GeneralizedAttention2d

OURS = (AAConv2d, DeformableConv2d, GeneralizedAttention2d)  # of which timm's models are made


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
    """Redraw what timm's loops over every ``Conv2d`` have drawn by their own rule within our layers."""
    for module in model.modules():
        if isinstance(module, DeformableConv2d):  # a convolution as any of the model's, but for its predictor
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            for parameter in module.conv_offset.parameters():
                nn.init.zeros_(parameter)
        elif isinstance(module, OURS):
            module.reset_parameters()


def table_names(model: nn.Module) -> set[str]:
    """The names of all tables of relative positions, which take no weight decay."""
    return {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, AAConv2d)
        for name in ("height_rel", "width_rel")
        if getattr(module, name) is not None
    }


def param_groups(
    model: nn.Module, lr: float, offset_lr_scale: float = 0.1, weight_decay: float | None = None
) -> list[dict[str, Any]]:
    """Parameter groups that train the predictors of sampling offsets more slowly (Empirical, footnote 2).

    For any optimizer of torch's, or ``timm.optim.create_optimizer_v2(model, lr=lr, param_group_fn=partial(
    param_groups, lr=lr))``; learning-rate schedules keep the ratio.

    Args:
        model: Any model.
        lr: Learning rate of all other parameters.
        offset_lr_scale: The predictors' share of it.
        weight_decay: Give it to the groups by timm's rule: none for biases, normalisations and what the model's
            ``no_weight_decay()`` names. None leaves it to the optimizer.
    """
    offsets = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, DeformableConv2d)
        for parameter in module.conv_offset.parameters()
    }
    exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else set()  # type: ignore[operator]
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim > 1 and name not in exempt and not name.endswith(".bias")
            key = (id(parameter) in offsets, decays or weight_decay is None)
            groups.setdefault(key, []).append(parameter)
    return [
        dict(params=groups[slow, decays], lr=lr * (offset_lr_scale if slow else 1))
        | ({} if weight_decay is None else dict(weight_decay=weight_decay if decays else 0.0))
        for slow, decays in sorted(groups)
    ]


# Leaves to timm's feature extraction by FX: their argument checks look at shapes.
for _module in OURS:
    register_notrace_module(_module)
