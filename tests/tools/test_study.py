"""tools.study: whole studies on a few pictures, clips, sentences and scenes; recorded results; claims."""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("yaml")

from tools.study import findings
from tools.study.__main__ import main, parse
from tools.study.commands import ROOT, StudyError
from tools.study.rules import CANNOT, MISSING, NOT, SEEN, Sample, difference, outcome
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


FAR, NEAR = Sample((5.0, 6.0, 7.0)), Sample((5.1, 6.1, 6.9))


def seeded(*values):
    return Sample(values, seeds=tuple(range(len(values))))


@pytest.mark.parametrize(
    ("rule", "one", "other", "p", "verdict", "half"),
    [
        ("above", seeded(5.0, 6.0, 7.0), seeded(1.0, 2.1, 2.9), None, SEEN, 4.303 * 0.1 / 3**0.5),  # 4 ± 0.1
        ("above", seeded(1.0, 2.1, 2.9), seeded(5.0, 6.0, 7.0), None, NOT, 0.25),
        ("above", seeded(5.0, 6.0, 7.0), seeded(4.0, 6.0, 5.0), None, CANNOT, 4.303 / 3**0.5),  # 1, 0, 2
        ("above", FAR, Sample((1.0, 2.0, 3.0)), None, SEEN, 2.776 * (2 / 3) ** 0.5),  # no seeds: Welch, 4 degrees
        ("above", Sample((5.0, 6.0)), Sample((2.0, 4.0)), None, CANNOT, 12.706 * 1.25**0.5),  # one degree of freedom
        ("above", Sample((30.0,)), Sample((10.0, 11.0, 12.0)), None, SEEN, 4.303 * (4 / 3) ** 0.5),
        ("above", Sample((15.0,)), Sample((10.0, 11.0, 12.0)), None, CANNOT, 4.97),
        ("above", Sample((30.0,)), Sample((10.0,)), None, CANNOT, None),  # one seed, whose variation is unknown
        ("above", Sample((30.0,), 3.0), Sample((25.0,), 3.0), None, SEEN, 18**0.5),
        ("above", Sample((30.0,), 3.0), Sample((26.0,), 3.0), None, CANNOT, 18**0.5),
        ("above", Sample((30.0,), 3.0), Sample((26.0,), 3.0), 0.001, SEEN, None),
        ("above", Sample((26.0,), 3.0), Sample((30.0,), 3.0), 0.001, NOT, None),
        ("above", Sample((2.0,), exact=True), Sample((1.9,), exact=True), None, SEEN, None),
        ("as_good", seeded(5.0, 5.1, 5.2), seeded(5.5, 5.6, 5.7), None, SEEN, None),  # behind by 0.5 in each pair
        ("as_good", seeded(5.0, 6.0, 7.0), seeded(5.0, 7.0, 7.0), None, CANNOT, 4.303 / 3),
        ("as_good", seeded(1.0, 2.0, 3.0), seeded(5.0, 6.0, 7.1), None, NOT, 0.14),
        ("as_good", Sample((25.0,), 3.0), Sample((28.0,), 3.0), 0.001, NOT, None),
        ("as_good", Sample((30.0,)), Sample((30.0,)), None, CANNOT, None),
    ],
)
def test_rules(rule, one, other, p, verdict, half):
    judged = outcome({rule: [["a", "b"]], "p": p}, {"a": one, "b": other})
    assert judged.verdict == verdict
    assert f"{one.mean - other.mean:+.1f}" in judged.result
    assert half is None or f"± {half:.1f} of" in judged.why


def test_pairs_are_of_equal_seeds():
    one, other = Sample((1.0, 5.0, 3.0), seeds=(0, 2, 1)), Sample((2.9, 0.9, 9.0), seeds=(1, 0, 7))
    shift, half, _ = difference(one, other)
    assert shift == pytest.approx(0.1)
    assert half == pytest.approx(0, abs=1e-9)


def test_a_margin_of_a_claim():
    samples = {"a": seeded(5.0, 5.1, 5.2), "b": seeded(5.5, 5.6, 5.7)}
    for margin, verdict in ((0.4, NOT), (0.6, SEEN)):
        assert outcome({"as_good": [["a", "b"]], "margin": margin}, samples).verdict == verdict


def test_the_first_epoch_at_a_level():
    rows = [dict(epochs=[5, 10, 15], top1=[20, 50, 60]), dict(epochs=[5, 10, 15], top1=[50, 60, 70])]
    assert reached(rows, "top1", 50) == "8 ± 4"
    assert reached(rows, "top1", 65) == "15 (1 of 2)"
    assert reached(rows, "top1", 80) == "> 15"


