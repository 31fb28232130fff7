"""Attention-augmented ResNets as backbones of mmdet and mmsegmentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmcv.cnn import build_norm_layer
from mmengine.model import BaseModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


class AAResNet(BaseModule):
    """``aa_resnet{depth}`` of timm with the arguments of the toolkits' ``ResNet`` (Bello et al. 2019, section 4.4).

    In a config that inherits from an upstream one, ``type='AAResNet'`` replaces ``type='ResNet'``. The keys of the
    state_dict are those of the timm model, so that a checkpoint of timm's ``train.py`` loads with
    ``init_cfg=dict(type='Pretrained', checkpoint='….pth.tar')``.

    Args:
        depth: 34, 50, 101 or 152.
        in_channels: Channels of the images.
        num_stages: Number of stages to build, 1 to 4.
        out_indices: Stages whose outputs are returned, 0 to ``num_stages`` - 1.
        frozen_stages: Freeze the stem (0) and the stages up to this number; -1 freezes nothing.
        norm_cfg: Config of all normalizations.
        norm_eval: Keep the running statistics of normalizations in training.
        with_cp: Use activation checkpointing in the stages.
        style: ``'pytorch'``: the stride is in the 3×3 convolutions.
        input_size: (H, W) of the relative position tables, which are interpolated to other sizes.
        init_cfg: Initialization; None trains from scratch, as in the paper.
        options: Options of the timm model: ``kappa``, ``nu``, ``num_heads``, ``position``, ...

    Shapes:
        (B, in_channels, H, W) -> tuple of (B, C_i, ⌈H / 2^(i + 2)⌉, ⌈W / 2^(i + 2)⌉)

    Raises:
        ImportError: timm is not installed.
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        depth: int = 50,
        in_channels: int = 3,
        num_stages: int = 4,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        frozen_stages: int = -1,
        norm_cfg: dict[str, Any] | None = None,
        norm_eval: bool = False,
        with_cp: bool = False,
        style: str = "pytorch",
        input_size: int | Sequence[int] = (224, 224),
        init_cfg: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(init_cfg)
        if depth not in (34, 50, 101, 152):
            raise ValueError(f"depth must be 34, 50, 101 or 152, got {depth!r}")
        if not 1 <= num_stages <= 4:
            raise ValueError(f"num_stages must be from 1 to 4, got {num_stages!r}")
        if not out_indices or any(i not in range(num_stages) for i in out_indices):
            raise ValueError(f"out_indices must be from 0 to num_stages - 1 = {num_stages - 1}, got {out_indices!r}")
        if not -1 <= frozen_stages <= num_stages:
            raise ValueError(f"frozen_stages must be from -1 to num_stages = {num_stages}, got {frozen_stages!r}")
        if style != "pytorch":
            raise ValueError(f"style must be 'pytorch', the only supported style, got {style!r}")
        timm = import_timm("AAResNet is")
        norm_cfg = dict(type="BN", requires_grad=True) if norm_cfg is None else norm_cfg

        def norm_layer(channels: int, **_: Any) -> nn.Module:
            return build_norm_layer(norm_cfg, channels)[1]

        size = (input_size, input_size) if isinstance(input_size, int) else tuple(input_size)
        model = timm.create_model(
            f"aa_resnet{depth}", in_chans=in_channels, norm_layer=norm_layer, img_size=size, **options
        )
        self.out_indices, self.frozen_stages = tuple(out_indices), frozen_stages
        self.norm_eval, self.with_cp = norm_eval, with_cp
        self.stem = ("conv1", "bn1", "act1", "maxpool")
        self.stages = tuple(f"layer{n + 1}" for n in range(num_stages))
        for name in (*self.stem, *self.stages):
            self.add_module(name, getattr(model, name))
        self._freeze()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of the stages in ``out_indices``."""
        for name in self.stem:
            x = getattr(self, name)(x)
        outputs = []
        for i, name in enumerate(self.stages):
            for block in getattr(self, name):
                x = checkpoint(block, x, use_reentrant=False) if self.with_cp and self.training else block(x)
            if i in self.out_indices:
                outputs.append(x)
        return tuple(outputs)

    def train(self, mode: bool = True) -> AAResNet:
        """Set the training mode; frozen parts stay in evaluation mode."""
        super().train(mode)
        self._freeze()
        if mode and self.norm_eval:
            for module in self.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self

    def _freeze(self) -> None:
        if self.frozen_stages < 0:
            return
        for name in (*self.stem, *self.stages[: self.frozen_stages]):
            getattr(self, name).eval().requires_grad_(False)


def import_timm(what: str) -> Any:
    """Import timm with this package's models on demand, because mm users without these models need no timm."""
    try:
        import timm
    except ImportError as error:
        raise ImportError(f"{what} a timm model: pip install timm") from error
    from .. import timm as _registers_our_models  # noqa: F401

    return timm


def load_from_safetensors(filename: str, map_location: Any = None) -> dict[str, dict[str, Tensor]]:
    """Load a local ``.safetensors`` file as a checkpoint of mmengine, whose hooks read its ``state_dict``."""
    from safetensors.torch import load_file

    return {"state_dict": load_file(filename, device=str(map_location or "cpu"))}
