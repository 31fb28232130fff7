"""tools.digits_study: its settings build networks, records, the table; and the whole study on a few pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("mmdet")
pytest.importorskip("mmseg")
pytest.importorskip("skimage")
pytest.importorskip("sklearn")

import torch

from tools import digits_study as study
from tools.datasets.digits_on_photographs import Recipe, build
from tools.study import StudyError

ALL = [(which, name) for which, one in study.STUDIES.items() for name in one.settings]


def words(which: str, name: str) -> list[str]:
    one = study.STUDIES[which]
    return [*one.settings[name].split(), *one.train.split()]


def result(which: str, name: str, seed: int, value: float, **more) -> dict:
    """Return the record of a finished training."""
    return {
        "setting": name, "seed": seed, "options": words(which, name), "parameters": 12345,
        "multiply_adds": 1_500_000, "steps": [10, 20], "values": [1.0, value], "train_cpu_seconds": 10.0, **more
    }  # fmt: skip


def write_result(output: Path, row: dict) -> None:
    folder = output / f"{row['setting']}-{row['seed']}"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(row))


def test_settings_are_networks():
    found = {(which, name): study.size_of(study.STUDIES[which].toolkit, words(which, name)) for which, name in ALL}
    parameters = {key: value["parameters"] for key, value in found.items()}
    products = {key: value["multiply_adds"] for key, value in found.items()}

    def sharing(name: str) -> tuple[int, int]:
        return parameters["sharing", name], products["sharing", name]

    # The order of the thesis' Table 4.2: sharing saves parameters and operations, refinement only costs operations.
    assert sharing("h-shared")[0] == sharing("i-shared-refined")[0] < sharing("e-unshared")[0] < sharing("j-conv")[0]
    assert sharing("h-shared")[1] < sharing("i-shared-refined")[1] < sharing("e-unshared")[1] < sharing("j-conv")[1]
    assert sharing("g-content-shared-refined")[0] < sharing("h-shared")[0]
    # The order of Zhu et al.'s Table 2.
    order = [products["deformable", name] for name in ("plain", "deformable", "0010+deformable")]
    assert order == sorted(order)
    # A larger kernel costs predicted values.
    sizes = [products["paddings", name] for name in ("cc", "k-3", "learned-zscore", "k-31")]
    assert sizes == sorted(sizes)
    assert parameters["paddings", "zero-sqrt_d"] == parameters["paddings", "inf-sqrt_d"]


def test_options_reach_every_reader(tmp_path):
    from mmengine.config import Config

    for toolkit, name in (("mmdet", "atss_narrow-r50_fpn_digits"), ("mmseg", "fcn_narrow-r18_digits")):
        config = Config.fromfile(study.config_file(toolkit, name))
        config.merge_from_dict(dict(option.split("=", 1) for option in study.data_options(toolkit, tmp_path)))
        for part in ("train", "val", "test"):
            assert Path(config[f"{part}_dataloader"].dataset.data_root) == tmp_path
        if toolkit == "mmdet":
            assert Path(config.val_evaluator.ann_file) == tmp_path / "annotations/val.json"


def test_log(tmp_path):
    file = tmp_path / "20260101_000000/vis_data/scalars.json"
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in ({"loss": 2.0, "step": 5}, {"mIoU": 12.5, "step": 10})))
    assert study.read_log(tmp_path, "mIoU") == {"steps": [10], "values": [12.5]}
    with pytest.raises(StudyError, match="with coco/bbox_mAP: no evaluation ended"):
        study.read_log(tmp_path, "coco/bbox_mAP")


def test_percent():
    assert study.STUDIES["deformable"].percent(0.456) == 45.6
    assert study.STUDIES["sharing"].percent(45.6) == 45.6


def test_backbone_alone_is_kept(tmp_path):
    weights = {"backbone.conv1.weight": torch.ones(2), "decode_head.conv_seg.bias": torch.ones(3)}
    torch.save({"state_dict": weights, "meta": {}}, tmp_path / "iter_9.pth")
    (tmp_path / "last_checkpoint").write_text("/elsewhere/iter_9.pth")
    path = study.keep_backbone(tmp_path)
    assert list(torch.load(path)["state_dict"]) == ["backbone.conv1.weight"]
    (tmp_path / "iter_9.pth").unlink()
    assert study.keep_backbone(tmp_path) == path


def test_kept_results_make_the_report(tmp_path, capsys):
    for seed, value in enumerate((30.0, 34.0)):
        write_result(tmp_path, result("sharing", "h-shared", seed, value))
    write_result(tmp_path, result("sharing", "j-conv", 0, 36.0))
    write_result(tmp_path, result("sharing", "j-conv", 1, 99.0, options=["fcn_narrow-r18_digits"]))
    one = study.STUDIES["sharing"]
    own = words("sharing", "j-conv")
    assert study.finished(one, "j-conv", 0, own, tmp_path / "j-conv-0", [])["values"] == [1.0, 36.0]
    assert "j-conv-0: already done" in capsys.readouterr().out
    with pytest.raises(StudyError, match="obtained with other options"):
        study.finished(one, "j-conv", 1, own, tmp_path / "j-conv-1", [])
    table = study.report("sharing", {name: words("sharing", name) for name in one.settings}, tmp_path)
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == ["`j-conv`", "`h-shared`"]
    assert rows[1][2:6] == ["12,345", "1.5", "0 1", "32.0 ± 2.8"]
    assert (tmp_path / "sharing.md").read_text() == table
    raw = json.loads((tmp_path / "sharing.json").read_text())
    assert raw["metric"] == "mIoU"
    assert len(raw["results"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--settings", "j-con"], "--settings must be among j-conv, e-unshared"),
        (["--add", "pretrained=fcn_narrow-r18_digits"], "--add must be NAME=OPTIONS"),
        (["--seeds", "one"], "--seeds: invalid int value"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        study.main(["sharing", str(tmp_path / "out"), *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_setting_without_config_is_refused_before_any_training(tmp_path, capsys):
    assert study.main(["sharing", str(tmp_path / "out"), "--add", "new=nowhere", "--settings", "new"]) == 2
    assert "a setting begins with a config" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_sets_of_other_recipes_are_refused(tmp_path, capsys):
    assert build(tmp_path / "digits", Recipe(train=1, val=1))
    assert study.main(["sharing", str(tmp_path / "out"), f"--data={tmp_path}"]) == 2
    assert "--data: " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "name", "short"),
    [
        ("sharing", "i-shared-refined", "train_cfg.max_iters=4 train_cfg.val_interval=4"),
        (
            "deformable",
            "0010+deformable",
            "train_cfg.max_epochs=1 train_cfg.val_interval=1 model.test_cfg.score_thr=0.0",
        ),
    ],
)
def test_the_whole_study_on_a_few_pictures(which, name, short, tmp_path, monkeypatch, capsys):
    few = Recipe(train=8, val=4, seed=5)
    monkeypatch.setattr(study, "Recipe", lambda: few)
    monkeypatch.setitem(study.STUDIES, which, study.dataclasses.replace(study.STUDIES[which], recipe=few))
    arguments = [which, str(tmp_path / "out"), f"--data={tmp_path / 'data'}", "--seeds", "3", "--settings", name]
    arguments += ["--train", f"{short} default_hooks.logger.interval=1"]
    assert study.main(arguments) == 0
    folder = tmp_path / "out" / f"{name}-3"
    found = json.loads((folder / "result.json").read_text())
    assert len(found["values"]) == 1
    log = (folder / "train.log").read_text()
    assert "randomness.seed=3" in log
    assert f"Load checkpoint from {tmp_path / 'out/pretrained/backbone.pth'}" in log
    assert study.main(arguments) == 0
    assert f"{name}-3: already done" in capsys.readouterr().out
