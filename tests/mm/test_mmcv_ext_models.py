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
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mmcv.ops import MaskedConv2d
from mmdet.models.backbones.trident_resnet import TridentConv
from mmdet.testing import demo_mm_inputs
from mmdet.utils import register_all_modules
from mmengine.config import Config
from mmengine.logging import MessageHub
from mmengine.registry import DefaultScope
from mmengine.structures import BaseDataElement
from torch import Tensor

from attn_plugins import mmcv_ext
from tests.mm.mm_helpers import without_downloads
from tests.mm.mmcv_ext_helpers import extension, needs_compiled

SIZE = (128, 160)
MMDET = """
faster_rcnn/faster-rcnn_r50_fpn_1x_coco faster_rcnn/faster-rcnn_r50_fpn_soft-nms_1x_coco
mask_rcnn/mask-rcnn_r50_fpn_1x_coco cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco
strong_baselines/mask-rcnn_r50_fpn_rpn-2conv_4conv1fc_syncbn-all_lsj-100e_coco
retinanet/retinanet_r50_fpn_1x_coco
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
NAMES = [*(f"mmdet::{name}.py" for name in MMDET), *(f"mmseg::{name}.py" for name in MMSEG)]
# Random corners of one class do not agree on a centre.
NO_PREDICTIONS = ["mmdet::centripetalnet/centripetalnet_hourglass104_16xb6-crop511-210e-mstest_coco.py"]
QUICK = [
    f"mmdet::{MMDET[0]}.py",
    pytest.param(f"mmseg::{MMSEG[4]}.py", marks=pytest.mark.slow),
    pytest.param("mmdet::dcnv2/faster-rcnn_r50_fpn_mdpool_1x_coco.py", marks=pytest.mark.slow),
]
# Random weights give half of CenterNet's best peaks the same float32 score, and top-k leaves their order open: it
# changes with the number of threads on compiled mmcv as well.
FLOAT64 = ["mmdet::centernet/centernet_r18-dcnv2_8xb16-crop512-140e_coco.py"]


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
    for layer in model.modules():
        if isinstance(layer, TridentConv):  # which mmdet leaves as uninitialized memory
            torch.nn.init.kaiming_normal_(layer.weight)
    if "rtmdet/rtmdet_tiny" in name:  # boxes with positive sides
        for layer in model.bbox_head.rtm_reg:
            layer.bias.data += 1
    return config, model.double() if name in FLOAT64 else model


def _config(name: str) -> Config:
    config = Config.fromfile(Config._get_cfg_path(name, "x.py")[0])
    _for_random_weights(config.model)
    if config.model.get("num_queries", 0) > 300:  # more than the small picture has pixels
        config.model.num_queries = 100
    if "data_preprocessor" in config.model:
        config.model.data_preprocessor.pop("batch_augments", None)
    if "detectors/" in name:  # its initial weights multiply activations by 1e7, which leaves no box but background
        config.model.data_preprocessor.std = [1e8] * 3
    if "solo/" in name:  # its initial masks are 0.01 everywhere
        config.model.test_cfg.mask_thr = 0.01
    return config


def _for_random_weights(node: Any) -> None:
    # clip_border: boxes stay in the picture, or mmdet cannot paste their masks on CPUs
    values = {"score_thr": 1e-4, "filter_thr": 1e-4, "pretrained": None, "clip_border": True}
    if isinstance(node, dict):
        node.update({key: value for key, value in values.items() if key in node})
        if node.get("type") == "SyncBN":  # PyTorch's, for GPUs only; mmcv's is MMSyncBN
            node["type"] = "BN"
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else ():
        _for_random_weights(child)


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


def train(model: torch.nn.Module, batch: dict) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return losses and gradients of a training step."""
    seed()
    model.train()
    loss, log = model.parse_losses(model(**prepared(model, batch, True), mode="loss"))
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: float(value.detach()) for name, value in log.items()}, grads


def predict(model: torch.nn.Module, batch: dict) -> list[Tensor]:
    seed()
    model.eval()
    if any(isinstance(layer, MaskedConv2d) for layer in model.modules()):  # which takes one picture
        batch = {key: value[:1] for key, value in batch.items()}
    with torch.no_grad():
        samples = model(**prepared(model, batch, False), mode="predict")
    return [tensor for sample in samples for tensor in tensors(sample)]


