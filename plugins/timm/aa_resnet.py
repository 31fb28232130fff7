"""Attention-augmented ResNets: augmented 3×3 convolutions in the last three stages (Bello et al. 2019, 4.2).

Elsewhere in timm "aa" means anti-aliasing (``aa_layer``); here it is the paper's name for attention augmentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import to_2tuple
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import nn

from ..modules.maps.augmented_conv import AAConv2d, Position
from .conventions import Augmented, imagenet_cfg, initialize_ours

LAYERS = {34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def augment(conv: nn.Module, input_size: Sequence[int], **options: Any) -> AAConv2d:
    """Create the augmented version of a convolution, with its channels, kernel, stride and dilation."""
    assert isinstance(conv, nn.Conv2d)
    weight = conv.weight
    return AAConv2d.from_ratios(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,
        stride=conv.stride[0],
        dilation=conv.dilation[0],
        groups=conv.groups,
        bias=conv.bias is not None,
        input_size=input_size,
        device=weight.device,
        dtype=weight.dtype,
        **options,
    )


class _AugmentedBlock(nn.Module):
    """Mixin of timm's residual blocks that augments the convolution called ``augmented``.

    Args:
        output_size: (H, W) of the block's output, the size of the relative position tables.
        augmentation: Arguments of :meth:`AAConv2d.from_ratios`.
        *args: Positional arguments of timm's block.
        **kwargs: Keyword arguments of timm's block.
    """

    augmented: str
    stride: int

    def __init__(self, *args: Any, output_size: tuple[int, int], augmentation: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        size = [n * self.stride for n in output_size]
        setattr(self, self.augmented, augment(getattr(self, self.augmented), size, **augmentation))


class AABasicBlock(_AugmentedBlock, BasicBlock):
    """Basic block of timm with an augmented first 3×3 convolution.

    It also takes ``output_size``, the (H, W) of its output and of the relative position tables, and ``augmentation``,
    the arguments of :meth:`AAConv2d.from_ratios`.

    Shapes:
        (B, inplanes, H, W) -> (B, planes, ⌈H / stride⌉, ⌈W / stride⌉)
    """

    augmented = "conv1"


class AABottleneck(_AugmentedBlock, Bottleneck):
    """Bottleneck of timm with an augmented 3×3 convolution; it takes the arguments of :class:`AABasicBlock` as well.

    Shapes:
        (B, inplanes, H, W) -> (B, 4 * planes, ⌈H / stride⌉, ⌈W / stride⌉)
    """

    augmented = "conv2"


class AAResNet(Augmented, ResNet):
    """ResNet of timm with attention-augmented blocks in its last three stages (Bello et al. 2019, section 4.2).

    Attention runs at each block's output resolution; in layer2, which has the largest maps, these are first
    average-pooled by 3×3 windows with stride 2.

    Args:
        block: ``BasicBlock`` or ``Bottleneck``.
        layers: Number of blocks in each of the four stages.
        kappa: κ, ratio of key depth to a convolution's output channels.
        nu: υ, ratio of attention channels; 0 gives the plain ResNet, 1 a fully attentional one.
        num_heads: Number of heads.
        min_key_dim_per_head: Minimum key depth per head.
        position: ``'relative'``, ``'none'``, ``'sine'`` or ``'coordconv'``; see :class:`AAConv2d`.
        img_size: Image size (H, W) of the relative position tables, which are interpolated to other sizes.
        pool: Pool the maps of layer2 for attention.
        kwargs: Arguments of timm's ``ResNet``.

    Shapes:
        (B, in_chans, H, W) -> (B, num_classes)

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        layers: tuple[int, ...],
        kappa: float = 0.2,
        nu: float = 0.1,
        num_heads: int = 8,
        min_key_dim_per_head: int = 20,
        position: Position = "relative",
        img_size: int | tuple[int, int] = 224,
        pool: bool = True,
        **kwargs: Any,
    ) -> None:
        size, stride = to_2tuple(img_size), kwargs.get("output_stride", 32)
        augmented = AABasicBlock if block is BasicBlock else AABottleneck
        augmentation = dict(
            kappa=kappa, nu=nu, num_heads=num_heads, min_key_dim_per_head=min_key_dim_per_head, position=position
        )

        def stage(reduction: int, pool: bool = False) -> Any:
            reduction = min(reduction, stride)
            block: Any = partial(
                augmented,
                output_size=tuple(-(-n // reduction) for n in size),
                augmentation=dict(augmentation, pool=pool),
            )
            block.expansion = augmented.expansion
            return block

        super().__init__((block, stage(8, pool), stage(16), stage(32)), layers, **kwargs)  # type: ignore[arg-type]

    @torch.jit.ignore
    def init_weights(self, zero_init_last: bool = True) -> None:
        """Initialize by timm's rules, and the attention's parts like the paper's code."""
        super().init_weights(zero_init_last=zero_init_last)
        initialize_ours(self)


default_cfgs = generate_default_cfgs({f"aa_resnet{depth}": imagenet_cfg() for depth in LAYERS})


def _create(depth: int, pretrained: bool, **kwargs: Any) -> AAResNet:
    block = BasicBlock if depth == 34 else Bottleneck
    return build_model_with_cfg(
        AAResNet, f"aa_resnet{depth}", pretrained, **{**dict(block=block, layers=LAYERS[depth]), **kwargs}
    )


@register_model
def aa_resnet34(pretrained: bool = False, **kwargs: Any) -> AAResNet:
    """Create AA-ResNet-34, κ = υ = 0.25; the first convolution of each block is augmented."""
    return _create(34, pretrained, **{**dict(kappa=0.25, nu=0.25), **kwargs})


@register_model
def aa_resnet50(pretrained: bool = False, **kwargs: Any) -> AAResNet:
    """Create AA-ResNet-50, κ = 2υ = 0.2 (Table 3; ``kappa`` and ``nu`` give the variants of Table 6)."""
    return _create(50, pretrained, **kwargs)


@register_model
def aa_resnet101(pretrained: bool = False, **kwargs: Any) -> AAResNet:
    """Create AA-ResNet-101, κ = 2υ = 0.2."""
    return _create(101, pretrained, **kwargs)


@register_model
def aa_resnet152(pretrained: bool = False, **kwargs: Any) -> AAResNet:
    """Create AA-ResNet-152, κ = 2υ = 0.2."""
    return _create(152, pretrained, **kwargs)
