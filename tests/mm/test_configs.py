"""Every mmdet config of this package: mmdet builds it and runs a training and an inference step on a small picture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.structures import InstanceData, PixelData

from attn_plugins.mmcv.attended import DeformableAttention, TokenAttention
from attn_plugins.modules import DeformableConv2d, DynamicConv2d
from attn_plugins.modules.maps.generalized_attention import GeneralizedAttention2d
from tests.mm.mm_helpers import ROOT, training_step, without_downloads, without_gradient

CONFIGS = sorted(p for p in (ROOT / "configs/mmdet").glob("*/*.py"))
SIZE = (96, 128)
OURS = (DeformableConv2d, DynamicConv2d, GeneralizedAttention2d, TokenAttention, DeformableAttention)


def load(path: Path) -> Config:
    config = Config.fromfile(path)
    init_default_scope("mmdet")
    if config.model.get("of", config.model.type) == "DINO":
        config.model.num_queries = 50  # 900 exceed the number of positions of a small picture
    for augment in config.model.data_preprocessor.get("batch_augments") or ():
        augment.size = (256, 256)  # the size that a batch is padded to; the coarsest level then has 2 × 2 positions
    return narrow(without_downloads(config))


def narrow(config: Config) -> Config:
    """Narrow a full ResNet before a neck to a quarter of its channels, and let masks be compared at fewer points."""
    model = config.model
    if "num_points" in (model.get("train_cfg") or {}):
        model.train_cfg.num_points = 500
    if "neck" in model and model.backbone.type == "ResNet" and "base_channels" not in model.backbone:
        model.backbone.base_channels = 16
        model.neck.in_channels = [channels // 4 for channels in model.neck.in_channels]
        if "roi_head" in model:
            model.roi_head.bbox_head.fc_out_channels = 64
    return config


def picture(config: Config) -> dict:
    """Return a batch of one random picture with two objects, in the format of mmdet's collate function."""
    generator = torch.Generator().manual_seed(0)
    sample = DetDataSample(
        metainfo=dict(img_shape=SIZE, ori_shape=SIZE, scale_factor=(1.0, 1.0), img_id=0, pad_shape=SIZE)
    )
    boxes = torch.tensor([[10.0, 12.0, 60.0, 50.0], [70.0, 20.0, 120.0, 90.0]])
    classes = config.train_dataloader.dataset.get("metainfo", {}).get("classes", range(80))
    sample.gt_instances = InstanceData(bboxes=boxes, labels=torch.tensor([1, 3]) % len(classes))
    panoptic = config.model.get("panoptic_head") is not None
    if panoptic or config.model.get("roi_head", {}).get("mask_head") is not None:
        from mmdet.structures.mask import BitmapMasks

        sample.gt_instances.masks = BitmapMasks(torch.ones(2, *SIZE, dtype=torch.uint8).numpy(), *SIZE)
    if panoptic:
        sample.gt_sem_seg = PixelData(sem_seg=torch.ones(1, *SIZE, dtype=torch.long))
    sample.ignored_instances = InstanceData(bboxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.long))
    image = torch.randint(0, 256, (3, *SIZE), generator=generator, dtype=torch.uint8)
    return dict(inputs=[image], data_samples=[sample])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_config_trains_and_infers(path):
    torch.manual_seed(0)
    config = load(path)
    model = MODELS.build(config.model)
    check_name(path.stem, config, model.backbone)
    model.init_weights()
    optimizer = training_step(model, config.optim_wrapper, picture(config))
    assert not without_gradient(model, OURS)
    if "-dcn" in path.stem:
        rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        layer = model.backbone.layer3[5].conv2
        assert rates[id(layer.conv_offset.weight)] == pytest.approx(0.1 * rates[id(layer.weight)])

    model.eval()
    with torch.no_grad():
        (result,) = model.test_step(picture(config))
    if "pred_panoptic_seg" in result:
        assert result.pred_panoptic_seg.sem_seg.shape[-2:] == SIZE
    if "pred_instances" in result:
        assert result.pred_instances.bboxes.shape[1] == 4
        assert torch.isfinite(result.pred_instances.scores).all()
    assert "pred_panoptic_seg" in result or "pred_instances" in result


def check_name(name: str, config: Config, backbone: torch.nn.Module) -> None:
    """Check that a config has the layers that its name says."""
    attention = {n for n, m in backbone.named_modules() if isinstance(m, GeneralizedAttention2d)}
    deformable = {n for n, m in backbone.named_modules() if isinstance(m, DeformableConv2d)}
    other_stage = {"layer2": 4} if "-c4" in name else {"layer4": 3}
    blocks = [f"{stage}.{n}" for stage, count in {"layer3": 6, **other_stage}.items() for n in range(count)]
    assert deformable == ({f"{b}.conv2" for b in blocks} if "-dcn" in name else set())
    assert attention == ({f"{b}.gen_attention_block" for b in blocks} if "-attn" in name else set())
    dynamic = {n.rpartition(".")[0]: m for n, m in backbone.named_modules() if isinstance(m, DynamicConv2d)}
    assert dynamic.keys() == (set(blocks) if "-dynamic" in name else set())
    for layer in dynamic.values():
        assert f"-nk{layer.kernel_size[0]}_" in name
        assert layer.num_groups == 16
    for layer in map(backbone.get_submodule, attention):
        assert f"-attn{layer.attention_type}" in name
        assert layer.num_heads == 8
        assert layer.spatial_range == (int(name.split("-nk")[1][:2]) if "-nk" in name else -1)
    for pattern, options in config.model.get("attention", {}).items():
        place = "pixels" if "pixel_decoder" in pattern and "Mask2" in config.model.of else pattern.split(".")[-4]
        place = {"decoder": "queries", "transformer_decoder": "queries"}.get(place, place)
        kind = "saliency" if options.get("key_saliency") else "bilateral" if "kernel_size" in options else None
        assert f"_{place}-{kind or options.attention_type}_" in name
