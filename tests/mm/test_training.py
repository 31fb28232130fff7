"""mmdet's own training tool on the attended detector: two processes, and a run that is killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from mm_helpers import ROOT, TRAIN_TOOL

ITERATIONS_PER_EPOCH, EPOCHS = 4, 3

# Nothing here depends on how a batch is split: group norm, one image size, no random augmentation, and SGD,
# whose step is linear in the gradient (Adam's first steps are its sign, which rounding can turn).
CONFIG = """
_base_ = {base!r}
custom_imports = dict(imports=["attn_plugins.mmcv", "attn_plugins.mmcv.cpu_launch", "loss_log"])
norm = dict(type="GN", num_groups=4, requires_grad=True)
model = dict(
    backbone=dict(base_channels=8, norm_cfg=norm),
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
    optimizer=dict(_delete_=True, type="SGD", lr=0.01, momentum=0.9), clip_grad=dict(max_norm=5.0))
param_scheduler = [dict(type="LinearLR", start_factor=0.1, by_epoch=False, begin=0, end=8)]
custom_hooks = [dict(type="LossLog", file={losses!r})]
"""


class Run:
    """One training in its own folder, started by mmdet's tool."""

    def __init__(self, folder: Path, data: Path):
        folder.mkdir()
        self.folder, self.losses_file = folder, folder / "losses.jsonl"
        self.config, self.log = folder / "config.py", folder / "log.txt"
        base = ROOT / "configs/mmdet/digits/atss_narrow-r50-attn0010-dcn_fpn_digits.py"
        self.config.write_text(
            CONFIG.format(base=str(base), data=f"{data}/", epochs=EPOCHS, losses=str(self.losses_file))
        )

    def start(self, *arguments: str, processes: int = 1, batch_size: int = 4) -> subprocess.Popen:
        launcher = []
        if processes > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
            arguments = (*arguments, "--launcher", "pytorch")
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        options = ["--cfg-options", f"train_dataloader.batch_size={batch_size}"]
        command = [sys.executable, *launcher, TRAIN_TOOL, self.config, "--work-dir", self.folder, *arguments, *options]
        with self.log.open("a") as log:
            return subprocess.Popen(
                [str(part) for part in command],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self, *arguments: str, **options: int) -> None:
        code = self.start(*arguments, **options).wait(timeout=300)
        assert code == 0, self.log.read_text()[-3000:]

    def losses(self) -> dict[int, float]:
        """Iteration -> loss; of an iteration that ran twice, the second."""
        lines = self.losses_file.read_text().splitlines() if self.losses_file.exists() else []
        return {entry["iteration"]: entry["loss"] for entry in map(json.loads, lines)}

    def weights(self) -> dict[str, torch.Tensor]:
        file = self.folder / f"epoch_{EPOCHS}.pth"
        return torch.load(file, weights_only=False)["state_dict"]  # our own file, seconds old


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, digits) -> Run:
    run = Run(tmp_path_factory.mktemp("training") / "uninterrupted", digits)
    run.finish()
    return run


def assert_same_curve(run: Run, expected: Run, rtol: float) -> None:
    got, want = run.losses(), expected.losses()
    assert sorted(got) == sorted(want) == list(range(1, ITERATIONS_PER_EPOCH * EPOCHS + 1))
    assert got == pytest.approx(want, rel=rtol)
    weights = run.weights()
    for name, tensor in expected.weights().items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=rtol * max(1e-2, tensor.abs().max().item()))


def test_the_loss_falls(uninterrupted):
    losses = uninterrupted.losses()
    assert losses[ITERATIONS_PER_EPOCH * EPOCHS] < losses[1]


def test_two_processes_give_the_curve_of_one_with_the_doubled_batch(uninterrupted, digits, tmp_path):
    run = Run(tmp_path / "two", digits)
    run.finish(processes=2, batch_size=2)
    assert_same_curve(run, uninterrupted, rtol=1e-4)


def test_a_killed_run_resumes_on_its_curve(uninterrupted, digits, tmp_path):
    run = Run(tmp_path / "killed", digits)
    process = run.start()
    deadline = time.monotonic() + 240
    while max(run.losses(), default=0) < ITERATIONS_PER_EPOCH + 2:  # two iterations past the first checkpoint
        assert process.poll() is None, run.log.read_text()[-3000:]
        assert time.monotonic() < deadline, "the run makes no progress"
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (run.folder / f"epoch_{EPOCHS}.pth").exists()
    run.losses_file.unlink()

    run.finish("--resume")
    resumed = run.losses()
    assert min(resumed) == ITERATIONS_PER_EPOCH + 1, "it did not go on after the last checkpoint"
    before = {n: loss for n, loss in uninterrupted.losses().items() if n <= ITERATIONS_PER_EPOCH}
    with run.losses_file.open("a") as lines:
        lines.writelines(json.dumps(dict(iteration=n, loss=loss)) + "\n" for n, loss in before.items())
    assert_same_curve(run, uninterrupted, rtol=1e-6)
