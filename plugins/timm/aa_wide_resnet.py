"""Attention-augmented Wide-ResNet of the CIFAR experiments (Bello et al. 2019, section 4.1)."""
# No postponed annotations: FX copies them into generated code, where TorchScript must resolve the names.

from typing import Any

import torch
from timm.layers import create_attn, create_classifier, to_2tuple
from timm.models import build_model_with_cfg, checkpoint_seq, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.nn import functional as F

from ..modules.maps.augmented_conv import AAConv2d, Position
from .conventions import Augmented, imagenet_cfg, initialize_ours


class AAWideBlock(nn.Module):
    """Block of two 3×3 convolutions with pre-activation, the first augmented; the shortcut has no parameters.

    If the shape changes, the shortcut is the activated input, average-pooled by the stride and padded with zero
    channels.

    Args:
        inplanes: Input channels.
        planes: Output channels.
        stride: Stride of the first convolution.
        augmentation: Arguments of :meth:`AAConv2d.from_ratios`.
        drop_rate: Dropout between the convolutions.
        attn_layer: timm's name of a layer after the second convolution, such as ``'se'``, or None.
        attn_args: Arguments of that layer.

    Shapes:
        (B, inplanes, H, W) -> (B, planes, ⌈H / stride⌉, ⌈W / stride⌉)
    """

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int,
        augmentation: dict[str, Any],
        drop_rate: float = 0.0,
        attn_layer: str | None = None,
        attn_args: dict[str, Any] | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        dd = dict(device=device, dtype=dtype)
        self.bn1 = nn.BatchNorm2d(inplanes, **dd)
        self.conv1 = AAConv2d.from_ratios(inplanes, planes, 3, stride=stride, **augmentation, **dd)
        self.bn2 = nn.BatchNorm2d(planes, **dd)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False, **dd)
        self.drop = nn.Dropout(drop_rate)
        self.attn = _attention(attn_layer, planes, {**(attn_args or {}), **dd})
        self.stride = stride
        self.padding = planes - inplanes

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.bn1(x))
        shortcut = x
        if self.stride > 1 or self.padding:
            shortcut = activated
            if self.stride > 1:
                shortcut = F.avg_pool2d(shortcut, self.stride, self.stride, ceil_mode=True)
            shortcut = F.pad(shortcut, (0, 0, 0, 0, 0, self.padding))
        x = self.conv1(activated)
        x = self.attn(self.conv2(self.drop(F.relu(self.bn2(x)))))
        return x + shortcut


def _attention(name: str | None, channels: int, arguments: dict[str, Any]) -> nn.Module:
    try:
        return create_attn(name, channels, **arguments) or nn.Identity()
    except AssertionError as error:
        raise ValueError(
            f"attn_layer must be one of timm's attention layers, such as se, ge, cbam or eca, got {name!r}"
        ) from error


