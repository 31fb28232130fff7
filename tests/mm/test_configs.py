"""Every mmdet config of this package: mmdet builds it and runs a training and an inference step on a small picture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope

from attn_plugins.mmcv.replace_attention import MultiScaleDeformableAttention, TokenAttention
from attn_plugins.modules import DeformableConv2d, DynamicConv2d, ViTAdapter, ViTPyramid
from attn_plugins.modules.maps.generalized_attention import GeneralizedAttention2d
from tests.mm.mm_helpers import (
    ROOT,
    demo_batch,
    initialize,
    quarter,
    shallow,
    training_step,
    without_downloads,
    without_gradient,
)

CONFIGS = sorted(p for p in (ROOT / "configs/mmdet").glob("*/*.py"))
SIZE = (64, 96)
OURS = (DeformableConv2d, DynamicConv2d, GeneralizedAttention2d, TokenAttention, MultiScaleDeformableAttention,
        ViTAdapter, ViTPyramid)  # fmt: skip


def load(path: Path) -> Config:
    config = Config.fromfile(path)
    init_default_scope("mmdet")
    if config.model.get("of", config.model.type) == "DINO":
        config.model.num_queries = 50  # 900 exceed the number of positions of a small picture
    for augment in config.model.data_preprocessor.get("batch_augments") or ():
        # The size that a batch is padded to; RetinaNet's coarsest level then has 2 × 2 positions.
        augment.size = (96, 96) if config.model.get("of") == "Mask2Former" else (160, 160)
    quarter(config.model)
    return shallow(without_downloads(config))


def picture(config: Config) -> dict:
    classes = config.train_dataloader.dataset.get("metainfo", {}).get("classes", range(80))
    return demo_batch("mmdet", SIZE, classes=len(classes))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_config_trains_and_infers(path):
    torch.manual_seed(0)
    config = load(path)
    model = MODELS.build(config.model)
    check_name(path.stem, config, model.backbone)
    initialize(model)
    optimizer = training_step(model, config.optim_wrapper, picture(config))
    lost = without_gradient(model, OURS)
    if isinstance(model.backbone, ViTPyramid) and (config.model.neck or {}).get("start_level"):
        lost = [name for name in lost if not name.startswith("backbone.scales.0.")]  # the finest map, which is not read
    assert not lost
    if "-dcn" in path.stem:
        rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        layer = model.backbone.layer3[5].conv2
        assert rates[id(layer.conv_offset.weight)] == pytest.approx(0.1 * rates[id(layer.weight)])

    if isinstance(model.backbone, (ViTAdapter, ViTPyramid)) and "-frozen" not in path.stem and "layers" in config:
        rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        vit, (top, *_) = model.backbone.vit, (p for name, p in model.named_parameters() if "backbone" not in name)
        assert rates[id(vit.blocks[9].mlp.fc1.weight)] == pytest.approx(0.8**3 * rates[id(top)])
        assert rates[id(vit.pos_embed)] == pytest.approx(0.8**13 * rates[id(top)])

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
    assert isinstance(backbone, ViTAdapter) == ("-adapter" in name)
    assert isinstance(backbone, ViTPyramid) == ("-pyramid" in name)
    if "-frozen" in name:
        assert not any(p.requires_grad for p in backbone.vit.parameters())
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
