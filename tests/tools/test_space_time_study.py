"""tools.space_time_study: runs, records, tables; and the whole study on a few clips."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("timm")
pytest.importorskip("sklearn")
pytest.importorskip("skimage")

from tools import space_time_study as study
from tools.study import StudyError


def result(task: str, setting: str, seed: int, top1: float, **more) -> dict:
    return {
        "task": task,
        "setting": setting,
        "seed": seed,
        "options": study.overrides(task, [setting], ""),
        "train_loss": [2.0, 1.0],
        "val_loss": [2.0, 1.5 + seed],
        "top1": [99.0, top1],
        "parameters": 0.09,
        "train": 3000,
        "val": 400,
        "train_cpu_seconds": 60.0 + 60 * seed,
        **more,
    }


def write(output: Path, row: dict) -> Path:
    file = output / f"{row['task']}-{row['setting']}-{row['seed']}/result.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(row))
    return file


def test_what_the_trainer_is_given():
    assert study.overrides("two-directions", ["joint"], "epochs=9") == [
        "model_args.pattern=joint", *study.TASKS["two-directions"].train.split(), "epochs=9"
    ]  # fmt: skip
    assert study.overrides("arrow", ["space", "lr=1"], "")[:2] == [
        "model_args.pattern=space", "init_std={pos_embed: 0.5}"
    ]  # fmt: skip
    assert study.overrides("arrow", ["space", "lr=1"], "")[-1] == "lr=1"


def test_tables_of_means_over_seeds(tmp_path):
    for seed, top1 in enumerate((60.0, 62.0, 64.0)):
        write(tmp_path, result("two-directions", "divided", seed, top1))
    write(tmp_path, result("two-directions", "space", 0, 50.0))
    write(tmp_path, result("two-directions", "joint", 0, 50.0, options=["of another study"]))
    write(tmp_path, result("arrow", "divided", 1, 55.0))
    settings = {(task, name): study.overrides(task, [name], "") for task in study.TASKS for name in study.PATTERNS}
    text = study.report(tmp_path, settings)
    assert text == (tmp_path / "space-time.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("| `")] == [
        "| `space` | 0.09 M | 0 | 50.0 | 1.000 | 1.500 | 1.0 |",
        "| `divided` | 0.09 M | 0 1 2 | 62.0 ± 2.0 | 1.000 | 2.500 | 2.0 ± 1.0 |",
        "| `divided` | 0.09 M | 1 | 55.0 | 1.000 | 2.500 | 2.0 |",
    ]
    assert text.count("2 classes: chance is 50 %") == 2
    content = json.loads((tmp_path / "space-time.json").read_text())
    assert len(content["results"]) == 5
    assert {"date", "cpu", "python", "torch", "timm"} <= content["facts"].keys()


def test_what_is_finished_is_kept(tmp_path, monkeypatch, capsys):
    row = result("two-directions", "divided", 0, 60.0)
    write(tmp_path, row)
    monkeypatch.setattr(study, "run", lambda *arguments: pytest.fail("a finished training was run"))
    arguments = ("two-directions", "divided", 0)
    assert study.finished(*arguments, row["options"], tmp_path, tmp_path) == row
    assert "two-directions-divided-0: already done" in capsys.readouterr().out
    with pytest.raises(StudyError, match="was obtained with other options"):
        study.finished(*arguments, ["model_args.pattern=axial"], tmp_path, tmp_path)


def test_a_failing_training_is_named(tmp_path):
    (tmp_path / "two-directions-divided-0").mkdir()
    (tmp_path / "two-directions-divided-0/log.csv").write_text("half a training")
    with pytest.raises(StudyError, match=r"status 2, see .*train\.log, whose last line is: .*there is no folder"):
        study.finished("two-directions", "divided", 0, ["model_args.pattern=divided"], tmp_path, tmp_path / "nowhere")
    assert not (tmp_path / "two-directions-divided-0/result.json").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--settings", "temporal"],
            "--settings must be among space, joint, divided, local_global, axial, got 'temporal'",
        ),
        (["--tasks", "kinetics"], "invalid choice: 'kinetics'"),
        (["--add", "wide=epochs=3"], "OPTIONS must begin with one of space, joint, divided, local_global, axial"),
        (["--add", "joint=divided"], "--add must be NAME=OPTIONS, with a new NAME"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        study.main([str(tmp_path / "out"), *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_whole_study_on_a_few_clips(tmp_path, monkeypatch, capsys):
    task = study.Task("Few", 2, "moving_digits --directions 2 --train 16 --val 8", ("space", "divided"), "epochs=1")
    monkeypatch.setitem(study.TASKS, "two-directions", task)
    arguments = [str(tmp_path / "out"), "--tasks", "two-directions", "--seeds", "3"]
    assert study.main(arguments) == 0
    for name in task.settings:
        found = json.loads((tmp_path / f"out/two-directions-{name}-3/result.json").read_text())
        assert (found["train"], found["val"], len(found["top1"]), found["seed"]) == (16, 8, 1, 3)
        assert found["train_cpu_seconds"] > 0
        assert (tmp_path / f"out/two-directions-{name}-3/last.safetensors").is_file()
    text = (tmp_path / "out/space-time.md").read_text()
    assert text.count("\n| `") == 2
    assert "16 training and 8 validation clips (`tools.datasets.moving_digits --directions 2" in text
    capsys.readouterr()
    assert study.main([*arguments, "--settings", "space"]) == 0
    assert "two-directions-space-3: already done" in capsys.readouterr().out
