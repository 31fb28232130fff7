"""The toolkits' tools on our detectors and segmentors: two processes, a run that is killed and resumed, inference."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.mm.mm_helpers import ROOT, TEST_TOOL, mmseg_tool
from tests.mm.training_run import ENVIRONMENT, EPOCHS, ITERATIONS_PER_EPOCH, Run, assert_same_weights

BASE = ROOT / "configs/mmdet/digits/atss_narrow-r50-attn0010-dcn_fpn_digits.py"

# Nothing here depends on how a batch is split: group norm, one image size, no random augmentation, and SGD,
# whose step is linear in the gradient (Adam's first steps are its sign, which rounding can turn).
ATSS = """
_base_ = {base!r}
custom_imports = dict(imports=["attn_plugins.mmcv", "attn_plugins.mmcv.cpu_launch", "loss_log"])
norm = dict(type="GN", num_groups=4, requires_grad=True)
model = dict(
    backbone=dict(base_channels=8, norm_cfg=norm, zero_init_residual=False),  # so new layers learn at once
    neck=dict(in_channels=[32, 64, 128, 256], out_channels=16),
    bbox_head=dict(in_channels=16, feat_channels=16, norm_cfg=norm),
)
pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="Resize", scale=(128, 96), keep_ratio=False),
    dict(type="PackDetInputs"),
]
train_dataloader = dict(
    num_workers=0, persistent_workers=False, batch_sampler=None,
    dataset=dict(data_root={data!r}, pipeline=pipeline))
val_cfg = val_dataloader = val_evaluator = None
train_cfg = dict(max_epochs={epochs}, val_interval=100)
optim_wrapper = dict(
    optimizer=dict(_delete_=True, type="SGD", lr=0.004, momentum=0.9), clip_grad=dict(max_norm=5.0))
param_scheduler = [dict(type="LinearLR", start_factor=0.1, by_epoch=False, begin=0, end=8)]
default_hooks = dict(checkpoint=dict(max_keep_ckpts=-1))
custom_hooks = [dict(type="LossLog", file={losses!r})]
"""
DETR = """
_base_ = "mmdet::detr/detr_r50_8xb2-150e_coco.py"
custom_imports = dict(
    imports=["attn_plugins.mmcv", "attn_plugins.mmcv.cpu_launch", "loss_log"], allow_failed_imports=False)
model_wrapper_cfg = dict(device_ids=None, broadcast_buffers=False)
heads = dict(embed_dims=32, num_heads=4, dropout=0.0)
feedforward = dict(embed_dims=32, feedforward_channels=32, ffn_drop=0.0)
model = dict(
    type="Attended",
    of="DETR",
    attention={{
        "encoder.layers.*.self_attn": dict(type="SpatialSelfAttention", attention_type="1111", kernel_size=3),
        "decoder.layers.*.self_attn": dict(type="SpatialSelfAttention", attention_type="1010"),
    }},
    num_queries=12,
    backbone=dict(
        depth=18, base_channels=8, frozen_stages=-1, norm_eval=False, init_cfg=None,
        norm_cfg=dict(type="GN", num_groups=4, requires_grad=True)),
    neck=dict(in_channels=[64], out_channels=32, num_outs=1),
    encoder=dict(num_layers=2, layer_cfg=dict(self_attn_cfg=heads, ffn_cfg=feedforward)),
    decoder=dict(num_layers=2, layer_cfg=dict(self_attn_cfg=heads, cross_attn_cfg=heads, ffn_cfg=feedforward)),
    positional_encoding=dict(num_feats=16),
    bbox_head=dict(num_classes=10, embed_dims=32, sync_cls_avg_factor=True),
    test_cfg=dict(max_per_img=12),
)
classes = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="Resize", scale=(128, 96), keep_ratio=False),
    dict(type="PackDetInputs", meta_keys=("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")),
]
common = dict(data_root={data!r}, metainfo=dict(classes=classes), pipeline=pipeline)
loader = dict(num_workers=0, persistent_workers=False, batch_sampler=None)
train_dataloader = dict(
    **loader, dataset=dict(**common, ann_file="annotations/train.json", data_prefix=dict(img="train/")))