class AAWideResNet(Augmented):
    """Wide-ResNet for small images with an augmented first convolution in each block (Bello et al. 2019, section 4.1).

    Args:
        depth: 6n + 4 layers, with n blocks in each of three stages.
        width: Factor of the channels 16, 32 and 64.
        num_classes: Outputs of the classifier; 0 for no classifier.
        in_chans: Channels of the images.
        global_pool: timm's name of the pooling before the classifier.
        kappa: κ, ratio of key depth to a convolution's output channels.
        nu: υ, ratio of attention channels; 0 gives the plain Wide-ResNet.
        num_heads: Number of heads.
        min_key_dim_per_head: Minimum key depth per head.
        position: ``'relative'``, ``'none'``, ``'sine'`` or ``'coordconv'``; see :class:`AAConv2d`.
        img_size: Image size (H, W) of the relative position tables, which are interpolated to other sizes.
        drop_rate: Dropout before the classifier.
        block_drop_rate: Dropout between the convolutions of a block.
        attn_layer: timm's name of a layer at the end of each block's branch, or None: ``'se'``, ``'ge'``, ``'cbam'``,
            ... (with ``nu=0`` the baselines of Bello et al., Table 1).
        attn_args: Arguments of that layer, such as ``dict(use_mlp=False)`` for ``'ge'`` without parameters.

    Shapes:
        (B, in_chans, H, W) -> (B, num_classes)

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        depth: int = 28,
        width: int = 10,
        num_classes: int = 100,
        in_chans: int = 3,
        global_pool: str = "avg",
        kappa: float = 0.2,
        nu: float = 0.1,
        num_heads: int = 8,
        min_key_dim_per_head: int = 20,
        position: Position = "relative",
        img_size: int | tuple[int, int] = 32,
        drop_rate: float = 0.0,
        block_drop_rate: float = 0.0,
        attn_layer: str | None = None,
        attn_args: dict[str, Any] | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"depth must be 6n + 4 for n >= 1 blocks per stage, got {depth!r}")
        dd = dict(device=device, dtype=dtype)
        augmentation = dict(
            kappa=kappa, nu=nu, num_heads=num_heads, min_key_dim_per_head=min_key_dim_per_head, position=position
        )
        self.num_classes, self.in_chans, self.drop_rate = num_classes, in_chans, drop_rate
        self.grad_checkpointing = False
        self.conv1 = nn.Conv2d(in_chans, 16, 3, 1, 1, bias=False, **dd)
        self.feature_info = [dict(num_chs=16, reduction=1, module="conv1")]
        inplanes, size = 16, to_2tuple(img_size)
        for i in range(3):
            planes, blocks = 16 * width * 2**i, []
            for n in range((depth - 4) // 6):
                stride = 2 if i > 0 and n == 0 else 1
                options = dict(augmentation, input_size=size)
                blocks.append(
                    AAWideBlock(inplanes, planes, stride, options, block_drop_rate, attn_layer, attn_args, **dd)
                )
                inplanes, size = planes, tuple(-(-s // stride) for s in size)
            self.add_module(f"layer{i + 1}", nn.Sequential(*blocks))
            self.feature_info.append(dict(num_chs=planes, reduction=2**i, module=f"layer{i + 1}"))
        self.bn = nn.BatchNorm2d(inplanes, **dd)
        self.act = nn.ReLU()
        self.num_features = self.head_hidden_size = inplanes
        self.global_pool, self.fc = create_classifier(inplanes, num_classes, pool_type=global_pool, **dd)
        self.head_hidden_size = inplanes * self.global_pool.feat_mult()
        self.init_weights()

    @torch.jit.ignore
    def init_weights(self) -> None:
        """Initialize convolutions normally by fan-out, and the attention's parts like the paper's code."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
        initialize_ours(self)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns that group parameters by depth, in stages or blocks."""
        return dict(
            stem=r"^conv1", blocks=r"^layer(\d+)" if coarse else [(r"^layer(\d+)\.(\d+)", None), (r"^bn", (99999,))]
        )

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Enable activation checkpointing of the blocks."""
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self, name_only: bool = False) -> nn.Module | str:
        """Return the classifier, or its name."""
        return "fc" if name_only else self.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier; the pooling stays unless another is given."""
        self.num_classes = num_classes
        pool = self.global_pool.pool_type if global_pool is None else global_pool
        weight = self.conv1.weight
        self.global_pool, self.fc = create_classifier(
            self.num_features, num_classes, pool_type=pool, device=weight.device, dtype=weight.dtype
        )
        self.head_hidden_size = self.num_features * self.global_pool.feat_mult()
        self.global_pool.train(self.training)
        self.fc.train(self.training)

    def _stage(self, stage: nn.Module, x: Tensor) -> Tensor:
        if self.grad_checkpointing:
            return checkpoint_seq(stage, x)
        return stage(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Compute the features after the stem (0) and the stages (1 to 3), and the final features.

        Args:
            x: (B, in_chans, H, W).
            indices: Indices of the features, or n for the last n; None for all.
            norm: Normalize and activate the features of the last stage.
            stop_early: Skip the stages after the last requested one.
            output_fmt: ``'NCHW'``.
            intermediates_only: Return only the list of features.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt must be 'NCHW', got {output_fmt!r}")
        features = []
        take, last = feature_take_indices(4, indices)
        x = self.conv1(x)
        if 0 in take:
            features.append(x)
        stages = (self.layer1, self.layer2, self.layer3)
        for i, stage in enumerate(stages[:last] if stop_early else stages, 1):
            x = self._stage(stage, x)  # type: ignore[arg-type]
            if i in take:
                features.append(self.act(self.bn(x)) if norm and i == 3 else x)
        if intermediates_only:
            return features
        return (self.act(self.bn(x)) if not stop_early or last == 3 else x), features

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove what the requested intermediate features do not need, and return their indices."""
        take, last = feature_take_indices(4, indices)
        for i in range(last + 1, 4):
            setattr(self, f"layer{i}", nn.Sequential())
        if prune_norm or last < 3:
            self.bn, self.act = nn.Identity(), nn.Identity()  # type: ignore[assignment]
        if last < 3:
            self.num_features = self.feature_info[last]["num_chs"]  # type: ignore[assignment]
        if prune_head or last < 3:
            self.reset_classifier(0, "")
        return take

    def forward_features(self, x: Tensor) -> Tensor:
        """Compute features, (B, in_chans, H, W) -> (B, 64 * width, ⌈H / 4⌉, ⌈W / 4⌉)."""
        x = self.conv1(x)
        if self.grad_checkpointing:
            x = checkpoint_seq([self.layer1, self.layer2, self.layer3], x, flatten=True)
        else:
            x = self.layer1(x)  # type: ignore[operator]
            x = self.layer2(x)  # type: ignore[operator]
            x = self.layer3(x)  # type: ignore[operator]
        return self.act(self.bn(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool and classify; with ``pre_logits``, only pool."""
        x = self.global_pool(x)
        if self.drop_rate > 0.0:
            x = F.dropout(x, p=self.drop_rate, training=self.training)
        return x if pre_logits else self.fc(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


default_cfgs = generate_default_cfgs(
    {
        "aa_wide_resnet28_10": imagenet_cfg(
            num_classes=100,
            input_size=(3, 32, 32),
            pool_size=(8, 8),
            crop_pct=1.0,
            mean=(0.5071, 0.4866, 0.4409),  # statistics of CIFAR-100's training images
            std=(0.2673, 0.2564, 0.2762),
        )
    }
)


@register_model
def aa_wide_resnet28_10(pretrained: bool = False, **kwargs: Any) -> AAWideResNet:
    """Create AA-Wide-ResNet-28-10 for CIFAR, κ = 2υ = 0.2; ``nu=0`` gives the plain network of Table 1."""
    features = dict(out_indices=(0, 1, 2, 3))
    return build_model_with_cfg(AAWideResNet, "aa_wide_resnet28_10", pretrained, feature_cfg=features, **kwargs)
