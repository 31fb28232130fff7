"""``tools.caption`` with checkpoints, data folders, detectors and options that do not fit: one line says why."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("fairseq")

from attn_plugins.captioning.region_features import RegionFeatures, write_region_features
from tests.tools.caption_helpers import run
from tools import caption as tool
from tools.captioning.attributes import AttributeDetector
from tools.captioning.timm_backbone import TimmBackbone

pytestmark = pytest.mark.usefixtures("one_thread")


def copied(data: Path, tmp_path: Path) -> Path:
    shutil.copytree(data, tmp_path / "data")
    shutil.copy(data.parent / "best.safetensors", tmp_path)
    return tmp_path / "data"


def of_other_task(data: Path, tmp_path: Path) -> list:
    state = torch.load(data.parent / "entangled.pt", weights_only=False)
    state["cfg"]["task"]["_name"] = "translation"
    torch.save(state, tmp_path / "other.pt")
    return ["--path", tmp_path / "other.pt"]


def of_other_file(data: Path, tmp_path: Path) -> list:
    torch.save({"weight": torch.ones(2)}, tmp_path / "other.pt")
    return ["--path", tmp_path / "other.pt"]


def without_recipe(data: Path, tmp_path: Path) -> list:
    folder, features = copied(data, tmp_path), RegionFeatures(data / "regions.npz")
    write_region_features(folder / "regions.npz", [(i, features.regions(i)) for i in features.image_ids])
    return ["--data", folder]


def of_another_width(data: Path, tmp_path: Path) -> list:
    folder, features = copied(data, tmp_path), RegionFeatures(data / "regions.npz")
    images = [(1, {**features.regions(1), "features": features.regions(1)["features"][:, :5]})]
    write_region_features(folder / "regions.npz", images, recipe=features.recipe)
    return ["--data", folder]


def of_another_recipe(data: Path, tmp_path: Path) -> list:
    folder, features = copied(data, tmp_path), RegionFeatures(data / "regions.npz")
    recipe = features.recipe
    recipe["options"].update(grid="test_vit")
    images = [(i, features.regions(i)) for i in features.image_ids]
    write_region_features(folder / "regions.npz", images, recipe=recipe)
    vit = TimmBackbone("test_vit")
    torch.save(vit.model.state_dict(), tmp_path / "vit.pth")
    return ["--data", folder, "--region-checkpoint", tmp_path / "vit.pth"]


def without_vocabulary(data: Path, tmp_path: Path) -> list:
    (copied(data, tmp_path) / "dict.txt").unlink()
    return ["--data", tmp_path / "data"]


def of_other_words(data: Path, tmp_path: Path) -> list:
    AttributeDetector(TimmBackbone("test_resnet", (64, 64)), ["quark", "gluon"]).save(tmp_path / "other.safetensors")
    return ["--detector", tmp_path / "other.safetensors"]


def another_vocabulary(data: Path, tmp_path: Path) -> list:
    with (copied(data, tmp_path) / "dict.txt").open("a") as file:
        file.write("quark 9\n")
    return ["--data", tmp_path / "data"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (of_other_task, r"--path: .*other\.pt is of the task translation, not captioning"),
        (of_other_file, r"--path: .*other\.pt cannot be read as a fairseq checkpoint"),
        (["--path", "nowhere.pt"], r"--path: nowhere\.pt does not exist"),
        (["--path", __file__], r"test_caption_bad_input\.py cannot be read as a fairseq checkpoint"),
        (without_recipe, r"regions\.npz has no recipe.*extract_regions --overwrite creates it again"),
        (of_another_width, r"the checkpoint has \d+ channels per region; those of .*regions\.npz have 5"),
        (of_another_recipe, r"the regions have 64 channels, but those of .*regions\.npz \d+"),
        (without_vocabulary, r"the vocabulary .*dict\.txt does not exist: .*--data takes another folder"),
        (another_vocabulary, r"the checkpoint has \d+ words; the task's dictionary has \d+"),
        (["--data", "nowhere"], r"nowhere.* does not exist: .*--data takes another folder"),
        (["--detector", "nowhere.safetensors"], r"weights nowhere\.safetensors: no such file"),
        (of_other_words, "the detector's words, such as 'quark', are not in the vocabulary"),
        (["--region-checkpoint", "nowhere"], "--region-checkpoint: nowhere does not exist"),
        (["--layer", "3"], "--layer must be from 1 to 2, the model's blocks, or all, got 3"),
        (["--beam", "0"], "--beam must be at least 1, got 0"),
        (["--max-len", "0"], "--max-len must be at least 1, got 0"),
    ],
)
def test_bad_input_is_reported_once(options, message, captioned, tmp_path, capsys):
    given = options(captioned, tmp_path) if callable(options) else options
    pictures = [captioned / "images/000006.jpg", captioned / "images/000007.jpg"]
    assert run(captioned, tmp_path / "out", *pictures, options=tuple(given)) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("caption: ")
    assert re.search(message, line), line
    assert not (tmp_path / "out").exists()


def test_a_model_of_attributes_needs_a_detector(captioned, tmp_path, capsys):
    options = [
        str(captioned / "images/000006.jpg"),
        "--path",
        str(captioned.parent / "semantic.pt"),
        "--out",
        str(tmp_path),
    ]
    assert tool.main(options) == 2
    assert "--detector is needed: the fusion of --path" in capsys.readouterr().err
