"""tools.study: whole studies on a few pictures, clips, sentences and scenes; recorded results."""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("yaml")

from tools.study.__main__ import main, parse
from tools.study.commands import ROOT, StudyError
from tools.study.runner import toolkit_of
from tools.study.settings import NAMES, Run, Study
from tools.study.table import reached

MM = ("mmdet", "mmseg", "skimage", "sklearn")
EPOCH = "train_cfg.max_epochs=1 train_cfg.val_interval=1"


def need(*modules: str) -> None:
    for module in modules:
        pytest.importorskip(module)


def result_of(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def toolkit(name: str, output: Path, *arguments: str):
    options, study = parse([name, str(output), *arguments])
    return toolkit_of(study)(study, output, options)


@pytest.mark.parametrize(
    ("name", "recorded", "cell"),
    [
        ("detection", "detection-digits", "4 ± 0 | 5 ± 1 | 16 ± 6 | 0.276 ± 0.063 at 40 | 0.791 ± 0.050"),
        ("deformable", "digits-deformable", "| 2,153,229 | 211.2 | 0 1 2 | 22.4 ± 1.4 |"),
        ("sharing", "digits-sharing", "| 0 1 2 | 14.3 ± 1.4 |"),
        ("cross-attention", "translation-gettext-ja", "38.4 ± 0.6 (3 seeds)"),
        ("vision-transformers", "vit-crops-digits", "| 0 1 2 | 89.52 ± 0.46 | 90.00 89.45 89.09 | 0.329 ± 0.029 |"),
        ("augmented", "augmented-crops", "| `model_args.nu=0.0 epochs=6 workers=0` |"),
        ("space-time", "space-time-digits", "| `divided` | 0.09 M | 0 1 2 | 99.8 ± 0.3 | 0.076 | 0.011 | 0.4 ± 0.1 |"),
        ("captioning", "captioning-scenes", "| self-critical | 1 2 3 | 390,576 | 87.4 | 79.0 | 70.8 | 62.5 | 35.9 |"),
    ],
)
def test_tables_of_recorded_results(name, recorded, cell, capsys):
    assert main([name, "--table", str(ROOT / f"benchmarks/{recorded}.json")]) == 0
    assert cell in capsys.readouterr().out


def test_recorded_results_were_run_with_the_settings_options(tmp_path):
    need("fairseq", "pycocoevalcap", "timm", *MM)
    files = ("detection-digits", "digits-sharing", "digits-paddings", "translation-gettext-ja", "vit-crops-digits",
             "augmented-crops", "captioning-fusion")  # fmt: skip
    names = ("detection", "sharing", "paddings", "cross-attention", "vision-transformers", "augmented", "captioning")
    for name, file in zip(names, files):
        study, runner = Study(name), toolkit(name, tmp_path)
        for row in json.loads((ROOT / f"benchmarks/{file}.json").read_text())["results"]:
            run = study.run_of({"seed": row["seeds"][0], **row} if row.get("seeds") else row)
            assert runner.options(run) == row["options"], (name, run)


def test_settings_are_networks(tmp_path):
    """Sharing saves parameters and operations, refinement costs operations alone, larger kernels cost values."""
    need(*MM)

    def sizes(name: str) -> dict[str, tuple[int, int]]:
        runner = toolkit(name, tmp_path)
        return {s: tuple(runner.size(runner.options(Run(s, "", 0))).values()) for s in runner.study.settings}

    sharing = sizes("sharing")
    order = ("h-shared", "i-shared-refined", "e-unshared", "j-conv")
    assert [sharing[name][0] for name in order] == sorted(sharing[name][0] for name in order)
    assert [sharing[name][1] for name in order] == sorted(sharing[name][1] for name in order)
    paddings = sizes("paddings")
    order = ("cc", "k-3", "learned-zscore", "k-31")
    assert [paddings[name][1] for name in order] == sorted(paddings[name][1] for name in order)
    deformed = sizes("deformed-detection")
    assert len(set(deformed.values())) == len(deformed)
    assert deformed["1111"][1] > deformed["0010+deformable"][1] > deformed["deformable"][1] > deformed["plain"][1]
    detection = sizes("detection")
    assert max(detection[n][0] for n in ("detr", "deformable-detr-1level")) < 1.1 * detection["detr"][0]


def test_the_first_epoch_at_a_level():
    rows = [dict(epochs=[5, 10, 15], top1=[20, 50, 60]), dict(epochs=[5, 10, 15], top1=[50, 60, 70])]
    assert reached(rows, "top1", 50) == "8 ± 4"
    assert reached(rows, "top1", 65) == "15 (1 of 2)"
    assert reached(rows, "top1", 80) == "> 15"


class Parsed(Exception):
    """Ends a command after its arguments."""


@pytest.mark.parametrize("name", NAMES)
def test_commands_of_data_sets_are_understood(name, monkeypatch):
    def parse_only(parser, arguments, parse_args=argparse.ArgumentParser.parse_args):
        raise Parsed(parse_args(parser, arguments))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    study = Study(name)
    for content in (study.data, *study.parts.values()):
        if "make" in content:
            module, *options = shlex.split(content["make"])
            with pytest.raises(Parsed) as parsed:
                importlib.import_module(module).main([*options, "folder"])
            assert Path("folder") in vars(parsed.value.args[0]).values()


@pytest.mark.parametrize("name", [name for name in NAMES if Study(name).data["toolkit"] == "classifier"])
def test_settings_of_classifiers_are_networks(name, tmp_path):
    need("timm", "matplotlib", "skimage", "sklearn")
    from tools.train.model import create_model

    runner = toolkit(name, tmp_path)
    runs = [Run(setting, part, 0) for setting in runner.study.settings for part in runner.study.parts]
    assert len({(one.part, json.dumps(runner.options(one))) for one in runs}) == len(runs)
    for one in runs:
        create_model(runner.config(one), 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sharing", "--settings", "j-con"], "--settings must be among j-conv, e-unshared"),
        (["sharing", "--add", "j-conv=fcn"], "--add must be NAME=OPTIONS"),
        (["sharing", "--add", "../up=fcn"], "--add must be NAME=OPTIONS"),
        (["attention", "--add", "bin=--deformable"], "--add must be NAME=OPTIONS"),
        (["vision-transformers", "--sets", "cifar"], "--sets must be among crops, digits"),
        (["space-time", "--tasks", "arrow"], "--tasks must be among two-directions, four-directions"),
        (["space-time", "--sets", "crops"], "space-time has no --sets"),
        (["detection", "--regions", "--grid"], "--regions"),
        (["nothing"], "invalid choice"),
        (["findings", "--studies", "translation"], "--studies must be among cross-attention, translation-paddings"),
        (["findings", "--jobs", "0"], "--jobs must be at least 1, got 0"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sharing", "--add", "new=nowhere", "--settings", "new"], "a setting begins with a config"),
        (["vision-transformers", "--add", "new=resnet", "--settings", "new"], "begins with a family"),
        (["vision-transformers", "--add", "new=swin epoch=3", "--settings", "new"], "setting new: unknown key"),
        (["attention", "--data", "nowhere"], "has no recipe.json: make it with"),
        (["captioning", "--data", "nowhere"], "has no images"),
        (["captioning", "--stages", "self-critical"], "--stages must include cross-entropy"),
        (["sharing", "--table", "nowhere.json"], "holds no results of sharing"),
    ],
)
def test_bad_input_is_refused_before_any_training(arguments, message, tmp_path, monkeypatch, capsys):
    need("fairseq", "pycocoevalcap", "timm", *MM)
    monkeypatch.chdir(tmp_path)
    assert main([arguments[0], str(tmp_path / "out"), *arguments[1:]]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def crops(tmp_path) -> Path:
    """Write two crops of two classes for training and for validation."""
    from PIL import Image

    for number, part in enumerate(("train", "val")):
        for label in "ab":
            folder = tmp_path / "data/photograph_crops" / part / label
            folder.mkdir(parents=True)
            for n in range(2):
                Image.new("RGB", (32, 32), (90 * number, 40 * n, 200 * (label == "a"))).save(folder / f"{n}.png")
    return tmp_path / "data"


def test_classifiers(crops, tmp_path, capsys):
    """An interrupted training restarts, finished ones are kept, and other options are refused."""
    need("timm", "matplotlib", "skimage", "sklearn")
    folder = tmp_path / "out/crops/small-3"
    folder.mkdir(parents=True)
    (folder / "state.pt").write_text("half a file")
    few = "epochs=1 batch_size=4 model_args.embed_dim=12"
    arguments = ["vision-transformers", str(tmp_path / "out"), f"--data={crops}", "--sets", "crops", "--seeds", "3"]
    arguments += ["--add", "small=swin-unshifted model_args.drop_rate=0.1", "--settings", "small"]
    assert main([*arguments, "--train", few]) == 0
    result = result_of(folder)
    assert (result["options"]["seed"], result["options"]["model_args"]["shift"]) == (3, False)
    assert result["images"] == {"classes": 2, "train": 4, "val": 4}
    assert len(result["top1"]) == len(result["val_loss"]) == 1
    assert str(ROOT) not in result["command"]
    assert "| `small` |" in (tmp_path / "out/vision-transformers.md").read_text()
    assert (tmp_path / "out/vision-transformers.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert main([*arguments, "--train", few]) == 0
    assert "crops/small-3: already done" in capsys.readouterr().out
    assert main([*arguments, "--train", "epochs=2"]) == 2
    assert "was obtained with other options" in capsys.readouterr().err


@pytest.mark.slow
def test_a_failing_command_is_named(crops, tmp_path, capsys):
    need("timm", "matplotlib", "skimage", "sklearn")
    (crops / "moving_digits_2").mkdir()
    arguments = ["space-time", str(tmp_path / "out"), f"--data={crops}", "--tasks", "two-directions"]
    assert main([*arguments, "--settings", "space", "--seeds", "0"]) == 2
    assert "space-0/train.log, whose last line is: train: --data must hold train/CLASS" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "setting", "short"),
    [
        ("sharing", "i-shared-refined", "train_cfg.max_iters=4 train_cfg.val_interval=4"),
        ("deformable", "0010+deformable", f"{EPOCH} model.test_cfg.score_thr=0.0"),
        ("deformed-detection", "0010+deformable", f"{EPOCH} model.test_cfg.score_thr=0.0"),
        ("detection", "mask2former-20e", EPOCH),
        ("boundaries", "i-shared-refined", "train_cfg.max_iters=4 train_cfg.val_interval=4"),
    ],
)
def test_detectors_and_segmentors(name, setting, short, tmp_path, monkeypatch):
    need(*MM)
    from tools.datasets.digits_on_photographs import Recipe
    from tools.study import mm

    monkeypatch.setattr(mm, "Recipe", lambda **_: Recipe(train=8, val=4, seed=5))
    arguments = [name, str(tmp_path / "out"), f"--data={tmp_path / 'data'}", "--seeds", "3", "--settings", setting]
    assert main([*arguments, "--train", f"{short} default_hooks.logger.interval=1"]) == 0
    result = result_of(tmp_path / f"out/{setting}-3")
    assert len(result["mAP" if name == "detection" else "values"]) == 1
    assert ("segm_mAP" in result, "multiply_adds" in result) == (name == "detection", name != "detection")
    log = (tmp_path / f"out/{setting}-3/train.log").read_text()
    assert "randomness.seed=3" in log
    assert f"{tmp_path / 'out/pretrained/backbone.pth'}" in log.split("\n", 1)[1]


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Write a toy language pair with its pieces and recipe."""
    from tests.fairseq.fairseq_helpers import write_text
    from tools.datasets.gettext_corpus import write_pieces

    folder = tmp_path / "corpus"
    folder.mkdir()
    write_text(folder)
    pairs = {part: len((folder / f"{part}.en").read_text().splitlines()) for part in ("train", "valid", "test")}
    recipe = {"languages": ["en", "de"], "pairs": pairs, "bpe": write_pieces(folder, ("en", "de"), 60)}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    return folder


@pytest.mark.slow
def test_translation(corpus, tmp_path, capsys):
    need("fairseq", "sacrebleu", "sentencepiece")
    short = "--max-update 6 --warmup-updates 2 --max-tokens 300"
    arguments = ["attention", str(tmp_path / "out"), f"--data={corpus}", "--seeds", "2", "--train", short]
    assert main([*arguments, "--settings", "none"]) == 0
    result = result_of(tmp_path / "out/none-2")
    assert result["updates"] == 6
    assert result["tokens"] > 6 * 50
    assert result["bleu_by_length"].keys() <= {"short", "medium", "long"}
    assert result["options"][-2:] == ["--seed", "2"]
    hypotheses = (tmp_path / "out/none-2/hypotheses.txt").read_text().split("\n")[:-1]
    assert len(hypotheses) == 8
    assert not any("▁" in line for line in hypotheses)
    assert "BLEU: `nrefs:1" in (tmp_path / "out/attention.md").read_text()
    recipe = json.loads((corpus / "recipe.json").read_text())
    (corpus / "recipe.json").write_text(json.dumps({**recipe, "bpe": 1}))
    assert main([*arguments, "--settings", "none"]) == 2
    assert "of another corpus" in capsys.readouterr().err


def test_translations_are_read_in_order_and_scored_by_characters():
    need("sacrebleu")
    from tools.study.translation import read_translations, score, score_by_length

    log = "S-1\tb\nD-1\t-0.5\tnah .\nH-1\t-0.5\tn ah .\nD-0\t-0.25\tweit\tweg\n"
    assert read_translations(log, 2) == ["weit\tweg", "nah ."]
    with pytest.raises(StudyError, match="left out 1 of 3 sentences, the first is 2"):
        read_translations(log, 3)
    near = score(["日本語の文章です"], ["日本語の文です"], "char")["bleu"]
    assert score(["日本語の文章です"], ["日本語の文です"])["bleu"] < near < 100
    one, other = "a b c d e", "v w x y z"
    lengths = score_by_length([one, other, one], [one, one, one], ["▁a " * 10, "▁a " * 22, "▁a " * 9], "13a")
    assert lengths == {"short": pytest.approx(100), "long": pytest.approx(0, abs=20)}


@pytest.fixture
def scenes(tmp_path) -> Path:
    """Write a data folder in which a region and an attribute determine a caption."""
    from tests.fairseq.captioning_helpers import write_images

    folder = write_images(tmp_path / "scenes", 36)
    (folder / "images").mkdir()
    return folder


@pytest.mark.slow
def test_captioning(scenes, tmp_path, capsys):
    """Two stages, baselines, and an ensemble of two identical checkpoints, which captions as one does."""
    need("fairseq", "pycocoevalcap", "timm")
    out = tmp_path / "out"
    short = ["--train", "--max-update 4 --batch-size 16", "--self-critical", "--max-update 2 --samples 2"]
    arguments = ["captioning", str(out), "--data", str(scenes), *short, "--settings"]
    assert main([*arguments, "semantic", "eta-fused"]) == 0
    first, second = (result_of(out / stage / "semantic-1") for stage in ("cross-entropy", "self-critical"))
    assert (first["updates"], second["updates"], second["images"]) == (4, 2, 6)
    assert "--fusion semantic" in first["options"]["train"]
    assert result_of(out / "grammar")["scores"]["CIDEr-D"] > 1 > result_of(out / "stranger")["scores"]["CIDEr-D"]
    log = (out / "self-critical/semantic-1/train.log").read_text()
    assert f"loading pretrained model from {out / 'cross-entropy/semantic-1/checkpoint_best.pt'}" in log
    assert not (out / "cross-entropy/eta-fused").exists()
    for seed in (1, 2):
        shutil.copytree(out / "cross-entropy/semantic-1", out / f"cross-entropy/eta-{seed}")
        (out / f"cross-entropy/eta-{seed}/result.json").write_text(
            json.dumps({**first, "setting": "eta", "seed": seed})
        )
    assert main([*arguments, "eta-fused", "--seeds", "1", "2", "--stages", "cross-entropy"]) == 0
    fused, one = (out / "cross-entropy" / name / "results.json" for name in ("eta-fused", "semantic-1"))
    assert json.loads(fused.read_text()) == json.loads(one.read_text())
    assert result_of(fused.parent)["parameters"] == 2 * first["parameters"]
    assert "| `eta-fused` | ETA of all seeds, fused | cross-entropy | 1 2 |" in capsys.readouterr().out
    assert main([*arguments, "semantic"]) == 0  # of one seed
    assert "| `eta-fused` | ETA of all seeds, fused | cross-entropy | 1 2 |" in capsys.readouterr().out


@pytest.mark.slow
def test_captioning_from_nothing(tmp_path):
    """Scenes, detector, attributes and regions; then the oracle, whose attributes are those of the captions."""
    need("fairseq", "pycocoevalcap", "timm", "skimage", "sklearn")
    arguments = ["captioning", str(tmp_path / "out"), "--scenes", "--train 24 --val 4 --test 6 --size 64", "--detector"]
    arguments += ["--epochs 1 --min-word-count 2", "--train", "--max-update 4", "--settings", "oracle"]
    assert main([*arguments, "--stages", "cross-entropy"]) == 0
    with np.load(tmp_path / "out/scenes/regions.npz") as regions:
        assert regions["features"].shape == (34 * 9, 512)
    assert result_of(tmp_path / "out/cross-entropy/oracle-1")["images"] == 6
    assert main(["captioning", str(tmp_path / "out"), "--scenes", "--train 25", "--settings", "oracle"]) == 2
