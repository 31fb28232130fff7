"""Helpers of the mm tests: paths, mmdet's training tool, configs without downloads, a training step."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmengine.config import Config
from mmengine.optim import OptimWrapper, build_optim_wrapper
from mmengine.registry import init_default_scope
from mmengine.structures import InstanceData, PixelData
from mmseg.structures import SegDataSample

ROOT = Path(__file__).parents[2]
MMDET_TOOLS = Path(importlib.util.find_spec("mmdet").origin).parent / ".mim/tools"
TRAIN_TOOL, TEST_TOOL = MMDET_TOOLS / "train.py", MMDET_TOOLS / "test.py"


def mmseg_tool(name: str) -> Path:
    """Return the path of mmseg's ``'train'`` or ``'test'`` tool."""
    return Path(importlib.util.find_spec("mmseg").origin).parent / f".mim/tools/{name}.py"


def dictionaries(node: Any) -> Iterator[dict]:
    """Yield every dictionary of a config, outer ones first, so that a caller may change what is inside."""
    if isinstance(node, dict):
        yield node
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else ():
        yield from dictionaries(value)


def without_downloads(config: Any) -> Any:
    """Remove every request for pretrained weights from ``config.model`` and return ``config``."""
    for node in dictionaries(config.model):
        init = node.get("init_cfg")
        if isinstance(init, dict) and init.get("type") == "Pretrained":
            node["init_cfg"] = None
        if node.get("pretrained") is True:  # timm's weights
            node["pretrained"] = False
    return config


def upstream(name: str) -> Config:
    """Load a config of mmdet or mmseg, such as ``mmdet::detr/detr_r50_8xb2-150e_coco``, without pretrained weights."""
    config = Config.fromfile(Config._get_cfg_path(f"{name}.py", "x.py")[0])
    init_default_scope(name.partition("::")[0])
    return without_downloads(config)


WIDTHS = {
    "in_channels", "out_channels", "channels", "c1_in_channels", "c1_channels", "feat_channels", "conv_out_channels",
    "output_channels", "fc_out_channels", "fusion_channels", "embed_dims", "num_feats", "feedforward_channels",
}  # fmt: skip


def quarter(model: Any) -> None:
    """Reduce every width in the config of a model with a whole ResNet or ViT to a quarter, and compare fewer points."""
    backbone = model.backbone
    if "vit" in backbone:
        if "embed_dim" in backbone.get("vit_kwargs", {}):
            return
        backbone.vit_kwargs = dict(backbone.get("vit_kwargs", {}), embed_dim=96)  # of ViT-S
        if backbone.type == "ViTPyramid":
            backbone.out_channels = 64
    elif backbone.type == "AAResNet":
        backbone.channels = (16, 32, 64, 128)
    elif "ResNe" in backbone.type and backbone.get("base_channels", 64) == 64:
        backbone.base_channels = backbone.stem_channels = 16
    else:
        return
    if model.get("bbox_head", {}).get("type") in ("DeformableDETRHead", "DINOHead"):
        model.bbox_head.embed_dims = 256  # as by default
    for part in dictionaries({name: part for name, part in model.items() if name != "backbone"}):
        for key in part.keys() & WIDTHS:
            value = part[key]
            part[key] = [n // 4 for n in value] if isinstance(value, (list, tuple)) else value // 4
        if "num_points" in part and "importance_sample_ratio" in part:
            part["num_points"] = 500


def shallow(config: Any) -> Any:
    """Keep at most three layers of a transformer's encoder and decoder, one for each level, and few proposals."""
    model = config.model
    for node in dictionaries(model):
        if "layer_cfg" in node:
            node["num_layers"] = min(node["num_layers"], 3)
    if "roi_head" in model:
        model.train_cfg.rpn_proposal.max_per_img = model.test_cfg.rpn.max_per_img = 50
        model.train_cfg.rcnn.sampler.num = 32
    return config


def initialize(model: torch.nn.Module) -> None:
    """Initialize a model without mmengine's record of what changed which parameter, which takes as long again."""
    with patch("mmengine.model.base_module.update_init_info"), patch("mmengine.model.weight_init.update_init_info"):
        model.init_weights()


def demo_batch(toolkit: str, size: tuple[int, int], count: int = 1, classes: int = 80) -> dict[str, list]:
    """Return random pictures with two labeled objects each, in the format of mmdet's or mmseg's collate function."""
    H, W = size
    shapes = dict(img_shape=size, ori_shape=size, pad_shape=size, batch_input_shape=size)
    labels, masks = torch.tensor([3, 7]) % classes, torch.zeros(2, H, W, dtype=torch.bool)
    masks[0, H // 10 : H // 2, W // 6 : W // 2] = masks[1, H // 2 : H - 6, W // 2 : W - 8] = True
    labeled = (labels[:, None, None] * masks).sum(0, keepdim=True)
    batch: dict[str, list] = dict(inputs=[], data_samples=[])
    for _ in range(count):
        batch["inputs"].append(torch.randint(0, 256, (3, H, W), dtype=torch.uint8))
        if toolkit == "mmseg":
            sample: Any = SegDataSample(metainfo=dict(shapes), gt_sem_seg=PixelData(data=labeled))
        else:
            sample = DetDataSample(metainfo=dict(shapes, scale_factor=(1.0, 1.0), img_id=0))
            boxes = torch.tensor([[W // 6, H // 10, W // 2, H // 2], [W // 2, H // 2, W - 8, H - 6]]).float()
            bitmaps = BitmapMasks(masks.numpy().astype("uint8"), H, W)
            sample.gt_instances = InstanceData(bboxes=boxes, labels=labels, masks=bitmaps)
            sample.ignored_instances = InstanceData(bboxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.long))
            sample.gt_sem_seg = PixelData(sem_seg=labeled)
        batch["data_samples"].append(sample)
    return batch


def training_step(model: torch.nn.Module, optim_wrapper: dict, batch: dict) -> OptimWrapper:
    """Run one training step as mmengine's loop does, keeping the gradients; return the optimizer."""
    optimizer = build_optim_wrapper(model, optim_wrapper)
    model.train()
    losses = model(**model.data_preprocessor(batch, True), mode="loss")
    loss, _ = model.parse_losses(losses)
    assert torch.isfinite(loss)
    optimizer.backward(loss)
    optimizer.step()
    return optimizer


def without_gradient(model: torch.nn.Module, kinds: tuple[type, ...]) -> list[str]:
    """Return the parameters of these kinds of layers that should learn and whose gradient is missing or not finite."""
    return [
        name
        for prefix, layer in model.named_modules()
        if isinstance(layer, kinds)
        for name, p in layer.named_parameters(prefix)
        if p.requires_grad and (p.grad is None or not p.grad.isfinite().all())
    ]
