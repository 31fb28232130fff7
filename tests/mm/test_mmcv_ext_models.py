"""Models of mmdet and mmsegmentation on the stand-in for mmcv's compiled operators, and beside compiled mmcv.

The table: ``MMCV_EXT_PAGE=benchmarks/mmcv-stand-in.md python -m pytest -m peers tests/mm/test_mmcv_ext_models.py``.
"""

from __future__ import annotations

import copy
import os
import platform
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from mmdet.testing import demo_mm_inputs
from mmdet.utils import register_all_modules
from mmengine.config import Config
from mmengine.registry import DefaultScope
from torch import Tensor

from attn_plugins import mmcv_ext
from tests.mm.mm_helpers import without_downloads
from tests.mm.mmcv_ext_helpers import extension, needs_compiled

SIZE = (128, 160)
MMDET = """
faster_rcnn/faster-rcnn_r50_fpn_1x_coco mask_rcnn/mask-rcnn_r50_fpn_1x_coco
cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco retinanet/retinanet_r50_fpn_1x_coco
fcos/fcos_r50-caffe_fpn_gn-head_1x_coco atss/atss_r50_fpn_1x_coco gfl/gfl_r50_fpn_1x_coco yolox/yolox_s_8xb8-300e_coco
rtmdet/rtmdet_tiny_8xb32-300e_coco rtmdet/rtmdet-ins_tiny_8xb32-300e_coco htc/htc_r50_fpn_1x_coco
solov2/solov2-light_r50-dcn_fpn_ms-3x_coco condinst/condinst_r50_fpn_ms-poly-90k_coco_instance
deformable_detr/deformable-detr_r50_16xb2-50e_coco dino/dino-4scale_r50_8xb2-12e_coco
ddq/ddq-detr-4scale_r50_8xb2-12e_coco mask2former/mask2former_r50_8xb2-lsj-50e_coco
dcn/faster-rcnn_r50-dconv-c3-c5_fpn_1x_coco dcn/faster-rcnn_r50_fpn_dpool_1x_coco
dcnv2/faster-rcnn_r50-mdconv-group4-c3-c5_fpn_1x_coco dcnv2/faster-rcnn_r50_fpn_mdpool_1x_coco
carafe/faster-rcnn_r50_fpn-carafe_1x_coco carafe/mask-rcnn_r50_fpn-carafe_1x_coco
pisa/faster-rcnn_r50_fpn_pisa_1x_coco pisa/retinanet-r50_fpn_pisa_1x_coco
guided_anchoring/ga-rpn_r50-caffe_fpn_1x_coco guided_anchoring/ga-retinanet_r50-caffe_fpn_1x_coco
guided_anchoring/ga-faster-rcnn_r50-caffe_fpn_1x_coco cornernet/cornernet_hourglass104_8xb6-210e-mstest_coco
centripetalnet/centripetalnet_hourglass104_16xb6-crop511-210e-mstest_coco
centernet/centernet_r18-dcnv2_8xb16-crop512-140e_coco centernet/centernet-update_r50-caffe_fpn_ms-1x_coco
dyhead/atss_r50_fpn_dyhead_1x_coco point_rend/point-rend_r50-caffe_fpn_ms-1x_coco
detectors/detectors_cascade-rcnn_r50_1x_coco reppoints/reppoints-moment_r50_fpn-gn_head-gn_1x_coco
tood/tood_r50_fpn_1x_coco vfnet/vfnet_r50_fpn_1x_coco foveabox/fovea_r50_fpn_gn-head-align_4xb4-2x_coco
cascade_rpn/cascade-rpn_faster-rcnn_r50-caffe_fpn_1x_coco queryinst/queryinst_r50_fpn_1x_coco
boxinst/boxinst_r50_fpn_ms-90k_coco nas_fpn/retinanet_r50_nasfpn_crop640-50e_coco
groie/mask-rcnn_r50_fpn_groie_1x_coco solo/solo_r50_fpn_1x_coco yolact/yolact_r50_1xb8-55e_coco
tridentnet/tridentnet_r50-caffe_1x_coco grid_rcnn/grid-rcnn_r50_fpn_gn-head_1x_coco
ms_rcnn/ms-rcnn_r50-caffe_fpn_1x_coco empirical_attention/faster-rcnn_r50-attn0010-dcn_fpn_1x_coco
sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco libra_rcnn/libra-faster-rcnn_r50_fpn_1x_coco
""".split()
MMSEG = """
mask2former/mask2former_r50_8xb2-160k_ade20k-512x512  psanet/psanet_r50-d8_4xb4-20k_voc12aug-512x512
ccnet/ccnet_r50-d8_4xb4-20k_voc12aug-512x512  point_rend/pointrend_r50_4xb4-160k_ade20k-512x512
segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512
""".split()
SOFT_NMS = "faster_rcnn/faster-rcnn_r50_fpn_1x_coco with soft NMS"
NAMES = [*(f"mmdet::{name}.py" for name in MMDET), f"mmdet::{SOFT_NMS}", *(f"mmseg::{name}.py" for name in MMSEG)]
QUICK = [f"mmdet::{MMDET[0]}.py", "mmdet::dcnv2/faster-rcnn_r50_fpn_mdpool_1x_coco.py", f"mmseg::{MMSEG[4]}.py"]


