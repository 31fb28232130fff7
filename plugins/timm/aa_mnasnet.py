"""Attention-augmented MnasNets: augmented expansions in the last 13 inverted residuals (Bello et al. 2019, 4.3)."""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.layers import to_2tuple
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._efficientnet_blocks import InvertedResidual
from timm.models._efficientnet_builder import decode_arch_def, round_channels
from timm.models.efficientnet import EfficientNet
from torch import nn

from ..modules.maps.augmented_conv import AAConv2d, Position
from .aa_resnet import augment
from .conventions import Augmented, imagenet_cfg

# MnasNet-A1 in timm's notation (Tan et al. 2019, Figure 7), one stage per line.
STAGES = (
    ("ds_r1_k3_s1_e1_c16_noskip",),
    ("ir_r2_k3_s2_e6_c24",),
    ("ir_r3_k5_s2_e3_c40_se0.25",),
    ("ir_r4_k3_s2_e6_c80",),
    ("ir_r2_k3_s1_e6_c112_se0.25",),
    ("ir_r3_k5_s2_e6_c160_se0.25",),
    ("ir_r1_k3_s1_e6_c320",),
)
FIRST_AUGMENTED = 2  # the stage that reduces 56×56 to 28×28
POOLED_REDUCTION = 8


class AAMnasNet(Augmented, EfficientNet):
    """MnasNet-A1 with augmented pointwise expansions in its last 13 blocks (Bello et al. 2019, section 4.3).

    An expansion runs at its block's input resolution. At an eighth of the image resolution (28×28 of 224×224) or above,
    attention runs on maps that are average-pooled by 3×3 windows with stride 2.

    Args:
        kappa: κ, ratio of key depth to an expansion's channels.
        nu: υ, ratio of attention channels, at least one per head; 0 gives the plain MnasNet.
        num_heads: Number of heads.
        min_key_dim_per_head: Minimum key depth per head.
        position: ``'relative'``, ``'none'``, ``'sine'`` or ``'coordconv'``; see :class:`AAConv2d`.
        img_size: Image size (H, W) of the relative position tables, which are interpolated to other sizes.
        pool: Pool maps at an eighth of the image resolution or above for attention.
        kwargs: Arguments of timm's ``EfficientNet``.

    Shapes:
        (B, in_chans, H, W) -> (B, num_classes)

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        kappa: float = 0.1,
        nu: float = 0.05,
        num_heads: int = 4,
        min_key_dim_per_head: int = 1,
        position: Position = "relative",
        img_size: int | tuple[int, int] = 224,
        pool: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        H, W = (-(-n // 2) for n in to_2tuple(img_size))
        reduction = 2
        for i, stage in enumerate(self.blocks):
            for block in stage:  # type: ignore[attr-defined]
                if i >= FIRST_AUGMENTED and isinstance(block, InvertedResidual):
                    block.conv_pw = augment(
                        block.conv_pw,
                        (H, W),
                        kappa=kappa,
                        nu=nu,
                        num_heads=num_heads,
                        min_key_dim_per_head=min_key_dim_per_head,
                        min_value_dim_per_head=1,
                        position=position,
                        pool=pool and reduction <= POOLED_REDUCTION,
                    )
                    _initialize(block.conv_pw)
                stride = block.conv_dw.stride[0] * getattr(block.aa, "stride", 1)  # `aa_layer` takes over the stride
                H, W, reduction = -(-H // stride), -(-W // stride), reduction * stride


def _initialize(layer: AAConv2d) -> None:
    """Initialize the convolution like timm's MnasNet: normal by fan-out."""
    if layer.conv is not None:
        nn.init.kaiming_normal_(layer.conv.weight, mode="fan_out", nonlinearity="relu")


VARIANTS = {"aa_mnasnet_075": 0.75, "aa_mnasnet_100": 1.0, "aa_mnasnet_125": 1.25, "aa_mnasnet_140": 1.4}
default_cfgs = generate_default_cfgs(
    {name: imagenet_cfg(first_conv="conv_stem", classifier="classifier", interpolation="bicubic") for name in VARIANTS}
)


def _create(variant: str, pretrained: bool, **kwargs: Any) -> AAMnasNet:
    arguments = dict(
        block_args=decode_arch_def([list(stage) for stage in STAGES]),
        stem_size=32,
        round_chs_fn=partial(round_channels, multiplier=VARIANTS[variant]),
        feature_cfg=dict(feature_cls="getter"),
    )
    return build_model_with_cfg(AAMnasNet, variant, pretrained, **{**arguments, **kwargs})


@register_model
def aa_mnasnet_075(pretrained: bool = False, **kwargs: Any) -> AAMnasNet:
    """Create AA-MnasNet with 0.75 times the channels, κ = 2υ = 0.1."""
    return _create("aa_mnasnet_075", pretrained, **kwargs)


@register_model
def aa_mnasnet_100(pretrained: bool = False, **kwargs: Any) -> AAMnasNet:
    """Create AA-MnasNet-1.0, κ = 2υ = 0.1."""
    return _create("aa_mnasnet_100", pretrained, **kwargs)


@register_model
def aa_mnasnet_125(pretrained: bool = False, **kwargs: Any) -> AAMnasNet:
    """Create AA-MnasNet with 1.25 times the channels, κ = 2υ = 0.1."""
    return _create("aa_mnasnet_125", pretrained, **kwargs)


@register_model
def aa_mnasnet_140(pretrained: bool = False, **kwargs: Any) -> AAMnasNet:
    """Create AA-MnasNet with 1.4 times the channels, κ = 2υ = 0.1."""
    return _create("aa_mnasnet_140", pretrained, **kwargs)
