"""tools.captioning_study by the console scripts, on a made-up set: a region and an attribute determine a caption."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fairseq")
pytest.importorskip("pycocoevalcap")

from fairseq import options as fairseq_options
from fairseq import tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

import attn_plugins.fairseq  # noqa: F401
from attn_plugins.captioning.region_features import write_region_features
from tools import captioning_study as study
from tools.captioning.study_table import aggregated, markdown

COLOURS = ("red", "green", "blue", "black")
THINGS = ("dog", "cat", "bus", "kite", "boat")
PARTS = ["train"] * 24 + ["val"] * 4 + ["test"] * 6
SHORT = ["--train", "--max-update 4 --batch-size 16", "--self-critical", "--max-update 2 --samples 2"]
QUICK = [*SHORT, "--settings", "semantic", "eta-fused", "modalities-fused"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("captions") / "data"
    (folder / "images").mkdir(parents=True)
    draw = np.random.default_rng(0)
    images, captions, regions, attributes = [], [], [], {}
    for i, part in enumerate(PARTS):
        colour, thing = COLOURS[i % 4], THINGS[i % 5]
        images.append({"cocoid": i, "filename": f"{i}.jpg", "split": part})
        for text in (f"a {colour} {thing}", f"the {thing} is {colour}", f"there is a {colour} {thing}"):
            captions.append({"id": len(captions), "image_id": i, "caption": text})
        features = draw.normal(size=(2, 4)).astype(np.float32)
        features[0, i % 4] += 3
        regions.append((i, {"features": features, "boxes": np.array([[0, 0, 0.5, 0.5]] * 2), "scores": np.ones(2)}))
        attributes[i] = [[thing, 0.9], ["a", 0.5]]
    write_region_features(folder / "regions.npz", regions)
    (folder / "attributes.json").write_text(json.dumps(attributes))
    (folder / "splits.json").write_text(json.dumps({"images": images}))
    images = [{"id": image["cocoid"]} for image in images]
    (folder / "captions.json").write_text(json.dumps({"images": images, "annotations": captions}))
    return folder


@pytest.fixture(scope="module")
def output(data, tmp_path_factory) -> Path:
    """Run one setting in both stages, the first after an interruption; fused rows have too few models."""
    folder = tmp_path_factory.mktemp("study") / "out"
    broken = folder / "semantic" / "cross-entropy-1"
    broken.mkdir(parents=True)
    (broken / "checkpoint_best.pt").write_text("half a file")
    assert study.main([str(folder), "--data", str(data), *QUICK]) == 0
    return folder


def result_of(output: Path, *names: str) -> dict:
    return json.loads(output.joinpath(*names, "result.json").read_text())


@pytest.mark.slow
def test_stages(output, data):
    first, second = (result_of(output, "semantic", f"{stage}-1") for stage in study.STAGES)
    assert (first["updates"], second["updates"]) == (4, 2)
    assert first["parameters"] == second["parameters"] > 64 * 64
    assert first["valid_loss"] > 1
    assert second["valid_reward"] >= 0
    for stage, result in zip(study.STAGES, (first, second)):
        assert result["images"] == PARTS.count("test")
        assert set(result["scores"]) >= {"BLEU-1", "BLEU-4", "ROUGE-L", "CIDEr-D"}
        captions = json.loads((output / "semantic" / f"{stage}-1" / "results.json").read_text())
        assert [row["image_id"] for row in captions] == [i for i, part in enumerate(PARTS) if part == "test"]
        assert "--fusion semantic" in result["options"]["train"]
    log = (output / "semantic" / "self-critical-1" / "train.log").read_text()
    assert f"loading pretrained model from {output / 'semantic' / 'cross-entropy-1' / 'checkpoint_best.pt'}" in log
    assert not (output / "eta-fused").exists()


@pytest.mark.slow
def test_people(output):
    """Compare a caption with two identical ones, and with another picture's."""
    grammar, stranger = (result_of(output, name)["scores"]["CIDEr-D"] for name in study.BASELINES)
    assert grammar > 1 > stranger
    captions = json.loads((output / "grammar" / "captions.json").read_text())["annotations"]
    assert len(captions) == 2 * PARTS.count("test")
    assert captions[0]["caption"] == "the kite is red"
    results = json.loads((output / "stranger" / "results.json").read_text())
    assert [results[0]["caption"], results[-1]["caption"]] == ["a green boat", "a red kite"]


