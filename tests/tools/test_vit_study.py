"""tools.vit_study: its settings, records, tables and curves; and the whole study on a few digits."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("timm")
pytest.importorskip("matplotlib")
pytest.importorskip("skimage")
pytest.importorskip("sklearn")

from tools import vit_study as study
from tools import vit_study_report as pages
from tools.classification.model import create_model
from tools.datasets import image_folders
from tools.study import ROOT, StudyError

ONE_EPOCH = "epochs=1 batch_size=5 model_args.embed_dim=12"
IMAGES = {"classes": 10, "train": 20, "val": 10}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Write two digits per class for training and one for validation."""
    every, few = tmp_path_factory.mktemp("every") / "digits", tmp_path_factory.mktemp("few")
    assert image_folders.main(["digits", str(every)]) == 0
    for folder in every.glob("*/*"):
        copy = few / "digit_folders" / folder.relative_to(every)
        copy.mkdir(parents=True)
        for file in sorted(folder.iterdir())[: 2 if folder.parent.name == "train" else 1]:
            shutil.copy(file, copy)
    return few


def training(setting: str, data_set: str = "digits", seed: int = 0, more: str = "") -> study.Training:
    family, *changes = study.SETTINGS[setting].split()
    return study.Training(data_set, setting, family, (*changes, *study.HOUSEKEEPING, *more.split()), seed)


def result(one: study.Training, top1: list[float], **more) -> dict:
    """Return the record of a finished training."""
    return {
        "set": one.data_set,
        "setting": one.setting,
        "family": one.family,
        "seed": one.seed,
        "command": "python",
        "options": one.options,
        "images": IMAGES,
        "parameters": 12345,
        "top1": top1,
        "train_loss": [1.0] * len(top1),
        "val_loss": [2.0] * len(top1),
        "train_cpu_seconds": 60.0 * len(top1) * (1 + one.seed),
        "train_wall_seconds": 1.0,
        **more,
    }


def write_result(output: Path, one: study.Training, top1: list[float]) -> Path:
    path = one.folder(output) / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(result(one, top1)))
    return path