def build(name: str) -> tuple[Config, torch.nn.Module]:
    """Build a model with random weights, without score thresholds, which random weights would not pass."""
    scope = name.partition("::")[0]
    if scope == "mmdet":
        register_all_modules(init_default_scope=True)
    else:
        from mmseg.utils import register_all_modules as register

        register(init_default_scope=True)
    config = _config(name)
    seed()
    model = _registry(scope).build(without_downloads(config).model)
    model.init_weights()
    return config, model


def _config(name: str) -> Config:
    scope, _, path = name.partition("::")
    soft = path == SOFT_NMS
    file = Config._get_cfg_path(f"{scope}::{path.split()[0]}{'.py' if soft else ''}", "x.py")[0]
    config = Config.fromfile(file)
    _lower_thresholds(config.model.get("test_cfg") or {})
    if soft:
        config.model.test_cfg.rcnn.nms = dict(type="soft_nms", iou_threshold=0.5, min_score=0.001)
    if config.model.get("num_queries", 0) > 300:  # more than the small picture has pixels
        config.model.num_queries = 100
    if "pretrained" in config.model:
        config.model.pretrained = None
    if "data_preprocessor" in config.model:
        config.model.data_preprocessor.pop("batch_augments", None)
    return config


def _lower_thresholds(node: Any) -> None:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "score_thr":
                node[key] = 1e-4
            _lower_thresholds(value)


def _registry(scope: str) -> Any:
    import mmdet.registry
    import mmseg.registry

    return {"mmdet": mmdet.registry, "mmseg": mmseg.registry}[scope].MODELS


def seed() -> None:
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002  mmdet's samplers read the global generator
    random.seed(0)


