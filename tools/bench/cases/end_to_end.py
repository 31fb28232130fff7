"""Whole models of mmdet and mmsegmentation from their own configs, stock and with ``accelerate``, in one process.

Both have the same random weights; pictures, boxes and masks are synthetic. A training step is forward, loss, backward
and the optimizer's step. Where mmcv is not compiled, stock models call this package's operators in place of mmcv's,
and the peer is named so.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import compiled_mmcv
from ..case import Case
from .whole import ALONE, LEARNING_RATE, Steps, both, operators_alone, rows

BATCHES = {"cpu": (1,), "cuda": (2, 8)}
Batch = dict[str, list]


@dataclass(frozen=True)
class Model:
    """An upstream model, and the same model with our layers."""

    title: str
    package: str  # mmdet or mmseg, which determines the synthetic data: boxes or masks
    config: str  # below the package's configs
    size: tuple[int, int] = (800, 1344)  # height and width of the picture


MODELS = (
    Model("Faster R-CNN R-50, attention 0010 and DCN", "mmdet",
          "empirical_attention/faster-rcnn_r50-attn0010-dcn_fpn_1x_coco.py"),
    Model("Faster R-CNN R-50, attention 1111", "mmdet", "empirical_attention/faster-rcnn_r50-attn1111_fpn_1x_coco.py"),
    Model("CCNet R-50", "mmseg", "ccnet/ccnet_r50-d8_4xb2-80k_cityscapes-769x769.py", (769, 769)),
    Model("Deformable DETR R-50", "mmdet", "deformable_detr/deformable-detr_r50_16xb2-50e_coco.py"),
    Model("DINO R-50, 4 scales", "mmdet", "dino/dino-4scale_r50_8xb2-12e_coco.py"),
    Model("Mask R-CNN Swin-T", "mmdet", "swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py"),
    Model("Mask2Former R-50, instances", "mmdet", "mask2former/mask2former_r50_8xb2-lsj-50e_coco.py"),
    Model("Mask2Former Swin-T, instances", "mmdet", "mask2former/mask2former_swin-t-p4-w7-224_8xb2-lsj-50e_coco.py"),
    Model("Mask2Former R-50, semantic (mmseg)", "mmseg",
          "mask2former/mask2former_r50_8xb2-90k_cityscapes-512x1024.py", (512, 1024)),
)  # fmt: skip


def load_config(model: Model) -> Any:
    """Return the upstream config for one CPU process: no downloads, BatchNorm for SyncBN."""
    from mmengine.config import Config
    from mmengine.registry import init_default_scope

    package = Path(importlib.import_module(model.package).__file__ or "").parent
    config = Config.fromfile(package / ".mim" / "configs" / model.config)
    init_default_scope(model.package)
    config.model.pop("pretrained", None)
    for_one_process(config.model)
    config.model.data_preprocessor.pop("batch_augments", None)
    if config.model.data_preprocessor.get("size") is not None:
        config.model.data_preprocessor.size = model.size
    config.optim_wrapper.optimizer.lr = LEARNING_RATE
    return config


def for_one_process(node: Any) -> None:
    """Remove pretrained weights and SyncBN from a config, in place."""
    if isinstance(node, dict):
        if node.get("type") == "SyncBN":
            node["type"] = "BN"
        init = node.get("init_cfg")
        if isinstance(init, dict) and init.get("type") == "Pretrained":
            node["init_cfg"] = None
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else ():
        for_one_process(value)


def drawn(model: Model) -> tuple[Tensor, Any]:
    """Return a synthetic picture and its sample of the package, with boxes or a mask."""
    H, W = model.size
    generator = torch.Generator().manual_seed(0)
    picture = torch.randint(0, 256, (3, H, W), generator=generator, dtype=torch.uint8)
    shapes = dict(img_shape=(H, W), ori_shape=(H, W), pad_shape=(H, W))
    if model.package == "mmseg":
        from mmengine.structures import PixelData
        from mmseg.structures import SegDataSample

        sample = SegDataSample(metainfo=shapes)
        blocks = torch.randint(0, 19, (1, 1, -(-H // 64), -(-W // 64)), generator=generator).float()
        mask = torch.nn.functional.interpolate(blocks, size=(H, W))[0].long()
        sample.gt_sem_seg = PixelData(data=mask)
        return picture, sample
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    from mmengine.structures import InstanceData

    corners = torch.rand(8, 2, generator=generator) * torch.tensor([0.6 * W, 0.6 * H])
    sides = (0.1 + 0.3 * torch.rand(8, 2, generator=generator)) * torch.tensor([W, H])
    boxes = torch.cat((corners, corners + sides), 1)
    sample = DetDataSample(metainfo=dict(shapes, scale_factor=(1.0, 1.0), img_id=0))
    ys, xs = torch.arange(H).view(H, 1), torch.arange(W)
    inside = [(xs >= x0) & (xs < x1) & (ys >= y0) & (ys < y1) for x0, y0, x1, y1 in boxes]
    sample.gt_instances = InstanceData(
        bboxes=boxes,
        labels=torch.randint(0, 80, (8,), generator=generator),
        masks=BitmapMasks(torch.stack(inside).byte().numpy(), H, W),
    )
    sample.ignored_instances = InstanceData(bboxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.long))
    return picture, sample


def _calibrate(network: Any, pictures: Batch) -> None:
    """Set the statistics of every BatchNorm to the batch's, without which random weights overflow float16."""
    norms = [norm for norm in network.modules() if isinstance(norm, nn.modules.batchnorm._BatchNorm)]
    network.eval()
    for norm in norms:
        norm.train().momentum, norm.kept = 1.0, norm.momentum
    with torch.no_grad():
        network.extract_feat(network.data_preprocessor(_copied(pictures), False)["inputs"])
    for norm in norms:
        norm.momentum = norm.kept