def test_every_comparison_of_a_claim_counts():
    samples = {"a": FAR, "b": Sample((1.0, 2.0, 3.0)), "c": NEAR}
    for pairs, verdict in (("ab ab", SEEN), ("ab ac", CANNOT), ("ab ac ba", NOT)):
        assert outcome({"above": [list(pair) for pair in pairs.split()]}, samples).verdict == verdict


def test_a_gain_above_another():
    """From a to b 3.0, 3.1, 2.9; from b to c 1.0, 0.9, 1.1: b is above the mean of a and c by half the difference."""
    samples = {"a": seeded(1.0, 2.0, 3.0), "b": seeded(4.0, 5.1, 5.9), "c": seeded(5.0, 6.0, 7.0)}
    samples["c"] = Sample((*samples["c"].values, 9.0), seeds=(*samples["c"].seeds, 99))  # a seed that others lack
    judged = outcome({"above": [["b", ["a", "c"]]]}, samples)
    assert judged.verdict == SEEN
    assert judged.differences[0] == pytest.approx((1.0, 4.303 * 0.1 / 3**0.5), abs=1e-3)
    assert judged.result == "`b` 5.0 ± 1.0, mean of `a` and `c` 4.0 ± 1.0: +1.0"
    assert outcome({"above": [[["a", "c"], "b"]]}, samples).verdict == NOT


def test_differences_of_differences(tmp_path):
    """A study may have several values: of long texts, and how far long ones are behind short ones."""
    rows = [
        {"setting": setting, "seed": seed, "bleu_by_length": {"short": 30 + seed, "long": long + 2 * seed}}
        for setting, long in (("attention", 25), ("fixed", 9))
        for seed in range(3)
    ]
    value = {"/long": "bleu_by_length.long", "/long-short": "long_minus_short"}
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/toy.json").write_text(json.dumps({"results": rows}))
    record = findings.Record("fixed-vector", {"file": "toy.json", "value": value, "steps": []}, tmp_path)
    assert record.samples["attention/long-short"] == Sample((-5, -4, -3), seeds=(0, 1, 2))
    for suffix in value:
        assert outcome({"above": [[f"attention{suffix}", f"fixed{suffix}"]]}, record.samples).verdict == SEEN


def test_claims_and_their_studies():
    """Claims name samples, steps are commands that are understood, and needed samples are the studies' settings."""
    records, claims = findings.load()
    assert {claim["study"] for claim in claims if "study" in claim} == set(records)
    for claim in claims:
        if "study" in claim:
            assert findings.judge(claim, records).verdict != MISSING, claim["claim"]
    for name, record in records.items():
        content = record.content
        assert record.samples
        for step in content["steps"]:
            command, *words = shlex.split(step["run"])
            if command == "tools.study":
                options, study = parse(words)
                if "product" in content:
                    assert Path(content["product"]) == options.output / f"{study.name}.json"
        if name in NAMES and content.get("resumed"):
            prefix = "crops/" if name == "augmented" else ""
            assert content["needed"] == [f"{prefix}{setting}" for setting in Study(name).settings]


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


def test_the_page_is_that_of_the_recorded_figures():
    assert findings.page(*findings.load()) == (ROOT / "benchmarks/findings.md").read_text()


def test_the_figure_has_every_tested_claim(tmp_path):
    need("matplotlib")
    records, claims = findings.load()
    outcomes = [findings.judge(claim, records) for claim in claims]
    findings.draw_claims(claims, outcomes, tmp_path / "claims.svg")
    drawn, kept = (
        [text for text in ElementTree.parse(file).getroot().itertext() if text.strip()]
        for file in (tmp_path / "claims.svg", ROOT / "benchmarks/findings.svg")
    )
    assert drawn == kept
    tested = [claim for claim, judged in zip(claims, outcomes) if judged.differences]
    tested = [claim["claim"].replace("`", "") for claim in tested if "/operations" not in str(claim)]
    assert sum(text.removesuffix(" (other data)") in tested for text in drawn) == len(tested) > 40


def test_samples_measured_by_hand_are_those_of_the_page():
    for record in findings.load()[0].values():
        text = record.file.read_text()
        for values in record.content.get("samples", {}).values():
            assert all(f"{number:g}" in text for number in values)


