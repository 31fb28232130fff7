"""The classifier's trainer on few images and on corrupt ones."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("timm")

from tests.helpers.photo_folders import make_photographs
from tools.train.__main__ import main
from tools.train.config import Config, ConfigError
from tools.train.data import loaders

ROOT = Path(__file__).parents[2]
TINY = ["--model", "aa_resnet34", "--set", "model_args={'layers': [1, 1, 1, 1]}", "--set", "input_size=32"]


@pytest.fixture
def photographs(tmp_path) -> Path:
    return make_photographs(tmp_path / "photos", 4, 2)


def train(data: Path, output: Path, *arguments: str) -> int:
    config = str(ROOT / "configs/timm/image_folder.yaml")
    places = ["--data", str(data), "--output", str(output)]
    return main([config, *places, "--epochs", "1", "--set", "precision=float32", *TINY, *arguments])


def break_images(root: Path) -> dict[str, str]:
    """Corrupt three files; return their names with a part of the reason."""
    whole = (root / "train/cat/000.jpg").read_bytes()
    (root / "train/cat/001.jpg").write_bytes(whole[: len(whole) // 2])
    (root / "train/rocket/003.jpg").write_bytes(b"")
    (root / "val/coffee/001.jpg").write_bytes(b"no picture")
    return {
        "train/cat/001.jpg": "truncated", "train/rocket/003.jpg": "the file is empty",
        "val/coffee/001.jpg": "cannot identify image file",
    }  # fmt: skip


# --- few images ---------------------------------------------------------------------------------------------------


def test_the_starting_recipe_trains_on_96_photographs(tmp_path, capsys):
    photographs = make_photographs(tmp_path / "photos", 32, 4)
    assert train(photographs, tmp_path / "out") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "batch_size 256 is more than the 96 images of an epoch: training with batch_size 16, lr 0.0063 in proportion "
        "(--set batch_size=N takes another)"
    )
    assert lines[1].endswith("3 classes, 32×32 pixels; 96 + 12 images")
    assert json.loads(torch.load(tmp_path / "out/state.pt")["settings"])["config"]["batch_size"] == 16
    assert train(photographs, tmp_path / "other", "--set", "batch_size=48", "--set", "workers=1") == 0
    assert "batch_size" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "images, processes, accumulate, expected",
    [
        (256, 1, 1, (256, 1)), (255, 1, 1, (32, 1)), (96, 1, 1, (16, 1)), (96, 1, 4, (16, 4)), (9, 1, 1, (2, 1)),
        (9, 2, 1, (4, 1)), (5, 1, 4, (2, 1)), (1, 1, 1, (1, 1)), (2, 2, 1, (2, 1)),
    ],
)  # fmt: skip
def test_the_batch_size_that_fits(images, processes, accumulate, expected):
    fitted = Config("any", batch_size=256, accumulate=accumulate).fitting(images, processes)
    assert (fitted.batch_size, fitted.accumulate) == expected
    assert images // processes // fitted.share(processes) // fitted.accumulate >= 1
    with pytest.raises(ConfigError, match="an image to train on for each of 4 processes, got 3"):
        fitted.fitting(3, 4)


def test_loading_processes_are_the_cores_that_are_there(monkeypatch):
    cores = len(os.sched_getaffinity(0))
    assert loaders(Config("any")) == cores
    assert loaders(Config("any", workers=7)) == 7
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(2 * cores))
    assert loaders(Config("any")) == 1


# --- broken images ------------------------------------------------------------------------------------------------


def test_check_names_every_broken_image(photographs, capsys):
    assert main(["--data", str(photographs), "--check"]) == 0
    assert capsys.readouterr().out == "all 18 images can be read\n"
    expected = break_images(photographs)
    assert main(["--data", str(photographs), "--check"]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "3 of 18 images cannot be read"
    assert len(lines) == 3
    for line, (file, reason) in zip(lines, expected.items()):
        assert line.startswith(f"{photographs / file}: ")
        assert reason in line


def test_a_broken_image_ends_the_training_in_one_line(photographs, tmp_path, capsys):
    (photographs / "val/coffee/001.jpg").write_bytes(b"no picture")
    assert train(photographs, tmp_path / "out", "--set", "workers=2") == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"train: {photographs}/val/coffee/001.jpg cannot be read as a picture: ")
    assert error.endswith("; --check lists every broken image, --skip-broken trains without them")


@pytest.mark.slow
def test_no_image_is_left(photographs, tmp_path, capsys):
    for file in (photographs / "train/cat").iterdir():
        file.write_bytes(b"")
    assert train(photographs, tmp_path / "out", "--skip-broken") == 2
    assert f"a readable image of every class, and {photographs}/train/cat has none" in capsys.readouterr().err
    shutil.copytree(photographs / "train/coffee", photographs / "train/cat", dirs_exist_ok=True)
    for file in (photographs / "val").glob("*/*.jpg"):
        file.write_bytes(b"")
    assert train(photographs, tmp_path / "out", "--skip-broken") == 2
    assert f"a readable image to validate with, and {photographs}/val has none" in capsys.readouterr().err