def prepared(model: torch.nn.Module, batch: dict, training: bool) -> dict:
    data = model.data_preprocessor(copy.deepcopy(batch), training)
    return data | dict(inputs=data["inputs"].to(next(model.parameters()).dtype))


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
    hub = MessageHub.get_current_instance()  # mmdet's TOOD and BoxInst read what a runner would write
    hub.update_info("epoch", 0)
    hub.update_info("iter", 5000)
    yield
    torch.set_num_threads(threads)
    DefaultScope._instance_dict.clear()
    MessageHub._instance_dict.clear()


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Random weights tie: which of equal scores wins may depend on the number of threads, on compiled mmcv as well."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_process() -> Iterator[None]:
    """Let mmcv's SyncBatchNorm find a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", QUICK)
def test_runs_on_the_stand_in(name: str) -> None:
    config, model = build(name)
    batch = inputs(name.partition("::")[0], config)
    with extension(mmcv_ext):
        losses, grads = train(model, batch)
        predictions = predict(model, batch)
    assert np.isfinite(list(losses.values())).all()
    assert all(grad.isfinite().all() for grad in grads.values())
    assert sum(tensor.numel() for tensor in predictions)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["faster_rcnn/faster-rcnn_r50_fpn_1x_coco", "mask_rcnn/mask-rcnn_r50_fpn_1x_coco",
                                  "dcnv2/faster-rcnn_r50_fpn_mdpool_1x_coco",
                                  "mask2former/mask2former_r50_8xb2-lsj-50e_coco"])  # fmt: skip
def test_runs_in_bfloat16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.SIZE", (64, 96))
    config, model = build(f"mmdet::{name}.py")
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    batch = inputs("mmdet", config)
    with extension(mmcv_ext):
        losses, grads = train(model, batch)
        predictions = predict(model, batch)
    assert np.isfinite(list(losses.values())).all()
    assert losses.get("loss_mask", 1) > 0
    assert grads
    assert all(grad.isfinite().all() for grad in grads.values())
    assert sum(tensor.numel() for tensor in predictions)
    assert all(tensor.isfinite().all() for tensor in predictions)


@pytest.mark.slow
def test_clrnet_predicts_lanes_on_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """CLRNet calls line NMS on GPUs only, and compiled mmcv has no kernel for CPUs."""
    from mmdet.models.dense_heads.clr_head.clr_head import CLRHead

    monkeypatch.setattr(CLRHead, "get_device", lambda self: "cuda")
    config, model = build("mmdet::clrnet/clrnet.py")
    model.bbox_head.reg_layers.bias.data[3] = 0.5  # a lane's length, which the initial weights leave at 0
    sample = BaseDataElement(org_width=800, org_height=320)
    with extension(mmcv_ext), torch.no_grad():
        (lanes,) = model.eval()(torch.randn(1, 3, 320, 800), [sample], mode="predict")
    assert 0 < len(lanes.pred_instances.lines) <= 5
    assert all(np.isfinite(lane).all() for lane in lanes.pred_instances.lines)


@needs_compiled
@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("one_process")
def test_equals_compiled_mmcv(name: str, table: Callable[..., None]) -> None:
    import mmcv._ext as compiled

    config, model = build(name)
    batch = inputs(name.partition("::")[0], config)
    _, theirs = build(name)
    theirs.load_state_dict(model.state_dict())
    with extension(mmcv_ext):
        losses, grads = train(model, batch)
        predictions = predict(model, batch)
    assert np.isfinite(list(losses.values())).all()
    assert all(grad.isfinite().all() for grad in grads.values())
    assert all(tensor.isfinite().all() for tensor in predictions)
    assert bool(sum(tensor.numel() for tensor in predictions)) == (name not in NO_PREDICTIONS)

    loss = grad = other = None
    with extension(compiled):
        if trained := if_compiled(train, theirs, batch):
            loss, grad = differences(losses, trained[0]), differences(grads, trained[1])
            if (predicted := if_compiled(predict, theirs, batch)) is not None:
                other = differences(dict(enumerate(predictions)), dict(enumerate(predicted)), per_key=True)
    cells = ["no kernel" if d is None else "0" if d == 0 else f"{d:.0e}" for d in (loss, grad, other)]
    table(name, *cells[:2], "none" if name in NO_PREDICTIONS else cells[2])
    assert loss is None or loss < 1e-6
    assert grad is None or grad < 1e-5
    assert other is None or other < 1e-5


def if_compiled(step: Callable[..., Any], *args: Any) -> Any:
    """Return a step's results, or None where compiled mmcv has no kernel for CPUs."""
    try:
        return step(*args)
    except RuntimeError as error:
        if "implementation for device cpu not found" in str(error):
            return None
        raise


def differences(ours: dict, theirs: dict, per_key: bool = False) -> float:
    """Return the largest difference relative to the largest value of all, or ``per_key``; for masks, the share."""
    assert ours.keys() == theirs.keys()
    difference, size = [0.0], [1e-30]
    for key in ours:
        a, b = torch.as_tensor(ours[key]), torch.as_tensor(theirs[key])
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if b.dtype == torch.bool and b.numel():
            difference.append(float((a != b).double().mean()))
            size.append(1.0)
        elif b.numel():
            difference.append(float((a.double() - b.double()).abs().max()))
            size.append(max(float(b.abs().max()), 1e-30))
    return max(d / s for d, s in zip(difference, size)) if per_key else max(difference) / max(size)


@pytest.fixture(scope="module")
def table() -> Iterator[Callable[..., None]]:
    rows: list[str] = []
    yield lambda *cells: rows.append(f"| {' | '.join(cells)} |")
    if page := os.environ.get("MMCV_EXT_PAGE"):
        Path(page).write_text(PAGE.format(rows="\n".join(rows), date=time.strftime("%Y-%m-%d"), torch=torch.__version__,
                                          python=platform.python_version()))  # fmt: skip


PAGE = """# mmcv without its binary: whole models

Models with random weights on two pictures of 128 × 160 pixels: one training step and one prediction, with compiled mmcv
and with the stand-in, from the same seed. The largest difference, relative to the largest loss, gradient, and value of
a prediction's tensor (boxes, scores, labels; for masks, the share of pixels that differ). Score thresholds are 1e-4,
since random weights would pass no other. *No kernel*: compiled mmcv has none for CPUs, and the stand-in ran alone.
*None*: nothing is predicted. CenterNet with DCNv2 runs in float64, since half of its best scores tie in float32.

Command: `MMCV_EXT_PAGE=benchmarks/mmcv-stand-in.md python -m pytest -m peers tests/mm/test_mmcv_ext_models.py` after
`make env-peers` ({date}, Python {python}, torch {torch}, CPU).

| config | losses | gradients | predictions |
| --- | --- | --- | --- |
{rows}
"""
