"""ResNet-50 with attended residual blocks in its last two stages (Empirical, Fig. 2a and section 4.1)."""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.resnet import Bottleneck, ResNet
from torch import Tensor, nn

from ..modules.maps.bilateral import BilateralCrissCross2d
from ..modules.maps.criss_cross import CrissCross, CrissCrossAttention2d
from ..modules.maps.deformable_conv import DeformableConv2d
from ..modules.maps.dynamic_conv import DynamicConv2d
from ..modules.maps.generalized_attention import GeneralizedAttention2d
from .conventions import imagenet_cfg, initialize_ours

CRISS_CROSS: dict[str, type[CrissCross]] = {"cc": CrissCrossAttention2d, "bi-cc": BilateralCrissCross2d}


class AttendedBottleneck(Bottleneck):
    """Bottleneck of timm with attention after its 3×3 convolution, which may be deformable.

    Initially the attention's γ and the deformable convolution's offsets are 0, so that the block equals timm's block
    with the same weights. Other arguments are those of timm's ``Bottleneck``.

    Args:
        attention_type: The four bits of :class:`GeneralizedAttention2d`; ``'dynamic'`` for :class:`DynamicConv2d`;
            ``'cc'`` for :class:`CrissCrossAttention2d`; ``'bi-cc'`` for :class:`BilateralCrissCross2d`; ``'none'``.
        spatial_range: n_k, odd: the side of the window of keys, or of the dynamic kernel; -1 for all keys.
        deformable: Replace the 3×3 convolution by a deformable one.
        num_heads: Number of heads.
        attention_args: Further arguments of the attention, such as ``outside`` of ``'bi-cc'``.

    Shapes:
        (B, inplanes, H, W) -> (B, 4 * planes, H / stride, W / stride)
    """

    def __init__(
        self,
        *args: Any,
        attention_type: str = "1111",
        spatial_range: int = -1,
        deformable: bool = False,
        num_heads: int = 8,
        attention_args: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        options: dict[str, Any] = dict(device=kwargs.get("device"), dtype=kwargs.get("dtype"))
        own = {**(attention_args or {}), **options}
        conv: Any = self.conv2
        self.attention: nn.Module | None = None
        if attention_type == "dynamic":
            if spatial_range < 1:
                raise ValueError(f"spatial_range must be n_k of attention_type 'dynamic', odd, got {spatial_range!r}")
            self.attention = DynamicConv2d(conv.out_channels, spatial_range, **own)
        elif attention_type in CRISS_CROSS:
            self.attention = CRISS_CROSS[attention_type](conv.out_channels, **own)
        elif attention_type != "none":
            self.attention = GeneralizedAttention2d(conv.out_channels, num_heads, attention_type, spatial_range, **own)
        if deformable:
            self.conv2 = DeformableConv2d(  # type: ignore[assignment]
                conv.in_channels,
                conv.out_channels,
                conv.kernel_size,
                conv.stride,
                conv.padding,
                conv.dilation,
                conv.groups,
                bias=False,
                **options,
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.act2(self.drop_block(self.bn2(self.conv2(x))))
        x = self.aa(x)  # type: ignore[misc]
        if self.attention is not None:
            x = self.attention(x)
        x = self.bn3(self.conv3(x))
        if self.se is not None:
            x = self.se(x)
        if self.drop_path is not None:
            x = self.drop_path(x)
        return self.act3(x + shortcut)


class AttendedResNet(ResNet):
    """ResNet of timm whose weight initialization preserves that of this package's layers."""

    def init_weights(self, zero_init_last: bool = True) -> None:
        super().init_weights(zero_init_last=zero_init_last)
        initialize_ours(self)
        for module in self.modules():
            if isinstance(module, CrissCross):
                for layer in module.modules():
                    if isinstance(layer, nn.Conv2d):
                        layer.reset_parameters()


default_cfgs = generate_default_cfgs(
    {name: imagenet_cfg() for name in ("attn_resnet50", "attn1111_resnet50", "attn0010_dcn_resnet50", "dcn_resnet50")}
)


def _create(variant: str, pretrained: bool, attention_type: str, deformable: bool, **kwargs: Any) -> AttendedResNet:
    own = {name: kwargs.pop(name) for name in ("spatial_range", "attention_args") if name in kwargs}
    attended = partial(AttendedBottleneck, attention_type=attention_type, deformable=deformable, **own)
    attended.expansion = Bottleneck.expansion  # type: ignore[attr-defined]
    arguments = dict(block=(Bottleneck, Bottleneck, attended, attended), layers=(3, 4, 6, 3))
    return build_model_with_cfg(AttendedResNet, variant, pretrained, **{**arguments, **kwargs})


@register_model
def attn_resnet50(
    pretrained: bool = False, attention_type: str = "1111", deformable: bool = False, **kwargs: Any
) -> AttendedResNet:
    """Create a ResNet-50 with attention and optional deformable convolutions in conv4 and conv5.

    ``attention_type``, ``deformable``, ``spatial_range`` and ``attention_args`` are those of
    :class:`AttendedBottleneck`.
    """
    return _create("attn_resnet50", pretrained, attention_type, deformable, **kwargs)


@register_model
def attn1111_resnet50(pretrained: bool = False, **kwargs: Any) -> AttendedResNet:
    """Create a ResNet-50 with all four attention terms."""
    return _create("attn1111_resnet50", pretrained, "1111", False, **kwargs)


@register_model
def attn0010_dcn_resnet50(pretrained: bool = False, **kwargs: Any) -> AttendedResNet:
    """Create a ResNet-50 with key saliency and deformable convolution, the paper's recommended trade-off (Table 2)."""
    return _create("attn0010_dcn_resnet50", pretrained, "0010", True, **kwargs)


@register_model
def dcn_resnet50(pretrained: bool = False, **kwargs: Any) -> AttendedResNet:
    """Create a ResNet-50 with deformable convolution and no attention."""
    return _create("dcn_resnet50", pretrained, "none", True, **kwargs)