def test_findings_run_resume_and_collect(tmp_path, monkeypatch, capsys):
    """A step whose product exists is not repeated, results of another machine are, and errors are reported."""
    ran: list[list[str]] = []
    rows = [{"setting": s, "seed": n, "values": [n], "multiply_adds": 1, "options": []} for s in "ab" for n in range(3)]

    def run(command, arguments, log):
        ran.append([command, *arguments])
        if "bad" in arguments:
            raise StudyError("bad ended with status 1")
        (tmp_path / arguments[0]).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / arguments[0]).write_text(json.dumps({"results": rows}))

    steps = [{"run": "tools.datasets.one work/made", "made": "work/made"}, {"run": "tools.study work/sharing.json"}]
    good = {"data": "digits", "file": "toy.json", "minutes": 5, "sample": "{setting}", "value": "values",
            "steps": steps, "product": "work/sharing.json", "needed": ["a", "b"], "resumed": True}  # fmt: skip
    bad = {**good, "file": "bad.json", "steps": [{"run": "tools.study bad"}], "product": "work/no.json"}
    records = {name: findings.Record(name, study, tmp_path) for name, study in (("good", good), ("bad", bad))}
    claim = {"claim": "a beats b", "document": "Thesis", "place": "Table 9", "study": "good", "above": [["a", "b"]]}
    monkeypatch.setattr(findings, "run", run)
    monkeypatch.setattr(findings, "load", lambda root=None: (records, [claim]))
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/toy.json").write_text(json.dumps({"results": rows[:1]}))
    assert not records["good"].finished
    assert records["good"].complete == {"a/operations": Sample((1e-6,), exact=True)}
    assert "python -m tools.study findings --studies good" in findings.judge(claim, records).why
    assert findings.carry_out_all(["good", "bad"], 1, tmp_path) == ["bad: bad ended with status 1"]
    assert result_of(tmp_path / "work/a-0") == rows[0]
    assert [words[0] for words in ran] == ["tools.datasets.one", "tools.study", "tools.study"]
    assert records["good"].finished
    assert "| a beats b | Thesis, Table 9 |" in (tmp_path / "benchmarks/findings.md").read_text()
    findings.carry_out_all(["good"], 1, tmp_path)
    assert [words[0] for words in ran][3:] == ["tools.study"]
    (tmp_path / "work_dirs/findings/good-1.unfinished").touch()  # by an interrupted run
    findings.carry_out_all(["good"], 1, tmp_path)
    assert [words[0] for words in ran][4:] == ["tools.datasets.one", "tools.study"]
    assert "good: finished" in capsys.readouterr().out
    (tmp_path / "benchmarks/toy-again.json").write_text(
        json.dumps({"results": [{**r, "seed": r["seed"] + 3} for r in rows]})
    )
    again = findings.Record(
        "good", {**good, "again": {"file": "toy-again.json", "run": "tools.study x --seeds 3 4 5"}}, tmp_path
    )
    page = findings.page({"good": again}, [claim])
    assert "**again with other seeds**: +0.0 ± 0.0, cannot be seen at this size |" in page
    assert "<br>again: `python -m tools.study x --seeds 3 4 5` |" in page
    assert "[toy.json](toy.json), [toy-again.json](toy-again.json) |" in page


@pytest.mark.parametrize(("lead", "verdict"), [(4.0, SEEN), (0.0, CANNOT), (-4.0, CANNOT)])
def test_a_claim_is_seen_if_a_repetition_sees_it(lead, verdict, tmp_path):
    (tmp_path / "benchmarks").mkdir()
    for file, a in (("first", 4.0), ("second", lead)):
        rows = [
            {"setting": setting, "seed": seed, "top1": value + seed + 0.1 * seed * (setting == "a")}
            for setting, value in (("a", a), ("b", 0.0))
            for seed in range(3)
        ]
        (tmp_path / f"benchmarks/{file}.json").write_text(json.dumps({"results": rows}))
    content = {"file": "first.json", "value": "top1", "steps": [], "again": {"file": "second.json", "run": "x"}}
    claim = {"study": "toy", "above": [["a", "b"]]}
    judged = findings.judge(claim, {"toy": findings.Record("toy", content, tmp_path)})
    assert judged.verdict == verdict
    assert f"**again with other seeds**: {lead + 0.1:+.1f} ± 0.2, " in judged.why


def test_findings_run_in_the_repository_only(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["findings"])
    assert f"studies run in the repository's root, {ROOT}, not in" in capsys.readouterr().err
    assert main(["findings", "--list"]) == 0
    assert "cross-attention" in capsys.readouterr().out