@pytest.mark.slow
def test_table(output):
    table = (output / "study.md").read_text()
    rows = [line.split(" | ") for line in table.split("\n") if line.startswith("| `")]
    assert [(row[0].strip("| "), row[2]) for row in rows] == [
        ("`grammar`", ""),
        ("`stranger`", ""),
        ("`semantic`", "cross-entropy"),
        ("`semantic`", "self-critical"),
    ]
    assert "24 train, 4 val, 6 test" in table
    raw = json.loads((output / "study.json").read_text())
    assert [row["setting"] for row in raw["results"]] == ["grammar", "stranger", "semantic", "semantic"]
    assert "torch" in raw["facts"]


@pytest.mark.slow
def test_finished_rows_are_kept(output, data, capsys):
    files = [file for file in output.rglob("*") if file.is_file() and file.suffix not in (".md", "")]
    files.remove(output / "study.json")
    times = [file.stat().st_mtime_ns for file in files]
    assert study.main([str(output), "--data", str(data), *QUICK]) == 0
    assert capsys.readouterr().out.count("already done") == 4
    assert [file.stat().st_mtime_ns for file in files] == times


@pytest.mark.slow
def test_other_options_are_refused(output, data, capsys):
    assert study.main([str(output), "--data", str(data), "--settings", "semantic"]) == 2
    result = output / "semantic" / "cross-entropy-1" / "result.json"
    assert f"{result} was obtained with other options" in capsys.readouterr().err


@pytest.mark.slow
def test_fused(output, data, tmp_path, capsys):
    """Two identical checkpoints give the result of one. A fused row of another number of models is recomputed."""
    own = tmp_path / "out"
    shutil.copytree(output, own)
    for seed in (1, 2):
        shutil.copytree(output / "semantic" / "cross-entropy-1", own / "eta" / f"cross-entropy-{seed}")
    old = {"options": {"checkpoints": ["eta/cross-entropy-1/checkpoint_best.pt"]}}
    (own / "eta-fused" / "cross-entropy").mkdir(parents=True)
    (own / "eta-fused" / "cross-entropy" / "result.json").write_text(json.dumps(old))
    assert study.main([str(own), "--data", str(data), *SHORT, "--settings", "eta-fused", "--seeds", "1", "2"]) == 0
    fused, one = (own / name / "results.json" for name in ("eta-fused/cross-entropy", "semantic/cross-entropy-1"))
    assert json.loads(fused.read_text()) == json.loads(one.read_text())
    result, single = result_of(own, "eta-fused", "cross-entropy"), result_of(own, "semantic", "cross-entropy-1")
    assert result["parameters"] == 2 * single["parameters"]
    assert result["seeds"] == [1, 2]
    assert "| `eta-fused` |" in capsys.readouterr().out


ROWS = [(name, stage) for name, row in study.SETTINGS.items() for stage in study.STAGES if not row.fused]


@pytest.mark.sampled(6, every_value=False)
@pytest.mark.parametrize(
    ("name", "stage"), [row for row in ROWS if row[1] == study.FIRST or "arch" in study.SETTINGS[row[0]].model]
)
def test_every_row_is_a_training_that_there_is(data, name, stage):
    """A row's options build its model, and the intended criterion is the last of those named."""
    setting = study.SETTINGS[name]
    own = study.Study(data, data, "test", dict.fromkeys(study.STAGES, "")).options(setting, stage, 1)
    parser = fairseq_options.get_training_parser()
    words = [str(data), "--min-word-count=1", *shlex.split(own["train"])]
    cfg = convert_namespace_to_omegaconf(fairseq_options.parse_args_and_arch(parser, words))
    model = tasks.setup_task(cfg.task).build_model(cfg.model)
    assert model.encoder.fusion == getattr(cfg.model, "fusion", "visual")
    assert cfg.model._name == (setting.model.split()[1] if "--arch" in setting.model else "eta_transformer_tiny")
    expected = "self_critical" if stage == study.SECOND else "label_smoothed_cross_entropy"
    assert cfg.criterion._name == (setting.first.split()[1] if stage == study.FIRST and setting.first else expected)


