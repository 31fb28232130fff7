"""The toolkits' tools on our detectors and segmentors: two processes, a run that is killed and resumed, inference."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mmdet.apis import inference_detector, init_detector
from mmdet.registry import MODELS
from mmengine.config import Config
from mmseg.apis import inference_model, init_model

from tests.mm.mm_helpers import ROOT, TEST_TOOL, mmseg_tool, without_downloads
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
ROUNDING = 1e-6  # of losses and weights of the first steps
NEW = ("conv2.conv_offset.weight", "gen_attention_block.gamma")  # parameters that start at zero


def made(folder: Path, digits: Path) -> Run:
    return Run(folder, ATSS, base=str(BASE), data=f"{digits}/")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, digits) -> Run:
    run = made(tmp_path_factory.mktemp("training") / "run", digits)
    run.finish()
    return run


def test_the_loss_falls(uninterrupted):
    losses = uninterrupted.losses()
    assert losses[ITERATIONS_PER_EPOCH * EPOCHS] < losses[1]


@pytest.mark.slow
def test_two_processes_give_the_curve_of_one_with_the_doubled_batch(uninterrupted, digits, tmp_path):
    run = made(tmp_path / "two", digits)
    run.finish(processes=2, batch_size=2)
    # From step to step the two differ by rounding alone; later, sampling points that cross a pixel and the assignment
    # of objects to anchors amplify it (measured: 1e-7 in the first five steps, 5e-5 in the last ones).
    got, want = run.losses(), uninterrupted.losses()
    assert sorted(got) == sorted(want) == list(range(1, ITERATIONS_PER_EPOCH * EPOCHS + 1))
    for iteration in want:
        assert got[iteration] == pytest.approx(want[iteration], rel=ROUNDING if iteration <= 5 else 5e-3)
    assert_same_weights(run, uninterrupted, epoch=1, atol=ROUNDING)
    moved = uninterrupted.weights(EPOCHS)
    for ending in NEW:
        values = [v for key, v in moved.items() if key.endswith(ending)]
        assert values
        assert max(v.abs().max() for v in values) > 5e-6


@pytest.mark.slow
def test_a_killed_run_resumes_on_its_curve(uninterrupted, digits, tmp_path):
    run = made(tmp_path / "killed", digits)
    last = ITERATIONS_PER_EPOCH + 2  # two iterations past the first checkpoint
    assert run.start(kill_after=last) == -signal.SIGKILL, run.log.read_text()[-3000:]
    assert max(run.losses()) == last
    assert not (run.folder / f"epoch_{EPOCHS}.pth").exists()
    run.losses_file.unlink()

    run.finish("--resume")
    rest = {n: loss for n, loss in uninterrupted.losses().items() if n > ITERATIONS_PER_EPOCH}
    assert run.losses() == pytest.approx(rest, rel=1e-6)
    assert_same_weights(run, uninterrupted, EPOCHS, atol=1e-6)


@pytest.mark.slow
def test_testing_tool_and_init_detector(digits, tmp_path):
    config = BASE.parent / "atss_narrow-r50-c4-attn1111-dcn_fpn_digits.py"
    model = MODELS.build(without_downloads(Config.fromfile(config)).model)
    torch.save(dict(state_dict=model.state_dict(), meta={}), tmp_path / "model.pth")
    options = ["--cfg-options", f"test_dataloader.dataset.data_root={digits}/", "test_dataloader.num_workers=0"]
    options += ["test_dataloader.persistent_workers=False", f"test_evaluator.ann_file={digits}/annotations/val.json"]
    log = run_tool(TEST_TOOL, config, tmp_path / "model.pth", "--work-dir", tmp_path / "test", *options)
    assert re.search(r"coco/bbox_mAP: -?\d", log)
    loaded = init_detector(str(config), str(tmp_path / "model.pth"), device="cpu")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    result = inference_detector(loaded, str(next((digits / "val").glob("*.png"))))
    assert result.pred_instances.scores.isfinite().all()


SEGMENTOR = """
_base_ = {base!r}
loader = dict(num_workers=0, persistent_workers=False, dataset=dict(data_root={data!r}))
train_dataloader = dict(batch_size=2, **loader)
val_dataloader = test_dataloader = loader
train_cfg = dict(max_iters=3, val_interval=3)
default_hooks = dict(checkpoint=dict(interval=3))
"""


@pytest.mark.slow
def test_mmseg_trains_tests_and_infers(digits, tmp_path):
    config = tmp_path / "config.py"
    base = ROOT / "configs/mmseg/digits/bi-cc_narrow-r18_digits.py"
    config.write_text(SEGMENTOR.format(base=str(base), data=f"{digits}/"))
    log = run_tool(mmseg_tool("train"), config, "--work-dir", tmp_path / "work")
    assert "mIoU:" in log
    log = run_tool(mmseg_tool("test"), config, tmp_path / "work/iter_3.pth", "--work-dir", tmp_path / "test")
    assert "mIoU:" in log
    model = init_model(str(config), str(tmp_path / "work/iter_3.pth"), device="cpu")
    result = inference_model(model, str(next((digits / "val").glob("*.png"))))
    assert result.pred_sem_seg.data.max() < 11


def run_tool(tool: Path, *arguments: object) -> str:
    """Run a toolkit's tool on one thread and return its output."""
    command = [sys.executable, str(tool), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr
