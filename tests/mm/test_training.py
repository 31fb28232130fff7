"""mmdet's training tool on the attended detector: two processes, and a run that is killed and resumed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.mm.mm_helpers import ROOT
from tests.mm.training_run import EPOCHS, ITERATIONS_PER_EPOCH, Run, assert_same_weights

BASE = ROOT / "configs/mmdet/digits/atss_narrow-r50-attn0010-dcn_fpn_digits.py"

# Nothing here depends on how a batch is split: group norm, one image size, no random augmentation, and SGD,
# whose step is linear in the gradient (Adam's first steps are its sign, which rounding can turn).
CONFIG = """
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


def training(folder: Path, data: Path) -> Run:
    return Run(folder, CONFIG, base=str(BASE), data=f"{data}/")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, digits) -> Run:
    run = training(tmp_path_factory.mktemp("training") / "uninterrupted", digits)
    run.finish()
    return run


def test_the_loss_falls(uninterrupted):
    losses = uninterrupted.losses()
    assert losses[ITERATIONS_PER_EPOCH * EPOCHS] < losses[1]


@pytest.mark.slow
def test_two_processes_give_the_curve_of_one_with_the_doubled_batch(uninterrupted, digits, tmp_path):
    run = training(tmp_path / "two", digits)
    run.finish(processes=2, batch_size=2)
    # From step to step the two differ by rounding alone; later, sampling points that cross a pixel and the assignment
    # of objects to anchors amplify it (measured: 1e-7 in the first five steps, 5e-5 in the last ones).
    got, want = run.losses(), uninterrupted.losses()
    assert sorted(got) == sorted(want) == list(range(1, ITERATIONS_PER_EPOCH * EPOCHS + 1))
    for iteration in want:
        assert got[iteration] == pytest.approx(want[iteration], rel=1e-6 if iteration <= 5 else 5e-3)
    assert_same_weights(run, uninterrupted, epoch=1, atol=1e-6)
    moved = uninterrupted.weights(1)
    for name in ("conv2.conv_offset.weight", "gen_attention_block.gamma"):  # both are initialised to zero
        assert max(v.abs().max() for key, v in moved.items() if key.endswith(name)) > 5e-6


@pytest.mark.slow
def test_a_killed_run_resumes_on_its_curve(uninterrupted, digits, tmp_path):
    run = training(tmp_path / "killed", digits)
    last = ITERATIONS_PER_EPOCH + 2  # two iterations past the first checkpoint
    assert run.start(kill_after=last) == -signal.SIGKILL, run.log.read_text()[-3000:]
    assert max(run.losses()) == last
    assert not (run.folder / f"epoch_{EPOCHS}.pth").exists()
    run.losses_file.unlink()

    run.finish("--resume")
    resumed = run.losses()
    assert min(resumed) == ITERATIONS_PER_EPOCH + 1, "it did not go on after the last checkpoint"
    rest = {n: loss for n, loss in uninterrupted.losses().items() if n > ITERATIONS_PER_EPOCH}
    assert resumed == pytest.approx(rest, rel=1e-6)
    assert_same_weights(run, uninterrupted, EPOCHS, atol=1e-6)