val_dataloader = dict(
    num_workers=0, persistent_workers=False,
    dataset=dict(**common, ann_file="annotations/val.json", data_prefix=dict(img="val/")))
test_dataloader = val_dataloader
val_evaluator = test_evaluator = dict(ann_file={data!r} + "annotations/val.json")
train_cfg = dict(max_epochs={epochs}, val_interval=100)
optim_wrapper = dict(
    optimizer=dict(_delete_=True, type="SGD", lr=0.01, momentum=0.9, weight_decay=0.0), clip_grad=dict(max_norm=5.0),
    paramwise_cfg=dict(custom_keys=dict(backbone=dict(lr_mult=0.1))))
param_scheduler = [dict(type="LinearLR", start_factor=0.1, by_epoch=False, begin=0, end=8)]
default_hooks = dict(checkpoint=dict(max_keep_ckpts=-1))
custom_hooks = [dict(type="LossLog", file={losses!r})]
randomness = dict(seed=0)
env_cfg = dict(dist_cfg=dict(backend="gloo"))
"""

# The config, the rounding of losses and weights of the first steps, and new parameters that start at zero.
CONFIGS = {
    "deformable": (ATSS, 1e-6, ("conv2.conv_offset.weight", "gen_attention_block.gamma")),
    "attended": (DETR, 1e-5, (".gate",)),
}


@pytest.fixture(scope="module", params=["deformable", pytest.param("attended", marks=pytest.mark.slow)])
def uninterrupted(request, tmp_path_factory, digits) -> tuple[str, Run]:
    run = Run(tmp_path_factory.mktemp("training") / "run", CONFIGS[request.param][0], base=str(BASE), data=f"{digits}/")
    run.finish()
    return request.param, run


def test_the_loss_falls(uninterrupted):
    losses = uninterrupted[1].losses()
    assert losses[ITERATIONS_PER_EPOCH * EPOCHS] < losses[1]


@pytest.mark.slow
def test_two_processes_give_the_curve_of_one_with_the_doubled_batch(uninterrupted, digits, tmp_path):
    name, whole = uninterrupted
    config, rounding, new = CONFIGS[name]
    run = Run(tmp_path / "two", config, base=str(BASE), data=f"{digits}/")
    run.finish(processes=2, batch_size=2)
    # From step to step the two differ by rounding alone; later, sampling points that cross a pixel and the assignment
    # of objects to anchors amplify it (measured: 1e-7 in the first five steps, 5e-5 in the last ones).
    got, want = run.losses(), whole.losses()
    assert sorted(got) == sorted(want) == list(range(1, ITERATIONS_PER_EPOCH * EPOCHS + 1))
    for iteration in want:
        assert got[iteration] == pytest.approx(want[iteration], rel=rounding if iteration <= 5 else 5e-3)
    assert_same_weights(run, whole, epoch=1, atol=rounding)
    moved = whole.weights(EPOCHS)
    for ending in new:
        values = [v for key, v in moved.items() if key.endswith(ending)]
        assert values
        assert max(v.abs().max() for v in values) > 5e-6


@pytest.mark.slow
def test_a_killed_run_resumes_on_its_curve(uninterrupted, digits, tmp_path):
    name, whole = uninterrupted
    run = Run(tmp_path / "killed", CONFIGS[name][0], base=str(BASE), data=f"{digits}/")
    last = ITERATIONS_PER_EPOCH + 2  # two iterations past the first checkpoint
    assert run.start(kill_after=last) == -signal.SIGKILL, run.log.read_text()[-3000:]
    assert max(run.losses()) == last
    assert not (run.folder / f"epoch_{EPOCHS}.pth").exists()
    run.losses_file.unlink()

    run.finish("--resume")
    resumed = run.losses()
    assert min(resumed) == ITERATIONS_PER_EPOCH + 1, "it did not go on after the last checkpoint"
    rest = {n: loss for n, loss in whole.losses().items() if n > ITERATIONS_PER_EPOCH}
    assert resumed == pytest.approx(rest, rel=1e-6)
    assert_same_weights(run, whole, EPOCHS, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("uninterrupted", ["attended"], indirect=True)
def test_testing_tool_and_init_detector(uninterrupted, digits):
    run = uninterrupted[1]
    checkpoint = run.folder / f"epoch_{EPOCHS}.pth"
    log = run_tool(TEST_TOOL, run.config, checkpoint, "--work-dir", run.folder / "test")
    assert re.search(r"coco/bbox_mAP: -?\d", log)

    from mmdet.apis import inference_detector, init_detector

    sys.path.insert(0, str(Path(__file__).parent))  # the config imports loss_log
    try:
        model = init_detector(str(run.config), str(checkpoint), device="cpu")
    finally:
        sys.path.remove(str(Path(__file__).parent))
    for name, tensor in run.weights(EPOCHS).items():
        assert torch.equal(model.state_dict()[name], tensor)
    result = inference_detector(model, str(next((digits / "val").glob("*.png"))))
    assert result.pred_instances.scores.isfinite().all()
    assert len(result.pred_instances) == 12


SEGMENTOR = """
_base_ = {base!r}
custom_imports = dict(
    imports=["attn_plugins.mmcv", "attn_plugins.mmcv.cpu_launch"], allow_failed_imports=False)
