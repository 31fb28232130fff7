"""tools.augmented_study: its settings build networks, records, the table; and the whole study on a few crops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("timm")
pytest.importorskip("matplotlib")
pytest.importorskip("skimage")
pytest.importorskip("sklearn")

import torch

from attn_plugins.modules import AAConv2d
from tools import augmented_study as study
from tools.classification.model import create_model


def changes(name: str, *more: str) -> list[str]:
    return [*study.SETTINGS[name].split(), study.EPOCHS, *study.HOUSEKEEPING, *more]


def result(name: str, seed: int, top1: list[float], **more) -> dict:
    """Return the record of a finished training."""
    options = study.training(name, changes(name), seed).options
    return {
        "set": "crops", "setting": name, "seed": seed, "options": options, "parameters": 1234, "top1": top1,
        "images": {"classes": 3, "train": 20, "val": 10}, "val_loss": [2.0] * len(top1), "train_cpu_seconds": 60.0,
        **more,
    }  # fmt: skip


def write_result(output: Path, row: dict) -> None:
    folder = output / "crops" / f"{row['setting']}-{row['seed']}"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(row))


@pytest.mark.parametrize("name", study.SETTINGS)
def test_settings_are_networks(name):
    config = study.training(name, changes(name), 0).config
    assert (config.epochs, config.input_size) == (6, (32, 32))
    with torch.device("meta"):
        model = create_model(config, 3)
    augmented = [module for module in model.modules() if isinstance(module, AAConv2d)]
    if name == "plain":
        assert {module.dv for module in augmented} == {0}
        return
    assert {module.position for module in augmented} == {config.model_args.get("position", "relative")}
    share = config.model_args["nu"]
    assert share == config.model_args["kappa"]
    assert all((module.conv is None) == (share == 1) for module in augmented)


def test_kept_results_make_the_table(tmp_path):
    for seed, top1 in ((0, [50.0, 80.0]), (1, [50.0, 84.0])):
        write_result(tmp_path, result("relative", seed, top1))
    write_result(tmp_path, result("none", 0, [70.0]))
    write_result(tmp_path, result("none", 1, [99.0], options={}))  # ran with other options
    table = study.report({name: changes(name) for name in study.SETTINGS}, tmp_path)
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == ["`none`", "`relative`"]
    assert rows[1][3:5] == ["0 1", "82.0 ± 2.8"]
    assert rows[0][3:5] == ["0", "70.0"]
    assert (tmp_path / "augmented.md").read_text() == table
    assert len(json.loads((tmp_path / "augmented.json").read_text())["results"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--settings", "relativ"], "--settings must be among plain, none, relative"),
        (["--add", "none=model_args.nu=0.5"], "--add must be NAME=OPTIONS"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        study.main([str(tmp_path / "out"), *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_a_bad_change_is_named(tmp_path, capsys):
    arguments = [str(tmp_path / "out"), "--add", "bad=epoch=3", "--settings", "bad"]
    assert study.main(arguments) == 2
    assert "augmented_study: setting bad: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_study_on_a_few_crops(tmp_path, capsys):
    from PIL import Image

    for number, part in enumerate(("train", "val")):
        for label in "ab":
            folder = tmp_path / "data/photograph_crops" / part / label
            folder.mkdir(parents=True)
            for n in range(2):
                Image.new("RGB", (32, 32), (90 * number, 40 * n, 200 * (label == "a"))).save(folder / f"{n}.png")
    few = "epochs=1 batch_size=4 input_size=[8,8] model_args.img_size=8 model_args.width=1"
    arguments = [str(tmp_path / "out"), f"--data={tmp_path / 'data'}", "--settings", "none", "--seeds", "3"]
    assert study.main([*arguments, "--train", few]) == 0
    found = json.loads((tmp_path / "out/crops/none-3/result.json").read_text())
    assert len(found["top1"]) == 1
    assert "configs/timm/crops.yaml" in found["command"]
    assert study.main([*arguments, "--train", few]) == 0
    assert "crops/none-3: already done" in capsys.readouterr().out