def test_failing_command_is_named(tmp_path, capsys):
    output = tmp_path / "out"
    assert study.main([str(output), "--scenes", "--train 0"]) == 2
    message = capsys.readouterr().err
    assert f"-m tools.datasets.captioned_scenes {output / 'scenes'} --train 1500" in message
    assert f"ended with status 2, see {output / 'scenes.log'}" in message
    assert "train" in message.split("last line is")[1]
    assert not (output / "prepared.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--settings", "eta", "etta"], "--settings must be among eta, visual, semantic"),
        (["--add", "eta=--layers 1"], "--add must be NAME=OPTIONS"),
        (["--add", "scenes=--layers 1"], "--add must be NAME=OPTIONS"),
        (["--add", "../up=--layers 1"], "--add must be NAME=OPTIONS"),
        (["--stages", "self-critical"], "--stages must include cross-entropy"),
        (["--data", "somewhere", "--scenes", "--train 5"], "--scenes applies to the scenes"),
    ],
)
def test_bad_options(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as error:
        study.main([str(tmp_path / "out"), *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["images", "captions.json", "splits.json", "regions.npz"])
def test_missing_data(data, tmp_path, capsys, name):
    shutil.copytree(data, tmp_path / "data")
    path = tmp_path / "data" / name
    path.rmdir() if path.is_dir() else path.unlink()
    assert study.main([str(tmp_path / "out"), "--data", str(tmp_path / "data")]) == 2
    assert ("but no regions" if name == "regions.npz" else f"has no {name}") in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_other_regions(data, tmp_path, capsys):
    """The options reach ``tools.caption extract``, which finds no pictures here."""
    shutil.copytree(data, tmp_path / "data")
    (tmp_path / "data" / "regions.npz").unlink()
    regions = "--grid resnet10t --no-weights --grid-size 2"
    arguments = [str(tmp_path / "out"), "--data", str(tmp_path / "data"), "--regions", regions]
    assert study.main(arguments) == 2
    message = capsys.readouterr().err
    assert f"regions.npz {regions} --splits {tmp_path / 'data' / 'splits.json'} ended with status 2" in message
    assert "has none of the 34 pictures of" in message


def test_seeds_are_averaged():
    base = {"setting": "eta", "stage": "cross-entropy", "left_out": {"SPICE": "no model"}, "images": 6}
    runs = [
        {**base, "seeds": [seed], "parameters": 1200, "scores": {"CIDEr-D": cider}, "train_cpu_seconds": 10.0 * seed}
        for seed, cider in ((1, 0.5), (2, 0.7), (3, 0.6))
    ]
    one = {**base, "stage": "self-critical", "seeds": [1], "parameters": 1200, "scores": {"CIDEr-D": 1.5}}
    rows = aggregated([*runs, one], {"eta": "ETA"})
    assert [row["seeds"] for row in rows] == [[1, 2, 3], [1]]
    assert rows[0]["scores"]["CIDEr-D"] == pytest.approx(60)
    assert rows[0]["spread"] == pytest.approx(10)
    assert rows[0]["seconds"] == 20
    table = markdown(rows, {"cpu": "x"}, {"regions": {"options": "--grid resnet10t", "cpu_seconds": 3.2}})
    assert "| `eta` | ETA | cross-entropy | 1 2 3 | 1,200 | 60.0 ± 10.0 | 20 |" in table
    assert "| `eta` | ETA | self-critical | 1 | 1,200 | 150.0 |  |" in table
    assert "SPICE left out: no model" in table
    assert "regions: `--grid resnet10t`, 3 CPU s" in table


@pytest.mark.slow
def test_from_nothing(tmp_path):
    """Scenes, detector, attributes and regions; then the oracle, whose attributes are those of the captions."""
    scenes = "--train 24 --val 4 --test 6 --size 64"
    arguments = ["--scenes", scenes, "--detector", "--epochs 1 --min-word-count 2", *SHORT]
    assert study.main([str(tmp_path / "out"), *arguments, "--settings", "oracle"]) == 0
    made = json.loads((tmp_path / "out" / "prepared.json").read_text())
    assert list(made) == ["scenes", "attributes", "regions"]
    with np.load(tmp_path / "out" / "scenes" / "regions.npz") as regions:
        assert regions["features"].shape == (34 * 9, 512)
    assert result_of(tmp_path / "out", "oracle", "cross-entropy-1")["images"] == 6
    assert study.main([str(tmp_path / "out"), "--scenes", "--train 25", "--settings", "oracle"]) == 2
