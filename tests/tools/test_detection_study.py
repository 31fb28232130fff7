"""tools.detection_study: curves from logs, records, the table; and the whole study on a few pictures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("mmdet")
pytest.importorskip("skimage")
pytest.importorskip("sklearn")

from tools import detection_study as study
from tools import detection_study_curves as curves
from tools.datasets.digits_on_photographs import Recipe, build
from tools.study import StudyError


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "digits"
    assert build(folder, Recipe(train=8, val=4, seed=5))
    return folder


def log(folder: Path, name: str, rows: list[dict]) -> None:
    file = folder / name / "vis_data/scalars.json"
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def evaluation(epoch: int, value: float, **more: float) -> dict:
    return {"coco/bbox_mAP": value, "coco/bbox_mAP_50": 2 * value, **more, "step": epoch}


def result(setting: str, seed: int, values: list[float], **more) -> dict:
    """Return the record of a finished training with an evaluation every second epoch."""
    return {
        "setting": setting,
        "seed": seed,
        "options": [study.SETTINGS.get(setting, setting)],
        "parameters": 12345,
        "epochs": [2 * n + 2 for n in range(len(values))],
        "mAP": values,
        "mAP_50": [2 * value for value in values],
        "loss": [1.0] * (2 * len(values)),
        "train_cpu_seconds": 10.0 * len(values) * (1 + seed),
        "train_wall_seconds": 1.0,
        **more,
    }


def write_result(output: Path, row: dict) -> None:
    folder = output / f"{row['setting']}-{row['seed']}"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(row))


def test_curves(tmp_path):
    rows = [{"loss": 9.0, "epoch": 1, "step": 10}, {"loss": 8.0, "epoch": 1, "step": 20}]
    rows += [{"loss": 7.0, "epoch": 2, "step": 40}, evaluation(2, 0.125, **{"coco/segm_mAP": 0.5})]
    rows += [{"loss": 6.0, "epoch": 3, "step": 60}]
    log(tmp_path, "20260101_000000", rows)
    assert curves.read_curves(tmp_path) == {
        "epochs": [2], "mAP": [0.125], "mAP_50": [0.25], "segm_mAP": [0.5], "loss": [8.0, 7.0, 6.0]
    }  # fmt: skip


def test_curves_without_masks(tmp_path):
    log(tmp_path, "20260101_000000", [evaluation(3, 0.1), evaluation(6, 0.2)])
    found = curves.read_curves(tmp_path)
    assert found["epochs"] == [3, 6]
    assert "segm_mAP" not in found


def test_no_curves(tmp_path):
    with pytest.raises(ValueError, match=re.escape("scalars.json, mmengine's log")):
        curves.read_curves(tmp_path)
    log(tmp_path, "20260101_000000", [{"loss": 1.0, "epoch": 1, "step": 1}])
    with pytest.raises(ValueError, match="no evaluation ended"):
        curves.read_curves(tmp_path)


def test_epochs_to_a_level():
    low, high = result("a", 0, [0.0, 0.1, 0.25]), result("a", 1, [0.2, 0.1, 0.3])
    assert curves.reached(low, 0.1) == 4
    assert curves.reached(low, 0.26) is None
    assert curves.epochs_to([low], 0.1) == "4"
    assert curves.epochs_to([low, high], 0.2) == "4 ± 3"  # 6 and 2
    assert curves.epochs_to([low, high], 0.3) == "6 (1 of 2)"
    assert curves.epochs_to([low, high], 0.4) == "> 6"


def test_table():
    rows = [result("detr", 0, [0.0, 0.1]), result("mask2former-20e", 0, [0.2, 0.3], segm_mAP=[0.2, 0.4])]
    rows.insert(1, result("detr", 1, [0.0, 0.2]))
    table = curves.markdown(rows, {"cpu": "one"})
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert [row[0] for row in cells] == ["`detr`", "`mask2former-20e`"]
    assert cells[0][1:4] == ["12,345", "0 1", "7.5 ± 3.5"]  # 5 and 10 CPU seconds per epoch
    assert cells[0][4:8] == ["4 ± 0", "4 ± 0", "4 ± 0", "4 (1 of 2)"]
    assert cells[0][8] == "0.150 ± 0.071 at 4"
    assert cells[1][-1].strip() == "0.400"


def test_figure(tmp_path):
    from PIL import Image

    rows = [result(f"setting-{n}", seed, [0.1, 0.2 + 0.1 * seed]) for n in range(8) for seed in range(2)]
    curves.draw(rows, tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as image:
        assert image.width > 2 * image.height
        assert len(set(image.convert("RGB").get_flattened_data())) > 100
    assert [file.name for file in tmp_path.iterdir()] == ["curves.png"]


def test_one_class(data):
    recipe = study.prepare(data)
    assert recipe["train"] == 8
    for part in ("train", "val"):
        ten = json.loads((data / f"annotations/{part}.json").read_text())
        one = json.loads((data / f"annotations/one_class_{part}.json").read_text())
        assert one["categories"] == [{"id": 1, "name": "digit"}]
        assert {a["category_id"] for a in one["annotations"]} == {1}
        assert one["images"] == ten["images"]
        for before, after in zip(ten["annotations"], one["annotations"], strict=True):
            assert {**before, "category_id": 1} == after


def test_other_files_are_not_overwritten(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(StudyError, match=r"--data: .* holds other files"):
        study.prepare(tmp_path)


@pytest.mark.parametrize("name", study.SETTINGS)
def test_options_reach_every_reader(name, tmp_path):
    from mmengine.config import Config

    config = Config.fromfile(study.config_file(study.SETTINGS[name].split()[0]))
    pairs = (option.split("=", 1) for option in study.data_options(tmp_path, "one_class_"))
    config.merge_from_dict(dict(pairs))
    for loader, part in (("train", "train"), ("val", "val"), ("test", "val")):
        dataset = config[f"{loader}_dataloader"].dataset
        assert Path(dataset.data_root, dataset.ann_file) == tmp_path / f"annotations/one_class_{part}.json"
        assert Path(dataset.data_root, dataset.data_prefix.img) == tmp_path / part
    for part in ("val", "test"):
        assert Path(config[f"{part}_evaluator"].ann_file) == tmp_path / "annotations/one_class_val.json"
    assert config.model.backbone.init_cfg.prefix == "backbone."


def test_only_attention_and_levels_differ():
    """The transformers share data, schedule, backbone, widths and depth."""
    from mmengine.config import Config

    detr, many, one = (
        Config.fromfile(study.config_file(study.SETTINGS[name]))
        for name in ("detr", "deformable-detr", "deformable-detr-1level")
    )
    for key in ("train_dataloader", "val_dataloader", "train_cfg", "param_scheduler"):
        loaders = [dict(config[key]) if isinstance(config[key], dict) else config[key] for config in (detr, many, one)]
        assert loaders[0] == loaders[1] == loaders[2], key
    assert detr.model.backbone == one.model.backbone
    for config in (many, one):
        assert config.model.num_queries == detr.model.num_queries
        assert config.model.encoder.num_layers == detr.model.encoder.num_layers
        assert config.model.decoder.num_layers == detr.model.decoder.num_layers
        assert config.optim_wrapper.optimizer.lr == 2 * detr.optim_wrapper.optimizer.lr
        assert config.optim_wrapper.clip_grad == detr.optim_wrapper.clip_grad
    sizes = [study.count_parameters(study.config_file(study.SETTINGS[n])) for n in ("detr", "deformable-detr-1level")]
    assert max(sizes) < 1.1 * min(sizes)


def test_schedules():
    from mmengine.config import Config

    base = Config.fromfile(study.config_file("detr_narrow-r18_digits"))
    same = Config.fromfile(study.config_file("detr_narrow-r18_digits"))
    pairs = dict(option.split("=") for option in study.schedule_options(40, 2).split())
    milestones = pairs.pop("param_scheduler.1.milestones")
    same.merge_from_dict({key: int(value) for key, value in pairs.items()})
    assert same.train_cfg == base.train_cfg
    assert same.default_hooks == base.default_hooks
    assert same.param_scheduler == base.param_scheduler
    assert json.loads(milestones) == base.param_scheduler[1].milestones


def test_kept_results_make_the_report(tmp_path, data, capsys):
    recipe = study.prepare(data)
    settings = {name: [config] for name, config in study.SETTINGS.items()}
    for seed in (0, 1):
        write_result(tmp_path, result("detr", seed, [0.0, 0.1]))
        write_result(tmp_path, result("deformable-detr", seed, [0.1, 0.3]))
        write_result(tmp_path, result("deformable-detr-1level", seed, [0.1, 0.2]))
    write_result(tmp_path, result("detr", 2, [0.9, 0.9], options=["detr_narrow-r18_digits", "train_cfg.max_epochs=4"]))
    assert study.finished("detr", 1, settings["detr"], tmp_path / "detr-1", [])["mAP"] == [0.0, 0.1]
    assert "detr-1: already done" in capsys.readouterr().out

    table = study.report(settings, tmp_path, recipe)
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert [row[0].strip("|` ") for row in rows] == ["detr", "deformable-detr", "deformable-detr-1level"]
    assert all(row[2] == "0 1" for row in rows)  # the third seed of detr ran with other options
    assert (tmp_path / "detection.md").read_text() == table
    raw = json.loads((tmp_path / "detection.json").read_text())
    assert len(raw["results"]) == 6
    assert raw["facts"]["images"] == "8 for training, 4 for validation"
    assert {"torch", "onedl-mmdetection"} <= raw["facts"].keys()


def test_results_of_other_options_are_refused(tmp_path):
    write_result(tmp_path, result("detr", 0, [0.0]))
    with pytest.raises(StudyError, match="obtained with other options"):
        study.finished("detr", 0, ["detr_narrow-r18_digits", "train_cfg.max_epochs=4"], tmp_path / "detr-0", [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--settings", "detr", "dino"], "--settings must be among detr, deformable-detr"),
        (["--add", "detr=detr_narrow-r18_digits"], "--add must be NAME=OPTIONS"),
        (["--add", "backbone=detr_narrow-r18_digits"], "--add must be NAME=OPTIONS"),
        (["--seeds", "one"], "--seeds: invalid int value"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        study.main([str(tmp_path / "out"), *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_setting_without_config_is_refused_before_any_training(tmp_path, capsys):
    assert study.main([str(tmp_path / "out"), "--add", "new=nowhere", "--settings", "new"]) == 2
    assert "a setting begins with a config" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_failing_training_is_named(tmp_path, data):
    study.prepare(data)
    options = ["detr_narrow-r18_digits", "model.type=Nothing"]
    folder = tmp_path / "detr-0"
    with pytest.raises(
        StudyError, match=r"ended with status 1, see .*train\.log, whose last line is: .*Nothing is not in"
    ):
        study.finished("detr", 0, options, folder, study.data_options(data, "one_class_"))
    assert not (folder / "result.json").exists()


@pytest.mark.slow
def test_the_whole_study_on_a_few_pictures(tmp_path, data, capsys):
    output = tmp_path / "out"
    (output / "detr-3").mkdir(parents=True)
    (output / "detr-3" / "epoch_1.pth").write_text("half a file")  # of an interrupted training
    short = (
        "train_cfg.max_epochs=2 train_cfg.val_interval=1 "
        "default_hooks.checkpoint.interval=2 default_hooks.logger.interval=1"
    )
    names = ["detr", "deformable-detr-1level", "mask2former-20e"]
    arguments = [str(output), f"--data={data}", "--train", short, "--seeds", "3", "--settings"]
    assert study.main([*arguments, *names]) == 0
    for name in names:
        found = json.loads((output / f"{name}-3" / "result.json").read_text())
        assert found["epochs"] == [1, 2]
        assert len(found["loss"]) == 2
        assert ("segm_mAP" in found) == (name == "mask2former-20e")
        assert found["train_cpu_seconds"] > 0
        assert study.checkpoint(output / f"{name}-3").is_file()
    text = (output / "detr-3" / "train.log").read_text()
    assert "randomness.seed=3" in text
    assert f"load backbone. in model from: {study.checkpoint(output / 'backbone')}" in text
    assert (output / "detection.md").read_text().count("\n| `") == 3
    assert (output / "detection.png").read_bytes().startswith(b"\x89PNG")

    capsys.readouterr()
    before = (output / "detr-3" / "result.json").stat().st_mtime_ns
    assert study.main([*arguments, "detr"]) == 0
    assert "detr-3: already done" in capsys.readouterr().out
    assert (output / "detr-3" / "result.json").stat().st_mtime_ns == before
