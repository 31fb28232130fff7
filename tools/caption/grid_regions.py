"""Regions as the cells of a grid: the last map of a timm backbone, pooled to 7 × 7."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from tools.caption.backbones import BadBackbone, TimmBackbone, read_weights
from tools.caption.regions import Regions, as_regions


class GridRegions:
    """Extractor with one region per cell, row by row, with the score 1; pictures are stretched to the network's size.

    Args:
        name: Model name in timm.
        cells: Number of cells per side.
        weights: ``"default"`` for timm's weights, ``"none"`` for random ones by ``seed``, or a file.
        size: (H, W) in pixels; None: the size stored in the file ``weights``, else the model's own.

    Attributes:
        map_size: (h, w) of the last batch's map. If it has fewer cells than the grid, some regions are equal.
    """

    map_size: tuple[int, int] | None = None

    def __init__(
        self,
        name: str,
        cells: int = 7,
        weights: str | Path = "default",
        device: str = "cpu",
        seed: int = 0,
        size: tuple[int, int] | None = None,
    ) -> None:
        if cells < 1:
            raise ValueError(f"--grid-size must be at least 1, got {cells}")
        torch.manual_seed(seed)
        stride = None
        if isinstance(weights, Path):  # the training size, if the file stores it
            metadata = read_weights(weights)[1]
            size = size or json.loads(metadata.get("size", metadata.get("input_size", "null")))
            stride = json.loads(metadata.get("output_stride", "null"))
        self.backbone = TimmBackbone(name, None if size is None else (size[0], size[1]), stride)
        if isinstance(weights, Path):
            self.backbone.load(weights)
        elif weights == "default":
            try:
                self.backbone.load_pretrained()
            except BadBackbone as error:
                raise ValueError(f"{error}; give --checkpoint FILE, or --no-weights") from error
        self.backbone.to(device).eval()
        self.cells, self.device = cells, device

    def prepare(self, picture: Image.Image) -> Tensor:
        """Return the normalised picture, (3, H, W)."""
        return self.backbone.prepare(picture)

    @torch.inference_mode()
    def __call__(self, batch: list[Tensor]) -> list[Regions]:
        n = self.cells
        maps = self.backbone(torch.stack(batch).to(self.device))
        self.map_size = maps.shape[2], maps.shape[3]
        maps = functional.adaptive_avg_pool2d(maps, n)
        corner = torch.arange(n * n)
        low = torch.stack([corner % n, corner // n], 1).float()
        boxes, scores = torch.cat([low, low + 1], 1), torch.ones(n * n)
        return [as_regions(features.T, boxes, scores, n, n) for features in maps.flatten(2)]
