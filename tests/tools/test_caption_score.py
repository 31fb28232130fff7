"""``tools.caption score``: the standard package's numbers, scores left out with reasons, malformed files."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.caption.__main__ import main
from tools.caption.score import evaluate, plain_words

CAPTIONS = {
    11: ["a cat on the grass .", "A cat, lying on grass!"],
    12: ["two dogs run", "two dogs running on a beach"],
    13: ["a man's hat"],
    14: ["a red car parked near a house", "a car"],
}
RESULTS = {11: "a cat on grass", 12: "two dogs on a beach", 13: "A man's red hat.", 14: "a red car parked near the sea"}
NEEDS = "needs pycocoevalcap, the standard evaluation of captions (pip install pycocoevalcap==1.2)"


@pytest.fixture
def score(tmp_path) -> Callable[..., int]:
    """Write results (or text), captions and splits, and score the results; the report is in ``scores.json``."""

    def run(results=RESULTS, captions=CAPTIONS, images=CAPTIONS, splits=None, options=()) -> int:
        rows = [
            dict(id=n, image_id=image, caption=text) for image, own in captions.items() for n, text in enumerate(own)
        ]
        if isinstance(results, dict):
            results = json.dumps([dict(image_id=image, caption=text) for image, text in results.items()])
        (tmp_path / "results.json").write_text(results)
        contents = {
            "captions": dict(images=[dict(id=image) for image in images], annotations=rows),
            "splits": dict(images=[dict(cocoid=image, split=part) for image, part in (splits or {}).items()]),
        }
        for name, content in contents.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        part = ["--splits", str(tmp_path / "splits.json"), "test"] if splits else []
        files = [str(tmp_path / f"{name}.json") for name in ("results", "captions")]
        return main(["score", *files, *part, "--json", str(tmp_path / "scores.json"), *options])

    return run


def report(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "scores.json").read_text())


@pytest.mark.slow
def test_every_score_with_java(score, tmp_path, capfd):
    pytest.importorskip("pycocoevalcap", reason=NEEDS)
    if shutil.which("java") is None:
        pytest.skip("no java on the PATH: the PTB tokeniser cannot run")
    assert score() == 0
    shown, scored = capfd.readouterr().out, report(tmp_path)
    assert scored["images"] == 4
    assert scored["tokenizer"] == "PTBTokenizer"
    names = ["BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE-L", "CIDEr-D"]
    assert list(scored["scores"]) == names
    # 4 + 5 + 5 + 7 words ("man's" counts as two), 18 of which are in a reference; the closest lengths are 5 + 6 + 4 + 7
    assert scored["scores"]["BLEU-1"] == pytest.approx(18 / 21 * math.exp(1 - 22 / 21), abs=1e-6)
    for name in names:
        assert 0 < scored["scores"][name] < (10 if name == "CIDEr-D" else 1)
        assert f"{name:8s} {100 * scored['scores'][name]:6.1f}" in shown


def test_without_java_words_are_split_plainly(score, tmp_path, monkeypatch, capsys):
    pytest.importorskip("pycocoevalcap", reason=NEEDS)
    from pycocoevalcap.cider.cider import Cider

    java = tmp_path / "java"
    java.write_text("#!/bin/sh\nexit 1\n")
    java.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "PTBTokenizer failed" in evaluate(RESULTS, CAPTIONS).tokenizer_note
    monkeypatch.setenv("PATH", "")
    assert score() == 0
    shown = capsys.readouterr().out
    assert "4 images\nBLEU-1" in shown
    assert "tokeniser: plain, since there is no java on the PATH; scores differ a little" in shown
    truth = {image: [plain_words(s) for s in own] for image, own in CAPTIONS.items()}
    results = {image: [plain_words(s)] for image, s in RESULTS.items()}
    assert report(tmp_path)["scores"]["CIDEr-D"] == Cider().compute_score(truth, results)[0]
    assert score(results={image: own[0] for image, own in CAPTIONS.items()}) == 0
    assert report(tmp_path)["scores"]["BLEU-1"] == pytest.approx(1)
    assert report(tmp_path)["scores"]["ROUGE-L"] == pytest.approx(1)
    assert score(results={**RESULTS, 12: "..."}) == 2
    assert "image 12: the caption '...' holds no word" in capsys.readouterr().err
    assert plain_words("A man's  red hat, (on) a chair ... well-worn!") == "a man's red hat on a chair well-worn"


def test_a_score_that_is_undefined_is_left_out(score, tmp_path, capsys, monkeypatch):
    """The package returns 0, also for captions that are their references."""
    pytest.importorskip("pycocoevalcap", reason=NEEDS)
    monkeypatch.setenv("PATH", "")
    images = {11: ["a red cat on grass"], 12: ["a red cat on grass"]}
    assert score(dict.fromkeys(images, "a red cat"), images, images) == 0
    scored, shown = report(tmp_path), capsys.readouterr().out
    assert scored["left_out"].keys() == {"BLEU-4", "CIDEr-D"}
    for name, reason in {"BLEU-4": "no caption has 4 words", "CIDEr-D": "all 2 images have the same n-grams"}.items():
        assert name not in scored["scores"]
        assert scored["left_out"][name].startswith(f"it is undefined: {reason}")
        assert f"{name:8s} left out: {scored['left_out'][name]}" in shown
    assert scored["scores"]["BLEU-3"] > 0


def test_chinese_is_scored_by_its_characters(monkeypatch):
    pytest.importorskip("pycocoevalcap", reason=NEEDS)
    monkeypatch.setenv("PATH", "")
    truth = {11: ["一只猫在草地上。"], 12: ["两只狗在海滩上跑，很快"]}
    # 7 and 9 of 7 and 10 characters, without punctuation
    scored = evaluate({11: "一 只 猫 在 草 地 上", 12: "两只狗在海滩上跑快"}, truth).scores
    assert scored["BLEU-1"] == pytest.approx(math.exp(1 - 17 / 16), abs=1e-6)
    assert 5 < scored["CIDEr-D"] < 10


def test_a_part_of_the_images(score, tmp_path, capsys, monkeypatch):
    pytest.importorskip("pycocoevalcap", reason=NEEDS)
    monkeypatch.setenv("PATH", "")
    splits = {11: "test", 12: "train", 13: "test", 14: "val"}
    assert score(splits=splits) == 0
    assert "2 images; 2 results of other images not read\n" in capsys.readouterr().out
    whole = report(tmp_path)
    assert score({str(image): text for image, text in RESULTS.items()}, splits=splits) == 0  # numbers as text
    assert report(tmp_path) == whole
    some = dict(results={11: "a cat on grass", 14: "a car"}, splits=splits)
    assert score(**some) == 2
    assert "no result for image 13 (--skip-invalid-samples skips them)" in capsys.readouterr().err
    assert score(**some, options=["--skip-invalid-samples"]) == 0
    assert "results.json has no result for image 13\n" in capsys.readouterr().err
    assert report(tmp_path)["images"] == 1
    assert score(results={14: "a car"}, splits=splits, options=["--skip-invalid-samples"]) == 2


WRONG = [
    (dict(results={**RESULTS, 99: "a cat"}), "results.json: image 99 that .*captions.json does not know"),
    (
        dict(results={11: "a cat", 12: "a dog"}),
        r"results.json: no result for 2 images \(13, 14\) \(--skip-invalid-samples skips them, --splits scores a part",
    ),
    (dict(results={**RESULTS, 13: "  "}), "results.json: image 13: an empty caption"),
    (dict(results={None: "a cat"}), "item 0 of results must have 'image_id' of type int/str, got {'image_id': None"),
    (
        dict(results='[{"image_id": 11, "caption": "a cat"}, {"image_id": 11, "caption": "a dog"}]'),
        "image 11 has two results, 'a cat' and 'a dog'",
    ),
    (dict(captions={**CAPTIONS, 12: ["two dogs", ""]}), "captions.json: image 12: an empty caption"),
    (dict(captions={**CAPTIONS, 12: []}), "captions.json: no caption for image 12"),
    (dict(images=[11, 12, 13]), "captions.json: caption 0 is of image 14, which 'images' lacks"),
    (dict(splits={11: "test", 77: "test", 78: "test"}), r"splits.json: 2 images \(77, 78\) that .* does not know"),
    (dict(splits={11: "train", 12: "train", 13: "val"}), r"no images in 'test'; its parts: train \(2\), val \(1\)"),
    (dict(splits={None: "test"}), "splits.json: cocoid or imgid of an image must be a number or a string, got"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_wrong_files_are_named(score, capsys, change, message):
    assert score(**change) == 2
    error = capsys.readouterr().err
    assert error.startswith("score: ")
    assert error.count("\n") == 1
    assert re.search(message, error), error


def test_the_missing_package_is_named(score, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pycocoevalcap.bleu.bleu", None)
    assert score() == 2
    assert "scores need pycocoevalcap, which is not installed: pip install" in capsys.readouterr().err
