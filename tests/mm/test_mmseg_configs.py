"""Every mmseg config of this package: mmseg builds it and runs a training and an inference step on small pictures."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmseg.registry import MODELS

from attn_plugins import modules
from attn_plugins.modules.tokens.deformable_attention import SampledAttention
from tests.mm.mm_helpers import (
    ROOT,
    demo_batch,
    dictionaries,
    initialize,
    quarter,
    training_step,
    without_downloads,
    without_gradient,
)

CONFIGS = sorted(p for p in (ROOT / "configs/mmseg").glob("*/*.py"))
SIZE = (48, 64)
OURS = (SampledAttention, *(getattr(modules, name) for name in modules.__all__ if name[0].isupper()))
LAYER_OF = {
    "bi-nl": modules.BilateralNonLocal2d,
    "bi-cc": modules.BilateralCrissCross2d,
    "ccnet-attn": modules.GeneralizedAttention2d,
    "ccnet-dynamic": modules.DynamicConv2d,
    "unet-ba": modules.LocalBilateralConv2d,
    "upernet_dinov2": modules.ViTAdapter,
    "mask2former_dinov3": modules.ViTAdapter,
}
FUSIONS = {  # parameters of the thesis: rows of Table 4.2, the 3×3 layer alone, and Table 4.5
    "deeplabv3plus-a-content_r101": [265_216], "deeplabv3plus-b-geometric_r101": [217_560],
    "deeplabv3plus-c-m1_r101": [267_547], "deeplabv3plus-d-m4_r101": [274_540],
    "deeplabv3plus-e-m8_r101": [283_864], "deeplabv3plus-f-m16_r101": [302_512],
    "deeplabv3plus-g-content-shared-t3_r101": [131_840], "deeplabv3plus-h-shared_r101": [150_272],
    "deeplabv3plus-i-shared-t3_r101": [150_272], "deeplabv3plus-j-conv_r101": [590_080],
    "unet_r18": [3_539_456, 1_474_816, 737_536, 368_768], "unet-ba_r18": [693_760, 578_776, 323_692, 145_516],
}  # fmt: skip
PLAIN = ("nl_r", "cc_r", "ccnet-none", "deeplabv3plus-j", "unet_", "fcn_")


def load(path: Path) -> Config:
    config = Config.fromfile(path)
    init_default_scope("mmseg")
    for node in dictionaries(config.model):
        if node.get("type") == "SyncBN":  # needs several processes with GPUs
            node["type"] = "BN"
    config.model.pretrained = None
    return without_downloads(config)


def small(model: Config) -> Config:
    """Return a config's model for small pictures, with a quarter of the channels if its backbone is a whole one."""
    model = copy.deepcopy(model)
    model.data_preprocessor.size = SIZE
    model.test_cfg = dict(mode="whole")
    quarter(model)
    if model.backbone.get("depth") == 101:
        model.backbone.depth = 50
    return model


@contextmanager
def without_data() -> Iterator[None]:
    """Build and run on the meta device without what takes long even there."""
    with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
        for draw in ("uniform_", "normal_", "kaiming_uniform_", "kaiming_normal_"):
            patch.setattr(torch.nn.init, draw, lambda tensor, *args, **options: tensor)
        patch.setattr(torch.nn.functional, "batch_norm", lambda x, *args, **options: x)
        yield


BACKBONES: dict[str, tuple[torch.nn.Module, Any]] = {}  # by config, with the maps of a picture: many models share one


def whole(model: Config) -> torch.nn.Module:
    """Build the parts of a whole model without data, and run them on a picture of its own size."""
    with without_data():
        if model.decode_head.type in ("MaskFormerHead", "Mask2FormerHead"):  # compute nothing without labels
            return MODELS.build(model)
        key = f"{model.backbone} {model.data_preprocessor.size}"
        if key not in BACKBONES:
            backbone = MODELS.build(model.backbone)
            backbone.eval()
            BACKBONES[key] = backbone, backbone(torch.empty(1, 3, *model.data_preprocessor.size))
        backbone, maps = BACKBONES[key]
        parts = torch.nn.ModuleDict({"backbone": backbone, "decode_head": MODELS.build(model.decode_head).eval()})
        if model.get("auxiliary_head"):
            parts["auxiliary_head"] = MODELS.build(model.auxiliary_head)
        assert parts["decode_head"](maps).shape[:2] == (1, model.decode_head.num_classes)
        return parts


def layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, OURS)}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_config_trains_and_infers(path):
    torch.manual_seed(0)
    config = load(path)
    assert config.log_processor.by_epoch is config.default_hooks.logger.log_metric_by_epoch is False  # all count steps
    classes = config.model.decode_head.num_classes
    own_size = whole(config.model)
    for name, parameters in FUSIONS.items():
        if path.name.startswith(name):
            fusions = getattr(own_size.decode_head, "fusions", None) or [own_size.decode_head.sep_bottleneck[1]]
            assert [sum(p.numel() for p in fusion.conv.parameters()) for fusion in fusions] == parameters
    model = MODELS.build(small(config.model))
    initialize(model)
    assert layers(model).keys() == layers(own_size).keys()
    kinds = {type(layer) for layer in layers(model).values()}
    expected = next((kind for prefix, kind in LAYER_OF.items() if path.name.startswith(prefix)), None)
    assert expected is None or any(issubclass(kind, expected) for kind in kinds)
    assert bool(kinds) != path.name.startswith(PLAIN)
    training_step(model, config.optim_wrapper, demo_batch("mmseg", SIZE, 2, classes))
    assert not without_gradient(model, OURS)

    model.eval()
    with torch.no_grad():
        results = model.test_step(demo_batch("mmseg", SIZE, 2, classes))
    assert [tuple(result.pred_sem_seg.data.shape) for result in results] == [(1, *SIZE)] * 2


def test_every_name_in_the_tables_above_is_that_of_a_config():
    assert all(any(path.name.startswith(name) for path in CONFIGS) for name in [*LAYER_OF, *FUSIONS, *PLAIN])


def test_the_readme_beside_a_config_names_it():
    assert not [path for path in CONFIGS if path.name not in (path.parent / "README.md").read_text()]


def test_three_lines_turn_ccnet_into_bi_cc(tmp_path):
    """Run the example of the documentation's home page literally."""
    page = (ROOT / "docs/start/mmsegmentation.md").read_text()
    start = page.index('_base_ = "mmseg::ccnet/')
    example = page[start : page.index("```", start)]
    assert len(example.strip().splitlines()) == 3
    (tmp_path / "bi_cc.py").write_text(example)
    with torch.device("meta"):
        model = MODELS.build(load(tmp_path / "bi_cc.py").model)
    assert any(isinstance(layer, modules.BilateralCrissCross2d) for layer in layers(model).values())


def test_bad_heads():
    head = dict(
        type="UNetHead", in_channels=[8, 8, 8], in_index=[0, 1, 2], num_classes=3, fusion_channels=[8, 8],
        fusion_cfgs=[None], norm_cfg=dict(type="BN"),
    )  # fmt: skip
    with pytest.raises(ValueError, match="fusion_cfgs must have 2"):
        MODELS.build(head)
    with pytest.raises(ValueError, match="in_channels must have 2 items, one more than fusion_channels, got"):
        MODELS.build(dict(head, fusion_channels=[8], fusion_cfgs=None))
    with pytest.raises(ValueError, match="recurrence must be a positive int, got 0"):
        MODELS.build(dict(type="AttentionHead", recurrence=0, in_channels=8, channels=8, num_classes=3))
