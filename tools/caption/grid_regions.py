"""Regions as the cells of a grid: the last map of a timm backbone, pooled to 7 × 7."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from tools.caption.backbones import BadBackbone, TimmBackbone, read_weights
from tools.caption.regions import Regions, as_regions


class GridRegions:
    """Extractor with one region per cell, row by row, with the score 1; pictures are stretched to the network's size.

    Args:
        name: Model name in timm.
        cells: Number of cells per side. If the map has fewer, some regions are equal.
        weights: ``"default"`` for timm's weights, ``"none"`` for random ones by ``seed``, or a file.
        size: (H, W) in pixels; None: the size stored in the file ``weights``, else the model's own.
    """

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
        if size is None and isinstance(weights, Path):
            metadata = read_weights(weights)[1]
            size = json.loads(metadata.get("size", metadata.get("input_size", "null")))
        self.backbone = TimmBackbone(name, None if size is None else (size[0], size[1]))
        if isinstance(weights, Path):
            self.backbone.load(weights)
        elif weights == "default":
            try:
                self.backbone.load_pretrained()
            except BadBackbone as error:
                raise ValueError(f"{error}; give --checkpoint FILE, or --no-weights") from error
        self.backbone.to(device).eval()
        self.prepare, self.cells, self.device = self.backbone.prepare, cells, device

    @torch.inference_mode()
    def __call__(self, batch: list[Tensor]) -> list[Regions]:
        n = self.cells
        maps = functional.adaptive_avg_pool2d(self.backbone(torch.stack(batch).to(self.device)), n)
        corner = torch.arange(n * n)
        low = torch.stack([corner % n, corner // n], 1).float()
        boxes, scores = torch.cat([low, low + 1], 1), torch.ones(n * n)
        return [as_regions(features.T, boxes, scores, n, n) for features in maps.flatten(2)]