size = (64, 96)
classes = {classes!r}
model = dict(
    data_preprocessor=dict(size=size),
    backbone=dict(base_channels=8, norm_cfg=dict(type="BN"), init_cfg=None),
    decode_head=dict(
        in_channels=[32, 64, 128, 256], num_classes=11, num_queries=6,
        transformer_decoder=dict(num_layers=1),
        loss_cls=dict(class_weight=[1.0] * 11 + [0.1]),
    ),
)
digits = dict(
    type="BaseSegDataset", data_root={data!r}, metainfo=dict(classes=classes), img_suffix=".png",
    seg_map_suffix=".png", reduce_zero_label=False)
load, resize = dict(type="LoadImageFromFile"), dict(type="Resize", scale=(96, 64))
annotations, pack = dict(type="LoadAnnotations"), dict(type="PackSegInputs")
loader = dict(_delete_=True, batch_size=2, num_workers=0, sampler=dict(type="DefaultSampler", shuffle=False))
train_dataloader = dict(loader, dataset=dict(
    **digits, data_prefix=dict(img_path="train", seg_map_path="semantic/train"),
    pipeline=[load, annotations, resize, pack]))
val_dataloader = dict(loader, batch_size=1, dataset=dict(
    **digits, data_prefix=dict(img_path="val", seg_map_path="semantic/val"),
    pipeline=[load, resize, annotations, pack]))
test_dataloader = val_dataloader
train_cfg = dict(max_iters=3, val_interval=3)
default_hooks = dict(checkpoint=dict(interval=3))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "mask2former_r50_pixels-saliency_8xb2-160k_ade20k-512x512",
        "maskformer_r50-d32_queries-1010_8xb2-160k_ade20k-512x512",
    ],
)
def test_mmseg_trains_tests_and_infers(name, digits, tmp_path):
    from mmseg.apis import inference_model, init_model

    config = tmp_path / "config.py"
    base = ROOT / f"configs/mmseg/transformers/{name}.py"
    classes = ("background", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    config.write_text(SEGMENTOR.format(base=str(base), data=f"{digits}/", classes=classes))
    log = run_tool(mmseg_tool("train"), config, "--work-dir", tmp_path / "work")
    assert "mIoU:" in log
    log = run_tool(mmseg_tool("test"), config, tmp_path / "work/iter_3.pth", "--work-dir", tmp_path / "test")
    assert "mIoU:" in log
    model = init_model(str(config), str(tmp_path / "work/iter_3.pth"), device="cpu")
    picture = next((digits / "val").glob("*.png"))
    result = inference_model(model, str(picture))
    assert result.pred_sem_seg.data.max() < 11


def run_tool(tool: Path, *arguments: object) -> str:
    """Run a toolkit's tool on one thread and return its output."""
    command = [sys.executable, str(tool), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr
