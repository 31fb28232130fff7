"""VGG with fc6 and fc7 as convolutions: the backbone of the attribute detector in Fang et al. (2015), Sec. 3.

The fully connected layers slide over the last map, so that each cell of a coarse grid has the features that the network
computes for one 224 × 224 window, 32 pixels from its neighbours. The classifier of the words is fc8, and
:mod:`tools.captioning.noisy_or` combines the cells.
"""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from timm.models.vgg import VGG
from torch import Tensor, nn

from tools.captioning.timm_backbone import BadBackbone, TimmBackbone

SIZE = (565, 565)  # pixels: Fang et al., Sec. 3
DROPOUT = 0.5  # of fc6 and fc7: Simonyan & Zisserman (2015), Sec. 3.1


class VggFc7(TimmBackbone):
    """A timm VGG up to fc7, whose map consists of 7 × 7 windows of the last pooling layer's output.

    The pooling layers round up, as in Fang et al.: 565 pixels give a grid of 12 cells per side. At 224 × 224 pixels,
    one cell, the features equal those of the fully connected layers.

    Args:
        name: Model name in timm: ``vgg11`` to ``vgg19_bn``.
        size: (H, W) of the images in pixels; None: 565 × 565.
        output_stride: As for :class:`TimmBackbone`; a VGG allows only 32.

    Attributes:
        num_features: 4,096.
        size: (H, W).

    Raises:
        BadBackbone: the model is not a VGG, or the images are smaller than the window.
    """

    def __init__(self, name: str, size: tuple[int, int] | None = None, output_stride: int | None = None) -> None:
        super().__init__(name, size, output_stride)
        if not isinstance(self.model, VGG):
            raise BadBackbone(f"fc7: the backbone must be a VGG of timm, such as vgg16, got {name}")
        self.size = size or SIZE
        head: Any = self.model.pre_logits
        self.num_features = head.fc2.out_channels
        head.drop.p = DROPOUT
        self.drop = nn.Dropout(DROPOUT)
        pools = [layer for layer in self.model.features if isinstance(layer, nn.MaxPool2d)]
        for pool in pools:
            pool.ceil_mode = True
        window = head.input_kernel_size
        least = (window - 1) * 2 ** len(pools) + 1  # every pooling layer rounds up, which leaves `window` cells
        if min(self.size) < least:
            H, W = self.size
            raise BadBackbone(
                f"fc7: the images of {name} must have at least {least} x {least} pixels, {window} x {window} cells for "
                f"fc6, got {H} x {W}"
            )

    def prepare(self, picture: Image.Image, shift: tuple[float, float] = (0.0, 0.0)) -> Tensor:
        """Scale the whole picture to fit ``size``, with its own aspect ratio, and normalise it: (3, H, W).

        The picture starts at the upper left corner; the rest has the mean colour.

        Args:
            picture: The picture, in RGB.
            shift: As for :meth:`TimmBackbone.prepare`.
        """
        H, W = self.size
        scale = min(H / picture.height, W / picture.width)
        h, w = (max(1, min(most, round(side * scale))) for most, side in ((H, picture.height), (W, picture.width)))
        image = torch.zeros(3, H, W)
        image[:, :h, :w] = self.normalised(picture, (h, w), shift)
        return image

    def forward(self, images: Tensor) -> Tensor:
        """Compute the feature map.

        Args:
            images (Tensor[B, 3, H, W]): Normalised.

        Returns:
            (Tensor[B, C, h, w]).
        """
        return self.drop(self.model.pre_logits(self.model.forward_features(images)))


def make_backbone(
    name: str, size: tuple[int, int] | None = None, output_stride: int | None = None, fc7: bool = False
) -> TimmBackbone:
    """Return a :class:`VggFc7` if ``fc7`` is set, else a :class:`TimmBackbone`; the other arguments are theirs."""
    return (VggFc7 if fc7 else TimmBackbone)(name, size, output_stride)
