"""The stand-in for mmcv's compiled operators against compiled mmcv: operators, and whole models on both."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attn_plugins import mmcv_ext

from .. import compiled_mmcv
from ..case import PASSES, Case, Run
from .end_to_end import Model, batch, build

MODELS = (
    Model("Faster R-CNN R-50 FPN", "mmdet", "faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py"),
    Model("Mask2Former R-50, instances", "mmdet", "mask2former/mask2former_r50_8xb2-lsj-50e_coco.py"),
)
LEVELS = ((4, 200, 336), (8, 100, 168), (16, 50, 84), (32, 25, 42))  # stride, height, width of an 800 x 1344 picture


def boxes(count: int) -> tuple[Tensor, Tensor]:
    """Return the same boxes and scores for both extensions."""
    torch.manual_seed(count)
    corners = torch.rand(count, 2) * torch.tensor([1100.0, 600.0])
    return torch.cat((corners, corners + 16 + 200 * torch.rand(count, 2)), 1), torch.rand(count)


def nms(extension: ModuleType, count: int) -> Run:
    rows, scores = boxes(count)
    return lambda: extension.nms(rows, scores, iou_threshold=0.7, offset=0)


def soft_nms(extension: ModuleType, method: int) -> Run:
    rows, scores = boxes(1000)
    dets = torch.zeros(1000, 5)
    options = dict(iou_threshold=0.3, sigma=0.5, min_score=0.001, method=method, offset=0)
    return lambda: extension.softnms(rows, scores, dets, **options)


def roi_align(extension: ModuleType, regions: int, size: int, backward: bool) -> Run:
    """Pool regions that are spread over the four levels by their size, as Faster R-CNN's extractor does."""
    torch.manual_seed(regions)
    calls = []
    for stride, height, width in LEVELS:
        count = regions // len(LEVELS)
        corners = torch.rand(count, 2) * stride * torch.tensor([0.6 * width, 0.6 * height])
        rois = torch.cat((torch.zeros(count, 1), corners, corners + 14 * stride * (0.5 + torch.rand(count, 2))), 1)
        geometry = dict(aligned_height=size, aligned_width=size, spatial_scale=1 / stride, sampling_ratio=0)
        calls.append((torch.randn(1, 256, height, width), rois, torch.zeros(count, 256, size, size), geometry))
    none, rest = torch.zeros(0), dict(pool_mode=1, aligned=True)

    def run() -> None:
        for maps, rois, output, geometry in calls:
            extension.roi_align_forward(maps, rois, output, none, none, **geometry, **rest)
            if backward:
                extension.roi_align_backward(output, rois, none, none, torch.zeros_like(maps), **geometry, **rest)

    return run


def psa_mask(extension: ModuleType) -> Run:
    """PSANet on 10 × 10 pixels; mmcv makes a tensor for every element, which the profiler of memory records."""
    masks, output = torch.randn(1, 19 * 19, 10, 10), torch.zeros(1, 100, 10, 10)
    sizes = dict(h_feature=10, w_feature=10, h_mask=19, w_mask=19, half_h_mask=9, half_w_mask=9)
    return lambda: extension.psamask_forward(masks, output, psa_type=0, num_=1, **sizes)


@cache
def _built(model: Model) -> tuple[Any, Any]:
    return build(model, ours=False)


def whole(extension: ModuleType, model: Model, training: bool) -> Run:
    """Return a step of a model whose modules of ``mmcv.ops`` call ``extension``."""
    made, optimizer = _built(model)
    holders = [m for name, m in sys.modules.items() if name.startswith("mmcv.ops.") and hasattr(m, "ext_module")]

    def run() -> None:
        for holder in holders:
            holder.ext_module = extension
        torch.manual_seed(1)  # for box samplers
        made.train(training)
        if training:
            made.train_step(batch(model), optimizer)
            return
        with torch.no_grad():
            made.test_step(batch(model))

    return run


def cases(device: str) -> list[Case]:
    if device != "cpu":
        return []
    rows: list[tuple[str, Callable[[ModuleType], Run], float]] = [
        *((f"nms, {count} boxes", partial(nms, count=count), 1.0) for count in (1000, 2000, 4000)),
        ("soft NMS, linear, 1000 boxes", partial(soft_nms, method=1), 1 / 1.5),
        ("soft NMS, Gaussian, 1000 boxes", partial(soft_nms, method=2), 1 / 1.5),
    ]
    for regions, size in ((512, 7), (100, 14)):
        for passes in PASSES:
            run = partial(roi_align, regions=regions, size=size, backward=passes != "forward")
            rows.append((f"RoIAlign, 256 channels, 4 levels, {regions} regions, {size}×{size}, {passes}", run, 1.0))
    rows.append(("PSA mask, 10×10", psa_mask, 1.0))
    for model in MODELS:
        for passes, training in (("prediction", False), ("training step", True)):
            rows.append((f"{model.title}, 800×1344, {passes}", partial(whole, model=model, training=training), 1.0))
    return [
        Case(
            name,
            partial(run, mmcv_ext),
            {"mmcv": lambda run=run: run(compiled_mmcv.extension())},
            goal,
            heavy="800×1344" in name,
        )
        for name, run, goal in rows
    ]
