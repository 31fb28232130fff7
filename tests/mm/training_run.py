"""Training runs that tests start with mmdet's tool: in several processes, killed, resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.mm.mm_helpers import ROOT, TRAIN_TOOL

ITERATIONS_PER_EPOCH, EPOCHS = 4, 2
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


class Run:
    """A training run of mmdet's tool in its own folder.

    Args:
        folder: Folder to create.
        config: Text of the config with the fields {epochs} and {losses}, the file of :class:`LossLog`, and those in
            ``values``.
        **values: Values of further fields of ``config``.
    """

    def __init__(self, folder: Path, config: str, **values: str):
        folder.mkdir()
        self.folder, self.losses_file = folder, folder / "losses.jsonl"
        self.config, self.log = folder / "config.py", folder / "log.txt"
        self.config.write_text(config.format(epochs=EPOCHS, losses=str(self.losses_file), **values))

    def start(self, *arguments: str, processes: int = 1, batch_size: int = 4, kill_after: int | None = None) -> int:
        """Run the tool and return its exit code."""
        launcher = []
        if processes > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
            arguments = (*arguments, "--launcher", "pytorch")
        options = ["--cfg-options", f"train_dataloader.batch_size={batch_size}"]
        command = [sys.executable, *launcher, TRAIN_TOOL, self.config, "--work-dir", self.folder, *arguments, *options]
        environment = ENVIRONMENT if kill_after is None else {**ENVIRONMENT, "KILL_AFTER": str(kill_after)}
        with self.log.open("a") as log:
            return subprocess.run(
                [str(part) for part in command],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=1800,
            ).returncode

    def finish(self, *arguments: str, **options: int) -> None:
        assert self.start(*arguments, **options) == 0, self.log.read_text()[-3000:]

    def losses(self) -> dict[int, float]:
        """Return the loss of each iteration; if an iteration ran twice, the second."""
        lines = self.losses_file.read_text().splitlines() if self.losses_file.exists() else []
        return {entry["iteration"]: entry["loss"] for entry in map(json.loads, lines)}

    def weights(self, epoch: int) -> dict[str, torch.Tensor]:
        file = self.folder / f"epoch_{epoch}.pth"
        return torch.load(file, weights_only=False)["state_dict"]  # written by this test seconds ago


def assert_same_weights(run: Run, expected: Run, epoch: int, atol: float) -> None:
    weights = run.weights(epoch)
    for name, tensor in expected.weights(epoch).items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=atol, msg=lambda m, name=name: f"{name}: {m}")
