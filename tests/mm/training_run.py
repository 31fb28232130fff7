"""A training that the tests start by mmdet's own tool: in several processes, killed, resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.mm.mm_helpers import ROOT, TRAIN_TOOL

ITERATIONS_PER_EPOCH, EPOCHS = 4, 3


class Run:
    """One training in its own folder, started by mmdet's tool.

    Args:
        folder: To be made.
        config: Text of the config, in which {epochs} and {losses}, of :class:`LossLog`, are to be filled in, and what
            ``values`` has.
        **values: For other fields of ``config``.
    """

    def __init__(self, folder: Path, config: str, **values: str):
        folder.mkdir()
        self.folder, self.losses_file = folder, folder / "losses.jsonl"
        self.config, self.log = folder / "config.py", folder / "log.txt"
        self.config.write_text(config.format(epochs=EPOCHS, losses=str(self.losses_file), **values))

    def start(self, *arguments: str, processes: int = 1, batch_size: int = 4, kill_after: int | None = None) -> int:
        """Run the tool; its return code."""
        launcher = []
        if processes > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
            arguments = (*arguments, "--launcher", "pytorch")
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        options = ["--cfg-options", f"train_dataloader.batch_size={batch_size}"]
        command = [sys.executable, *launcher, TRAIN_TOOL, self.config, "--work-dir", self.folder, *arguments, *options]
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if kill_after is not None:
            environment["KILL_AFTER"] = str(kill_after)
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
        """Iteration -> loss; of an iteration that ran twice, the second."""
        lines = self.losses_file.read_text().splitlines() if self.losses_file.exists() else []
        return {entry["iteration"]: entry["loss"] for entry in map(json.loads, lines)}

    def weights(self, epoch: int) -> dict[str, torch.Tensor]:
        file = self.folder / f"epoch_{epoch}.pth"
        return torch.load(file, weights_only=False)["state_dict"]  # our own file, seconds old


def assert_same_weights(run: Run, expected: Run, epoch: int, atol: float) -> None:
    weights = run.weights(epoch)
    for name, tensor in expected.weights(epoch).items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=atol, msg=lambda m, name=name: f"{name}: {m}")
