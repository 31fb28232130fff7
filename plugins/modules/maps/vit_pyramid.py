"""Simple feature pyramid: maps at strides 4 to 32 from the last map of a vision transformer (Li et al. 2022)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..common.checks import positive
from .parts.vit_backbone import ViTBackbone, cells, resample


class MapNorm(nn.LayerNorm):
    """LayerNorm over the channels of maps (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ViTPyramid(ViTBackbone):
    """Vision transformer with the simple feature pyramid of ViTDet.

    Transposed convolutions and a maximum pooling make maps at strides 4, 8, 16 and 32 of the last block's map, each
    with a 1×1 and a 3×3 convolution, both normalized. If the patch size is not 16, the map is resampled first.

    Source: Li et al. (2022), "Exploring Plain Vision Transformer Backbones for Object Detection", section 3.

    Args:
        vit: See :class:`.ViTBackbone`.
        out_channels: Channels of the maps.
        num_outs: Number of maps; those after the fourth are every other pixel of the one before, as in an FPN.
        with_cp: Use activation checkpointing in training.

    Shapes:
        (B, 3, H, W) -> tuple of (B, out_channels, ⌈H / s⌉, ⌈W / s⌉), s = 4, 8, 16, 32, ...

    Raises:
        TypeError: ``vit`` is no vision transformer like timm's.
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        vit: nn.Module,
        out_channels: int = 256,
        num_outs: int = 4,
        with_cp: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(vit, with_cp)
        positive(out_channels=out_channels, num_outs=num_outs)
        C, out = self.embed_dim, out_channels
        self.num_outs = num_outs
        double = nn.ConvTranspose2d(C, C // 2, 2, stride=2)
        quadruple = (MapNorm(C // 2, eps=1e-6), nn.GELU(), nn.ConvTranspose2d(C // 2, C // 4, 2, stride=2))
        again = nn.ConvTranspose2d(C, C // 2, 2, stride=2)
        scales: list[tuple[nn.Module, ...]] = [(again, *quadruple), (double,), (), (nn.MaxPool2d(2, ceil_mode=True),)]
        self.scales = nn.ModuleList()
        for layers, width in list(zip(scales, (C // 4, C // 2, C, C)))[:num_outs]:
            reduce, mix = nn.Conv2d(width, out, 1, bias=False), nn.Conv2d(out, out, 3, padding=1, bias=False)
            self.scales.append(nn.Sequential(*layers, reduce, MapNorm(out, eps=1e-6), mix, MapNorm(out, eps=1e-6)))
        self.scales.to(device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Initialize the pyramid as PyTorch does; the transformer stays as it is."""
        for layer in self.scales.modules():
            if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d, nn.LayerNorm)):
                layer.reset_parameters()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return ``num_outs`` maps of pictures (B, 3, H, W).

        Raises:
            ValueError: ``x`` has another shape.
            TypeError: ``x`` is not a Tensor, or does not have the module's dtype.
        """
        tokens, grid, rotary = self.embed(x)
        tokens = self.run(tokens, grid, 0, len(self.vit.blocks) - 1, rotary)
        last = resample(self.patches(tokens, grid), self.patch_size, 16, cells(x, (16, 16)))
        maps = []
        for scale, stride in zip(self.scales, (4, 8, 16, 32)):
            H, W = cells(x, (stride, stride))
            maps.append(scale(last)[..., :H, :W])
        while len(maps) < self.num_outs:
            maps.append(F.max_pool2d(maps[-1], 1, stride=2))
        return tuple(maps)
