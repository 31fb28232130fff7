"""Segmentation heads for this package's modules; they need mmsegmentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mmcv.cnn import ConvModule
from mmseg.models.backbones import ResNet
from mmseg.models.decode_heads import DepthwiseSeparableASPPHead, FCNHead, NLHead
from mmseg.models.decode_heads.decode_head import BaseDecodeHead
from mmseg.models.utils import resize
from mmseg.registry import MODELS
from torch import Tensor, nn


@MODELS.register_module(force=True)
class AttentionHead(FCNHead):
    """CCNet's head with any attention module: convolution, attention, convolution, concatenation, classifier.

    In a config that inherits from an upstream ``ccnet_*``, set
    ``decode_head=dict(type='AttentionHead', attention=dict(type=...))``; the other keys are those of ``CCHead``. From
    another upstream config, delete the head's ``num_convs``, which is 2 here.

    Args:
        attention: A plug-in layer, ``(channels, H, W) -> (channels, H, W)``, or None.
        recurrence: Number of times that the attention is applied, with the same weights.
        options: Options of mmseg's ``FCNHead``.
    """

    def __init__(self, attention: dict[str, Any] | None = None, recurrence: int = 1, **options: Any) -> None:
        super().__init__(num_convs=2, **options)
        if not isinstance(recurrence, int) or recurrence < 1:
            raise ValueError(f"recurrence must be a positive int, got {recurrence!r}")
        self.recurrence = recurrence
        self.attention = None if attention is None else MODELS.build({"in_channels": self.channels, **attention})

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Compute logits (B, num_classes, H, W) from the features of a backbone."""
        x = self._transform_inputs(inputs)
        output = self.convs[0](x)
        if self.attention is not None:
            for _ in range(self.recurrence):
                output = self.attention(output)
        output = self.convs[1](output)
        if self.concat_input:
            output = self.conv_cat(torch.cat((x, output), 1))
        return self.cls_seg(output)


@MODELS.register_module(force=True)
class NonLocalAttentionHead(NLHead):
    """``NLHead`` of mmseg with another module instead of its non-local block.

    Args:
        attention: A plug-in layer, ``(channels, H, W) -> (channels, H, W)``, which also receives the head's
            ``reduction``.
        options: Options of mmseg's ``NLHead``.
    """

    def __init__(self, attention: dict[str, Any], **options: Any) -> None:
        super().__init__(**options)
        arguments = {"in_channels": self.channels, "reduction": self.reduction, **attention}
        self.nl_block = MODELS.build(arguments)


@MODELS.register_module(force=True)
class SingleConvASPPHead(DepthwiseSeparableASPPHead):
    """DeepLabv3+ whose decoder has one 3×3 convolution, or another layer instead (thesis, section 4.4.1).

    The convolution follows a 1×1 convolution that maps the features to ``channels``.

    Args:
        fusion_cfg: mmcv's ``conv_cfg`` of the 3×3 convolution; None for a plain one.
        options: Options of mmseg's ``DepthwiseSeparableASPPHead``.
    """

    def __init__(self, fusion_cfg: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        low_level = 0 if self.c1_bottleneck is None else self.c1_bottleneck.out_channels
        shared = dict(norm_cfg=self.norm_cfg, act_cfg=self.act_cfg)
        self.sep_bottleneck = nn.Sequential(
            ConvModule(self.channels + low_level, self.channels, 1, **shared),
            ConvModule(self.channels, self.channels, 3, padding=1, conv_cfg=fusion_cfg, bias=True, **shared),
        )


@MODELS.register_module(force=True)
class StemResNet(ResNet):
    """``ResNet`` of mmseg that also returns the stem's features first: res-1 of the thesis' U-Net.

    Shapes:
        (B, 3, H, W) -> (B, 64, ⌈H / 2⌉, ⌈W / 2⌉) and the stages in ``out_indices``
    """

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the features of the stem and of the stages."""
        stem = self.stem(x) if self.deep_stem else self.relu(self.norm1(self.conv1(x)))
        x, outputs = self.maxpool(stem), [stem]
        for i, name in enumerate(self.res_layers):
            x = getattr(self, name)(x)
            if i in self.out_indices:
                outputs.append(x)
        return tuple(outputs)


@MODELS.register_module(force=True)
class UNetHead(BaseDecodeHead):
    """U-Net decoder in which a 3×3 layer fuses the features with those of the next lower level (thesis, Table 4.5).

    Args:
        fusion_channels: Output channels of the fusions, beginning with the deepest.
        fusion_cfgs: mmcv's ``conv_cfg`` of each fusion; None for plain convolutions.
        options: Options of mmseg's ``BaseDecodeHead``; ``in_channels`` lists the levels from the lowest to the deepest,
            one more than there are fusions.
    """

    def __init__(
        self,
        fusion_channels: Sequence[int] = (512, 256, 256, 128),
        fusion_cfgs: Sequence[dict[str, Any] | None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(input_transform="multiple_select", channels=fusion_channels[-1], **options)
        if len(self.in_channels) != len(fusion_channels) + 1:
            raise ValueError(
                f"in_channels must have {len(fusion_channels) + 1} items, one more than fusion_channels, "
                f"got {self.in_channels}"
            )
        if fusion_cfgs is not None and len(fusion_cfgs) != len(fusion_channels):
            raise ValueError(f"fusion_cfgs must have {len(fusion_channels)} items, one per fusion, got {fusion_cfgs}")
        width, *levels = reversed(self.in_channels)
        self.fusions = nn.ModuleList()
        for level, channels, cfg in zip(levels, fusion_channels, fusion_cfgs or [None] * len(fusion_channels)):
            self.fusions.append(
                ConvModule(
                    width + level, channels, 3, padding=1, conv_cfg=cfg, bias=True, norm_cfg=self.norm_cfg,
                    act_cfg=self.act_cfg,
                )
            )  # fmt: skip
            width = channels

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Compute logits (B, num_classes, H, W) from the features of a backbone, at the lowest level's size."""
        x, *levels = reversed(self._transform_inputs(inputs))
        for level, fusion in zip(levels, self.fusions):
            x = resize(x, size=level.shape[2:], mode="bilinear", align_corners=self.align_corners)
            x = fusion(torch.cat((x, level), 1))
        return self.cls_seg(x)