def _copied(pictures: Batch) -> Batch:
    return {key: list(values) for key, values in pictures.items()}  # preprocessing replaces the elements


def steps(network: Any, optimizer: torch.optim.Optimizer, pictures: Batch) -> Steps:
    def loss() -> Tensor:
        losses = network(**network.data_preprocessor(_copied(pictures), True), mode="loss")
        return network.parse_losses(losses)[0]

    def predict() -> object:
        return network(**network.data_preprocessor(_copied(pictures), False), mode="predict")

    return Steps(network, optimizer, loss, predict)


@lru_cache(maxsize=1)
def built(model: Model, count: int, peer: str, device: str) -> Mapping[str, Steps]:
    """Return the steps of a stock model and of a copy with ``accelerate``, on ``count`` pictures."""
    from mmengine.optim import build_optim_wrapper

    config = load_config(model)
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # mmengine logs the initialization of every parameter
    torch.manual_seed(0)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            stock = importlib.import_module(f"{model.package}.registry").MODELS.build(config.model)
            stock.init_weights()
    finally:
        logging.disable(before)
    inputs, samples = zip(*(drawn(model) for _ in range(count)))
    pictures = dict(inputs=[t.to(device) for t in inputs], data_samples=[sample.to(device) for sample in samples])
    _calibrate(stock.to(device), pictures)
    made = {}
    for name, network in both(peer, stock).items():
        made[name] = steps(network, build_optim_wrapper(network, config.optim_wrapper).optimizer, pictures)
    return made | {ALONE: replace(made["ours"], layers=operators_alone)}


def cases(device: str) -> list[Case]:
    peer = "stock"
    with contextlib.suppress(ImportError):
        peer = "stock" if compiled_mmcv.is_compiled() else "stock on our operators for mmcv's"
    made = []
    for model in MODELS:
        for count in BATCHES[device]:
            title = f"{model.title}, {model.size[0]}x{model.size[1]}, batch {count}"
            version = "Swin" if "Swin" in model.title else None
            made += rows(title, peer, partial(built, model, count, peer), device, model.title, version)
    return made
