"""Resuming the classifier's training: original settings, and runs that do not match."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("timm")

from tests.helpers.photo_folders import make_photographs
from tests.tools.test_train import rows
from tools.train.__main__ import main
from tools.train.checkpoint import read_weights
from tools.train.log import Log

VALUES = dict(
    model="aa_resnet34", model_args=dict(layers=[1, 1, 1, 1]), input_size=[32, 32], epochs=5, batch_size=256, hflip=0.5,
    label_smoothing=0.1, color_jitter=0.4, ema=0.9, accumulate=2, clip_grad=1.0, mixup=0.2,
)  # fmt: skip
BEGUN = ["--epochs", "3", "--set", "workers=0", "--set", "input_size=48", "--set", "model_args.nu=0.25"]


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> Path:
    return make_photographs(tmp_path_factory.mktemp("photographs") / "photos", 8, 2)


@pytest.fixture(scope="module")
def interrupted(photographs, tmp_path_factory) -> Path:
    """Return a folder with photos.yaml, a complete training in ``whole`` and an interrupted one in ``parts``."""
    root = tmp_path_factory.mktemp("runs")
    (root / "photos.yaml").write_text(yaml.safe_dump(VALUES))
    arguments = [str(root / "photos.yaml"), "--data", str(photographs), *BEGUN]
    assert main([*arguments, "--output", str(root / "whole")]) == 0
    row = Log.row

    def killed(self, **values):
        if values["epoch"] == 2:
            raise KeyboardInterrupt
        row(self, **values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Log, "row", killed)
        with pytest.raises(KeyboardInterrupt):
            main([*arguments, "--output", str(root / "parts")])
    return root


@pytest.fixture
def run(interrupted, tmp_path) -> Path:
    """Return a copy of ``interrupted``."""
    return Path(shutil.copytree(interrupted, tmp_path / "run"))


def resume(run: Path, photographs: Path, *arguments: str) -> int:
    return main([*arguments, "--data", str(photographs), "--output", str(run / "parts"), "--resume"])


def same_as_whole(run: Path) -> bool:
    whole, parts = (read_weights(run / name / "last.safetensors")[0] for name in ("whole", "parts"))
    return rows(run / "parts") == rows(run / "whole") and all(torch.equal(whole[key], parts[key]) for key in whole)


@pytest.mark.parametrize("arguments", [["photos.yaml"], [], ["photos.yaml", *BEGUN, "--batch-size", "256"]])
def test_the_settings_of_the_beginning_are_taken_up(run, photographs, arguments, capsys):
    assert resume(run, photographs, *(str(run / word) if word == "photos.yaml" else word for word in arguments)) == 0
    out, err = capsys.readouterr()
    assert same_as_whole(run)
    assert out.splitlines()[0].startswith("aa_resnet34: ")
    assert not err


def test_a_changed_config_is_named_and_changes_nothing(run, photographs, capsys):
    (run / "photos.yaml").write_text(yaml.safe_dump({**VALUES, "hflip": 0.0, "lr": 0.3, "epochs": 50}))
    assert resume(run, photographs, str(run / "photos.yaml")) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        f"CONFIG {run}/photos.yaml has changed since (epochs 5 → 50, hflip 0.5 → 0.0, lr None → 0.3): the training "
        "keeps its own settings"
    )
    assert same_as_whole(run)


def test_what_may_change_on_the_command_line_does(run, photographs, capsys):
    assert resume(run, photographs, "--set", "clip_grad=0.01", "--set", "hflip=0.5") == 0
    assert capsys.readouterr().out.splitlines()[0] == "resuming with clip_grad = 0.01, which was 1.0"
    assert not same_as_whole(run)
    assert json.loads(torch.load(run / "parts/state.pt")["settings"])["config"]["clip_grad"] == 0.01


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--epochs", "9"], "parts was trained with epochs = 3, but now it is 9; leave that out"),
        (["--set", "model_args.nu=0.5"], "was trained with model_args = {'layers': [1, 1, 1, 1], 'nu': 0.25}, but now"),
        (["--set", "input_size=64"], "was trained with input_size = [48, 48], but now it is [64, 64]"),
        (["--set", "weight_decay=0.1"], "was trained with weight_decay = 0.0001, but now it is 0.1"),
        (["--batch-size", "5"], "was trained with batch_size = 4, but now it is 5"),
        (["--model", "resnet18"], "was trained with model = 'aa_resnet34', but now it is 'resnet18'"),
        (["OTHER"], "parts holds a training of aa_resnet34, but CONFIG"),
    ],
)
def test_another_training(run, photographs, arguments, words, capsys):
    (run / "other.yaml").write_text("model: aa_resnet50")
    before = {file.name: file.read_bytes() for file in (run / "parts").iterdir()}
    arguments = [str(run / "other.yaml") if a == "OTHER" else a for a in arguments]
    assert resume(run, photographs, *arguments) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert words in error
    assert error.startswith("train: --resume: ")
    assert {file.name: file.read_bytes() for file in (run / "parts").iterdir()} == before


def test_there_is_nothing_to_resume(run, photographs, tmp_path, capsys, monkeypatch):
    def error_of(*arguments: str) -> str:
        assert main(["--data", str(photographs), "--resume", *arguments]) == 2
        (error,) = capsys.readouterr().err.splitlines()
        return error

    missing = tmp_path / "nowhere/state.pt"
    expected = f"--resume needs the state of a training, and there is no {missing}: name its folder by --output"
    assert expected in error_of(str(run / "photos.yaml"), "--output", str(tmp_path / "nowhere"))
    assert not missing.parent.exists()
    monkeypatch.chdir(tmp_path)
    assert "there is no work_dirs/photos/state.pt" in error_of(str(run / "photos.yaml"))
    assert "there is no work_dirs/aa_resnet34/state.pt" in error_of("--model", "aa_resnet34")
    assert "--resume needs the training's folder: name it by --output" in error_of()
    (run / "parts/state.pt").write_bytes(b"no state")
    assert "parts/state.pt cannot be read as one: " in error_of("--output", str(run / "parts"))
    torch.save(dict(weights=torch.zeros(1)), run / "parts/state.pt")
    assert "parts/state.pt cannot be read as one: " in error_of("--output", str(run / "parts"))


def test_other_images(run, photographs, tmp_path, capsys):
    fewer = Path(shutil.copytree(photographs, tmp_path / "fewer"))
    for file in list(fewer.glob("train/*/*.jpg"))[:2]:
        file.unlink()
    assert resume(run, fewer, "--set", "workers=0") == 0
    assert "--data holds 22 images to train on, 24 when the training began" in capsys.readouterr().out
    for half in ("train", "val"):
        (fewer / half / "cat").rename(fewer / half / "lion")
    assert resume(run, fewer) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "--resume needs --data of the same classes: only " in error
    assert error.endswith("state.pt has cat")
    assert main(["--data", str(fewer), "--evaluate", str(run / "whole/best.safetensors"), *BEGUN]) == 2
    assert "no model is given" in capsys.readouterr().err
    config = str(run / "photos.yaml")
    assert main([config, "--data", str(fewer), "--evaluate", str(run / "whole/best.safetensors"), *BEGUN]) == 2
    assert "--evaluate must be weights for the classes of --data: only " in capsys.readouterr().err


def test_broken_images_stay_left_out(photographs, tmp_path, capsys):
    root = Path(shutil.copytree(photographs, tmp_path / "photos"))
    whole = (root / "train/cat/003.jpg").read_bytes()
    (root / "train/cat/003.jpg").write_bytes(b"")
    (tmp_path / "photos.yaml").write_text(yaml.safe_dump({**VALUES, "epochs": 1, "workers": 0}))
    arguments = [str(tmp_path / "photos.yaml"), "--data", str(root), "--output", str(tmp_path / "out")]
    assert main([*arguments, "--skip-broken"]) == 0
    (root / "train/cat/003.jpg").write_bytes(whole)
    capsys.readouterr()
    assert main([*arguments, "--resume"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "left out 1 broken images, those that the training began without"
    assert "23 + 6 images" in out[1]
    assert out[2] == "nothing is left to train: 1 of 1 epochs are done"


def test_weights_are_evaluated_at_the_size_they_were_trained_at(run, photographs, capsys):
    (run / "bare.yaml").write_text(yaml.safe_dump(dict(VALUES, input_size=None, workers=0)))
    weights = ["--evaluate", str(run / "whole/best.safetensors"), "--set", "model_args.nu=0.25"]
    assert main([str(run / "bare.yaml"), "--data", str(photographs), *weights]) == 0
    best = max(row["top1"] for row in rows(run / "whole"))
    assert f"top-1 {best:.2f} %" in capsys.readouterr().out