def inputs(scope: str, config: Config) -> dict:
    """Return a batch of two pictures with labels."""
    if scope == "mmdet":
        size = (128, 128) if "hourglass" in str(config.filename) else SIZE
        masks = any(step.get("with_mask") for step in config.get("train_pipeline", []))
        return demo_mm_inputs(2, [(3, *size)] * 2, num_items=[3, 4], with_mask=masks, with_semantic=True)
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

    pictures = [torch.randint(0, 256, (3, *SIZE), dtype=torch.uint8) for _ in range(2)]
    samples = []
    for _ in pictures:
        labels = torch.arange(SIZE[0] // 8)[:, None] % 3 + torch.arange(SIZE[1] // 8) % 2
        labels = labels.repeat_interleave(8, 0).repeat_interleave(8, 1)
        sample = SegDataSample(gt_sem_seg=PixelData(data=labels[None]))
        sample.set_metainfo(dict(img_shape=SIZE, ori_shape=SIZE, pad_shape=SIZE, scale_factor=(1.0, 1.0)))
        samples.append(sample)
    return dict(inputs=pictures, data_samples=samples)


def run(model: torch.nn.Module, batch: dict) -> tuple[dict[str, float], dict[str, Tensor], list[Tensor]]:
    """Return losses, gradients and predictions of a fresh copy."""
    model = copy.deepcopy(model)
    seed()
    model.train()
    data = model.data_preprocessor(copy.deepcopy(batch), True)
    losses = model(**data, mode="loss")
    loss, log = model.parse_losses(losses)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    seed()
    model.eval()
    with torch.no_grad():
        samples = model(**model.data_preprocessor(copy.deepcopy(batch), False), mode="predict")
    return (
        {name: float(value.detach()) for name, value in log.items()},
        grads,
        [tensor for sample in samples for tensor in tensors(sample)],
    )


def tensors(sample: Any) -> Iterator[Tensor]:
    for name in ("pred_instances", "pred_sem_seg", "seg_logits"):
        prediction = sample.get(name)
        if hasattr(prediction, "data"):
            yield prediction.data
        elif prediction is not None:
            for key in sorted(prediction.keys()):
                value = prediction[key]
                yield torch.as_tensor(value) if not isinstance(value, Tensor) else value


@pytest.fixture(autouse=True)
def scope() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    DefaultScope._instance_dict.clear()


@pytest.mark.parametrize("name", QUICK)
def test_runs_on_the_stand_in(name: str) -> None:
    config, model = build(name)
    with extension(mmcv_ext):
        losses, grads, predictions = run(model, inputs(name.partition("::")[0], config))
    assert np.isfinite(list(losses.values())).all()
    assert all(grad.isfinite().all() for grad in grads.values())
    assert sum(tensor.numel() for tensor in predictions)


@needs_compiled
@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_equals_compiled_mmcv(name: str, table: Callable[..., None]) -> None:
    import mmcv._ext as compiled

    config, model = build(name)
    batch = inputs(name.partition("::")[0], config)
    losses, grads, predictions = on(mmcv_ext, model, batch)
    assert np.isfinite(list(losses.values())).all()
    try:
        their_losses, their_grads, their_predictions = on(compiled, model, batch)
    except (RuntimeError, AssertionError) as error:
        # The binary has no kernel for CPUs, or mmcv's Python code asks for a GPU.
        if "implementation for device" not in str(error) and "carafe" not in name:
            raise
        table(name, "–", "–", "compiled mmcv has no CPU kernel")
        return
    loss = max(abs(losses[k] - their_losses[k]) / max(1.0, abs(their_losses[k])) for k in losses)
    size = max(float(g.abs().max()) for g in their_grads.values())
    grad = max(float((grads[k] - their_grads[k]).abs().max()) for k in their_grads) / size
    same = len(predictions) == len(their_predictions) and all(map(torch.equal, predictions, their_predictions))
    close = same or (
        len(predictions) == len(their_predictions)
        and all(a.shape == b.shape for a, b in zip(predictions, their_predictions))
        and all(torch.allclose(a.float(), b.float(), 1e-3, 1e-3) for a, b in zip(predictions, their_predictions))
    )
    table(name, f"{loss:.0e}" if loss else "0", f"{grad:.0e}" if grad else "0",
          "identical" if same else "equal up to rounding" if close else "different")  # fmt: skip
    assert loss < 1e-5
    assert grad < 1e-4
    assert close


def on(module: ModuleType, model: torch.nn.Module, batch: dict) -> tuple:
    with extension(module):
        return run(model, batch)


@pytest.fixture(scope="module")
def table() -> Iterator[Callable[..., None]]:
    rows: list[str] = []
    yield lambda *cells: rows.append(f"| {' | '.join(cells)} |")
    if page := os.environ.get("MMCV_EXT_PAGE"):
        Path(page).write_text(PAGE.format(rows="\n".join(rows), date=time.strftime("%Y-%m-%d"), torch=torch.__version__,
                                          python=platform.python_version()))  # fmt: skip


PAGE = """# mmcv without its binary: whole models

Models with random weights on two pictures of 128 × 160 pixels: one training step and one prediction, with compiled mmcv
and with the stand-in, from the same seed. Loss: largest difference relative to the loss (at least 1). Gradient: largest
difference over the largest gradient. Score thresholds are 1e-4, since random weights would pass no other.

Command: `MMCV_EXT_PAGE=benchmarks/mmcv-stand-in.md python -m pytest -m peers tests/mm/test_mmcv_ext_models.py` after
`make env-peers` ({date}, Python {python}, torch {torch}, CPU).

| config | losses | gradients | predictions |
| --- | --- | --- | --- |
{rows}
"""