def cells(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize("data_set", study.FOLDERS)
@pytest.mark.parametrize("setting", study.SETTINGS)
def test_every_setting_has_a_recipe(setting, data_set):
    one = training(setting, data_set, 7)
    assert one.recipe.is_file()
    assert (one.config.seed, one.config.workers) == (7, 0)
    others = {training(name, data_set).config.epochs for name in study.SETTINGS}
    assert others == {one.config.epochs}


@pytest.mark.parametrize("data_set", study.FOLDERS)
def test_the_settings_of_a_family_differ_in_attention_alone(data_set):
    for family, key in (("vit", "attn_layer"), ("swin", "shift")):
        found = [training(name, data_set).options for name in study.SETTINGS if name.startswith(family)]
        assert len({one["model_args"].pop(key, True) for one in found}) == len(found)
        assert all(one == found[0] for one in found)


@pytest.mark.parametrize("data_set", study.FOLDERS)
def test_without_the_shift_parameters_are_the_same(data_set):
    shifted, unshifted = (create_model(training(name, data_set).config, 10) for name in ("swin", "swin-unshifted"))
    shapes = [{key: value.shape for key, value in model.named_parameters()} for model in (shifted, unshifted)]
    assert shapes[0] == shapes[1]
    shifts = [
        [block.attn.shift_size for stage in model.layers for block in stage.blocks] for model in (shifted, unshifted)
    ]
    side = training("swin", data_set).config.model_args["window_size"] // 2
    assert shifts == [[(0, 0), (side, side)] * 2 + [(0, 0)] * 2, [(0, 0)] * 6]  # the last map is a single window


def test_log(tmp_path):
    (tmp_path / "log.csv").write_text(
        "epoch,train_loss,top1,top5,val_loss,seconds\n1,2.5,10.0,50,2.25,1\n2,2,20,60,1,1\n"
    )
    assert study.read_log(tmp_path) == {"top1": [10.0, 20.0], "train_loss": [2.5, 2.0], "val_loss": [2.25, 1.0]}


def test_tables():
    rows = [result(training("vit-stock", seed=seed), [90.0, 50.0 + 10 * seed]) for seed in range(2)]
    rows += [result(training("swin"), [10.0, 20.0]), result(training("swin", "crops"), [30.0])]
    text = pages.markdown(rows, {"cpu": "one"})
    assert re.findall("^## .*", text, re.MULTILINE) == ["## digits", "## crops"]
    assert "20 images for training, 10 for validation; 10 classes" in text
    found = cells(text)
    assert [row[0] for row in found] == ["`vit-stock`", "`swin`", "`swin`"]
    # The accuracy at the end, not at the best epoch; minutes of one process and of two.
    assert found[0][1:] == ["12,345", "2", "0 1", "55.00 ± 7.07", "50.00 60.00", "2.000 ± 0.000", "1.500 ± 0.707"]
    assert found[2][1:5] == ["12,345", "1", "0", "30.00"]


def test_band():
    rows = [{"top1": [1.0, 2.0, 3.0]}, {"top1": [3.0, 2.0]}]
    epochs, mean, deviation = pages.band(rows)
    assert (epochs, mean) == ([1, 2], [2.0, 2.0])
    assert deviation == pytest.approx([2**0.5, 0.0])


def test_figure(tmp_path):
    from PIL import Image

    rows = [result(training(name, seed=seed), [10.0, 20.0 + seed]) for name in study.SETTINGS for seed in range(2)]
    rows.append(result(training("swin", "crops"), [30.0]))  # and no panel for vit next to it
    pages.draw(rows, tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as image:
        assert image.width > image.height
        assert len(set(image.convert("RGB").get_flattened_data())) > 100
    assert [file.name for file in tmp_path.iterdir()] == ["curves.png"]


def test_kept_results_make_the_report(tmp_path, data, capsys):
    for seed in (0, 1):
        write_result(tmp_path, training("vit-stock", seed=seed), [10.0, 20.0 + seed])
    write_result(tmp_path, training("vit-stock", seed=2, more="epochs=3"), [99.0])
    write_result(tmp_path, training("swin", "crops"), [30.0])
    assert study.finished(training("vit-stock", seed=1), data, IMAGES, tmp_path)["top1"] == [10.0, 21.0]
    assert "digits/vit-stock-1: already done" in capsys.readouterr().out

    settings = {name: [*own.split(), *study.HOUSEKEEPING] for name, own in study.SETTINGS.items()}
    text = study.report(settings, tmp_path)
    assert [(row[0], row[3]) for row in cells(text)] == [("`swin`", "0"), ("`vit-stock`", "0 1")]  # without the third
    assert (tmp_path / "vit.md").read_text() == text
    raw = json.loads((tmp_path / "vit.json").read_text())
    assert len(raw["results"]) == 3
    assert {"torch", "timm", "date", "cpu"} <= raw["facts"].keys()


def test_results_of_other_options_are_refused(tmp_path, data):
    write_result(tmp_path, training("swin"), [10.0])
    with pytest.raises(StudyError, match="obtained with other options"):
        study.finished(training("swin", more="epochs=3"), data, IMAGES, tmp_path)


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "digit_folders/train").mkdir(parents=True)
    with pytest.raises(StudyError, match=r"--data: .*digit_folders must hold train/CLASS"):
        study.prepare(tmp_path, "digits")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--settings", "swin", "vit"], "--settings must be among vit-stock, vit-1111"),
        (["--add", "swin=swin model_args.shift=false"], "--add must be NAME=OPTIONS"),
        (["--sets", "cifar"], "--sets: invalid choice"),
        (["--seeds", "one"], "--seeds: invalid int value"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        study.main([str(tmp_path / "out"), *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("new=resnet", "crops_FAMILY.yaml, such as vit or swin, got 'resnet'"),
        ("new=", "such as vit or swin, got ''"),
        ("new=vit epoch=3", "setting new: "),
    ],
)
def test_a_bad_setting_is_refused_before_any_training(setting, message, tmp_path, capsys):
    places = [str(tmp_path / "out"), "--data", str(tmp_path / "data")]
    assert study.main([*places, "--add", setting, "--settings", "swin", "new"]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_whole_study_on_a_few_digits(tmp_path, data, capsys):
    output = tmp_path / "out"
    folder = output / "digits/swin-unshifted-3"
    folder.mkdir(parents=True)
    (folder / "state.pt").write_text("half a file")  # of an interrupted training
    arguments = [str(output), f"--data={data}", "--sets=digits", "--seeds=3"]
    arguments += ["--settings", "swin-unshifted", "--train"]
    assert study.main([*arguments, ONE_EPOCH]) == 0
    found = json.loads((folder / "result.json").read_text())
    assert found["images"] == IMAGES
    assert len(found["top1"]) == len(found["train_loss"]) == len(found["val_loss"]) == 1
    assert found["train_cpu_seconds"] > 0
    assert (found["options"]["seed"], found["options"]["epochs"]) == (3, 1)
    assert str(ROOT) not in found["command"]
    assert (folder / "last.safetensors").is_file()
    text = (folder / "train.log").read_text()
    assert "model_args.shift=false" in text
    assert f"{found['parameters'] / 1e6:.2f} M parameters" in text
    assert [row[0] for row in cells((output / "vit.md").read_text())] == ["`swin-unshifted`"]
    assert (output / "vit.png").read_bytes().startswith(b"\x89PNG")

    before = (folder / "result.json").stat().st_mtime_ns
    capsys.readouterr()
    assert study.main([*arguments, ONE_EPOCH]) == 0
    assert "swin-unshifted-3: already done" in capsys.readouterr().out
    assert (folder / "result.json").stat().st_mtime_ns == before


def test_arguments_of_no_model_are_named(tmp_path, data, capsys):
    arguments = [str(tmp_path / "out"), f"--data={data}", "--sets=digits", "--seeds=3", "--settings", "swin"]
    assert study.main([*arguments, "--train", "model_args.no=1"]) == 2
    assert "vit_study: model attn_swin_tiny_patch4_window7_224 with" in capsys.readouterr().err
