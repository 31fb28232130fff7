"""Models of mmdet and mmsegmentation on the stand-in for mmcv's compiled operators, and beside compiled mmcv."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mmcv.ops import MaskedConv2d
from mmdet.models.backbones.trident_resnet import TridentConv
from mmdet.testing import demo_mm_inputs
from mmengine.config import Config
from mmengine.logging import MessageHub
from mmengine.registry import MODELS, DefaultScope
from torch import Tensor

from attn_plugins import mmcv_ext
from tests.mm.mm_helpers import demo_batch, dictionaries, quarter, upstream
from tests.mm.mmcv_ext_helpers import extension

SIZE = (128, 160)
# Configs that between them call every operator of the stand-in that whole models call.
MMDET = """
faster_rcnn/faster-rcnn_r50_fpn_1x_coco faster_rcnn/faster-rcnn_r50_fpn_soft-nms_1x_coco
mask_rcnn/mask-rcnn_r50_fpn_1x_coco retinanet/retinanet_r50_fpn_1x_coco yolox/yolox_s_8xb8-300e_coco
strong_baselines/mask-rcnn_r50_fpn_rpn-2conv_4conv1fc_syncbn-all_lsj-100e_coco
solov2/solov2-light_r50-dcn_fpn_ms-3x_coco dino/dino-4scale_r50_8xb2-12e_coco ddq/ddq-detr-4scale_r50_8xb2-12e_coco
mask2former/mask2former_r50_8xb2-lsj-50e_coco dcn/faster-rcnn_r50-dconv-c3-c5_fpn_1x_coco
dcn/faster-rcnn_r50_fpn_dpool_1x_coco dcnv2/faster-rcnn_r50-mdconv-group4-c3-c5_fpn_1x_coco
dcnv2/faster-rcnn_r50_fpn_mdpool_1x_coco carafe/mask-rcnn_r50_fpn-carafe_1x_coco pisa/faster-rcnn_r50_fpn_pisa_1x_coco
guided_anchoring/ga-faster-rcnn_r50-caffe_fpn_1x_coco cornernet/cornernet_hourglass104_8xb6-210e-mstest_coco
centernet/centernet_r18-dcnv2_8xb16-crop512-140e_coco dyhead/atss_r50_fpn_dyhead_1x_coco
point_rend/point-rend_r50-caffe_fpn_ms-1x_coco reppoints/reppoints-moment_r50_fpn-gn_head-gn_1x_coco
tood/tood_r50_fpn_1x_coco vfnet/vfnet_r50_fpn_1x_coco cascade_rpn/cascade-rpn_faster-rcnn_r50-caffe_fpn_1x_coco
tridentnet/tridentnet_r50-caffe_1x_coco empirical_attention/faster-rcnn_r50-attn0010-dcn_fpn_1x_coco
""".split()
MMSEG = """
mask2former/mask2former_r50_8xb2-160k_ade20k-512x512 psanet/psanet_r50-d8_4xb4-20k_voc12aug-512x512
ccnet/ccnet_r50-d8_4xb4-20k_voc12aug-512x512 point_rend/pointrend_r50_4xb4-160k_ade20k-512x512
""".split()
NAMES = [*(f"mmdet::{name}" for name in MMDET), *(f"mmseg::{name}" for name in MMSEG)]
QUICK = [  # on the stand-in alone, and whether in bfloat16
    ("mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco", False),
    *(
        pytest.param(name, half, marks=pytest.mark.slow)
        for name, half in (
            ("mmseg::segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512", False),
            ("mmdet::dcnv2/faster-rcnn_r50_fpn_mdpool_1x_coco", True),
            ("mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco", True),
            ("mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco", True),
        )
    ),
]
# Random weights give half of CenterNet's best peaks the same float32 score, and top-k leaves their order open: it
# changes with the number of threads on compiled mmcv as well.
FLOAT64 = ["mmdet::centernet/centernet_r18-dcnv2_8xb16-crop512-140e_coco"]


def build(name: str, small: bool = False) -> tuple[Config, torch.nn.Module]:
    """Build a model with random weights, without score thresholds, which random weights would not pass."""
    import_module(f"{name.partition('::')[0]}.utils").register_all_modules(init_default_scope=True)
    config = _config(name)
    if small:
        quarter(config.model)
    seed()
    model = MODELS.build(config.model)
    model.init_weights()
    for layer in model.modules():
        if isinstance(layer, TridentConv):  # which mmdet leaves as uninitialized memory
            torch.nn.init.kaiming_normal_(layer.weight)
    return config, model.double() if name in FLOAT64 else model


def _config(name: str) -> Config:
    config = upstream(name)
    # clip_border: boxes stay in the picture, or mmdet cannot paste their masks on CPUs
    values = {"score_thr": 1e-4, "filter_thr": 1e-4, "pretrained": None, "clip_border": True}
    for node in dictionaries(config.model):
        node.update({key: value for key, value in values.items() if key in node})
        if node.get("type") == "SyncBN":  # PyTorch's, for GPUs only; mmcv's is MMSyncBN
            node["type"] = "BN"
    if config.model.get("num_queries", 0) > 300:  # more than the small picture has pixels
        config.model.num_queries = 100
    if "data_preprocessor" in config.model:
        config.model.data_preprocessor.pop("batch_augments", None)
    return config


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
    return demo_batch("mmseg", SIZE, 2, 20)


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
def two_threads() -> Iterator[None]:
    """Random weights tie: which of equal scores wins may depend on the number of threads, on compiled mmcv as well."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    hub = MessageHub.get_current_instance()  # mmdet's TOOD reads what a runner would write
    hub.update_info("epoch", 0)
    hub.update_info("iter", 5000)
    yield
    torch.set_num_threads(threads)
    DefaultScope._instance_dict.clear()
    MessageHub._instance_dict.clear()


@pytest.fixture
def one_process() -> Iterator[None]:
    """Let mmcv's SyncBatchNorm find a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name, half", QUICK)
def test_runs_on_the_stand_in(name: str, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.SIZE", (64, 96))
    config, model = build(name, small=True)
    if half:
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    batch = inputs(name.partition("::")[0], config)
    with extension(mmcv_ext):
        losses, grads = train(model, batch)
        predictions = predict(model, batch)
    assert np.isfinite(list(losses.values())).all()
    assert losses.get("loss_mask", 1) > 0
    assert grads
    assert all(grad.isfinite().all() for grad in grads.values())
    assert sum(tensor.numel() for tensor in predictions)
    assert all(tensor.isfinite().all() for tensor in predictions)


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("one_process")
def test_equals_compiled_mmcv(name: str) -> None:
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
    assert sum(tensor.numel() for tensor in predictions)
    with extension(compiled):
        if trained := if_compiled(train, theirs, batch):
            assert differences(losses, trained[0]) < 1e-6
            assert differences(grads, trained[1]) < 1e-5
            if (predicted := if_compiled(predict, theirs, batch)) is not None:
                assert differences(dict(enumerate(predictions)), dict(enumerate(predicted)), per_key=True) < 1e-5


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
