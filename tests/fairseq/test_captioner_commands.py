"""The stock console commands with the captioners: both stages, an interruption, ensembles."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fairseq")

from tests.fairseq.captioning_helpers import CAPTIONERS, write_images
from tests.fairseq.console_helpers import in_one_process, parameters

OPTIONS = ["--user-dir=plugins/fairseq", "--task=captioning", "--min-word-count=1", "--cpu", "--num-workers=0"]
# One batch holds all samples, because fairseq shuffles samples of equal length by the run's first epoch.
TRAIN = [*OPTIONS, "--optimizer=adam", "--batch-size=40", "--dropout=0", "--no-progress-bar", "--log-format=simple"]
CRITERIA = {"show_attend_tell": "doubly_stochastic_cross_entropy"}


def first_stage(name: str, data: Path, folder: Path, updates: int) -> list[Any]:
    criterion = f"--criterion={CRITERIA.get(name, 'label_smoothed_cross_entropy')}"
    model = [f"--arch={name}_tiny", "--embed-dim=32", criterion, "--label-smoothing=0.1", "--lr=0.02"]
    return [
        "train",
        data,
        *TRAIN,
        *model,
        f"--max-update={updates}",
        "--no-epoch-checkpoints",
        f"--save-dir={folder}",
        "--disable-validation",
    ]


@pytest.mark.slow
def test_both_stages_an_interruption_and_captions(tmp_path):
    """A run that was interrupted and resumed ends with the parameters of an uninterrupted run."""
    data, names = write_images(tmp_path / "data"), list(CAPTIONERS)
    commands = [first_stage(name, data, tmp_path / name, 10) for name in names]
    commands += [first_stage(name, data, tmp_path / f"{name}_again", updates) for name in names for updates in (5, 10)]
    for name in names:
        stage = [f"--arch={name}_tiny", "--embed-dim=32", "--criterion=self_critical", "--one-caption-per-image"]
        stage += ["--samples=2", "--baseline=mean", "--lr=0.001", "--max-update=2", "--no-epoch-checkpoints"]
        stage += [f"--finetune-from-model={tmp_path / name / 'checkpoint_last.pt'}", f"--save-dir={tmp_path / name}_sc"]
        commands.append(["train", data, *TRAIN, *stage])
    paths = ":".join(
        str(tmp_path / f"{name}{suffix}" / "checkpoint_last.pt") for name in names for suffix in ("", "_sc")
    )
    results = tmp_path / "captions.json"
    generate = ["--gen-subset=test", "--path", paths, "--beam=3", "--batch-size=2", "--max-len-b=9"]
    commands.append(["generate", data, *OPTIONS, *generate, "--results-json", results])
    logs = in_one_process(*commands)
    for name, log in zip(names, logs[:3]):
        losses = [float(loss) for loss in re.findall(r"\| train \|.* nll_loss (\S+)", log)]
        assert losses[-1] < losses[0] - 1
        assert ("| doubly_stochastic " in log) == (name == "show_attend_tell")
    for name, log in zip(names, logs[4:9:2]):
        assert f"Loaded checkpoint {tmp_path / name}_again/checkpoint_last.pt (epoch 6 @ 5 updates)" in log
        whole, resumed = parameters(tmp_path / name), parameters(tmp_path / f"{name}_again")
        torch.testing.assert_close(resumed, whole, rtol=1e-3, atol=1e-3)
    for name, log in zip(names, logs[9:12]):
        assert re.search(r"\| train \|.*\| reward \d", log)
        begun, ended = parameters(tmp_path / name), parameters(tmp_path / f"{name}_sc")
        assert 0 < max((begun[key] - ended[key]).abs().max() for key in begun) < 0.003
    captions = json.loads(results.read_text())
    assert [result["image_id"] for result in captions] == [105, 111, 117, 123]
    assert all(result["caption"].split()[0] in ("a", "the") for result in captions)
