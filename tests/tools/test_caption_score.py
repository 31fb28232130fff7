"""Caption scores: the standard package's numbers, skipped metrics with reasons, malformed files."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest

from tools.captioning import score as tool
from tools.captioning.metrics import MissingPackage, evaluate, plain_words

CAPTIONS = {
    11: ["a cat on the grass .", "A cat, lying on grass!"],
    12: ["two dogs run", "two dogs running on a beach"],
    13: ["a man's hat"],
    14: ["a red car parked near a house", "a car"],
}
RESULTS = {11: "a cat on grass", 12: "two dogs on a beach", 13: "A man's red hat.", 14: "a red car parked near the sea"}
NEEDS = "needs pycocoevalcap, the standard evaluation of captions (pip install pycocoevalcap==1.2)"


@pytest.fixture
def written(tmp_path):
    """Write results, captions and a split file, with the requested changes; return the command's arguments."""

    def write(results=RESULTS, captions=CAPTIONS, images=CAPTIONS, splits=None) -> list[str]:
        rows = [
            dict(id=10 * image + n, image_id=image, caption=caption)
            for image, own in captions.items()
            for n, caption in enumerate(own)
        ]
        content = {
            "results": [dict(image_id=image, caption=caption) for image, caption in results.items()],
            "captions": dict(images=[dict(id=image) for image in images], annotations=rows),
            "splits": dict(images=[dict(cocoid=image, split=part) for image, part in (splits or {}).items()]),
        }
        for name, value in content.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(value))
        split = ["--splits", str(tmp_path / "splits.json")]
        return [str(tmp_path / "results.json"), str(tmp_path / "captions.json"), *(split if splits else [])]

    return write


def without_java(monkeypatch):
    monkeypatch.setenv("PATH", "")


def test_every_score_with_java(written, tmp_path, capfd):
    pytest.importorskip("pycocoevalcap", reason=NEEDS)
    if shutil.which("java") is None:
        pytest.skip("no java on the PATH: METEOR and the PTB tokeniser cannot run")
    assert tool.main([*written(), "--json", str(tmp_path / "out/scores.json")]) == 0
    shown = capfd.readouterr().out
    report = json.loads((tmp_path / "out/scores.json").read_text())
    assert report["images"] == 4
    assert report["tokenizer"] == "PTBTokenizer"
    names = ["BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "METEOR", "ROUGE-L", "CIDEr-D"]
    assert list(report["scores"])[:7] == names
    # 4 + 5 + 5 + 7 words ("man's" counts as two), 18 of which are in a reference; the closest lengths are 5 + 6 + 4 + 7
    assert report["scores"]["BLEU-1"] == pytest.approx(18 / 21 * math.exp(1 - 22 / 21), abs=1e-6)
    for name in names:
        assert 0 < report["scores"][name] < (10 if name == "CIDEr-D" else 1)
        assert f"{name:8s} {100 * report['scores'][name]:6.1f}" in shown
    # SPICE needs models that the package lacks: it is computed, or skipped with how to get them
    if "SPICE" in report["left_out"]:
        assert "stanford-corenlp-3.6.0" in report["left_out"]["SPICE"]
        assert f"SPICE    left out: {report['left_out']['SPICE']}" in shown
    else:
        assert 0 < report["scores"]["SPICE"] < 1


def test_without_java_the_rest_is_given(written, monkeypatch, capsys):
    pytest.importorskip("pycocoevalcap", reason=NEEDS)
    without_java(monkeypatch)
    assert tool.main(written()) == 0
    shown = capsys.readouterr().out
    assert "4 images\nBLEU-1" in shown
    assert "METEOR   left out: there is no java on the PATH\nSPICE    left out: there is no java" in shown
    assert "tokeniser: plain, since there is no java on the PATH; scores differ a little" in shown


def test_a_java_that_fails_neither_hangs_nor_loses_the_rest(monkeypatch, tmp_path):
    pytest.importorskip("pycocoevalcap", reason=NEEDS)
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho could not reserve enough space >&2\nexit 1\n")
    java.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    report = evaluate(RESULTS, CAPTIONS)
    assert report.tokenizer == "plain"
    assert "PTBTokenizer failed" in report.tokenizer_note
    assert report.left_out["METEOR"] == "its Java part failed: could not reserve enough space"
    assert "SPICE" in report.left_out
    assert list(report.scores) == ["BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE-L", "CIDEr-D"]


def test_scores_are_the_standard_package_s(monkeypatch):
    pytest.importorskip("pycocoevalcap", reason=NEEDS)
    from pycocoevalcap.cider.cider import Cider

    without_java(monkeypatch)
    report = evaluate(RESULTS, CAPTIONS)
    truth = {image: [plain_words(s) for s in own] for image, own in CAPTIONS.items()}
    found = {image: [plain_words(s)] for image, s in RESULTS.items()}
    assert report.scores["CIDEr-D"] == Cider().compute_score(truth, found)[0]
    perfect = evaluate({image: own[0] for image, own in CAPTIONS.items()}, CAPTIONS)
    assert perfect.scores["BLEU-1"] == pytest.approx(1)
    assert perfect.scores["ROUGE-L"] == pytest.approx(1)
    with pytest.raises(ValueError, match=r"image 12: the caption '\.\.\.' holds no word"):
        evaluate({**RESULTS, 12: "..."}, CAPTIONS)
    with pytest.raises(ValueError, match=r"same images, one at least; not in both: \[12\]"):
        evaluate({image: s for image, s in RESULTS.items() if image != 12}, CAPTIONS)


def test_plain_words():
    assert plain_words("A man's  red hat, (on) a chair ... well-worn!") == "a man's red hat on a chair well-worn"


def test_a_part_of_the_images(written):
    results, captions, *split = written(splits={11: "test", 12: "train", 13: "test", 14: "val"})
    chosen, references, others = tool.match(Path(results), Path(captions), (Path(split[1]), "test"))
    assert chosen == {image: RESULTS[image] for image in (11, 13)}
    assert references == {image: CAPTIONS[image] for image in (11, 13)}
    assert others == 2


def test_images_without_a_result_are_left_out_where_asked(written, capsys):
    arguments = written(results={11: "a cat", 13: "A hat."}, splits={11: "test", 12: "test", 13: "test", 14: "val"})
    found = tool.match(Path(arguments[0]), Path(arguments[1]), (Path(arguments[3]), "test"), skip=True)
    assert list(found[0]) == list(found[1]) == [11, 13]
    assert "results.json has no result for image 12\n" in capsys.readouterr().err
    arguments = written(results={14: "a car"}, splits={11: "test", 14: "val"})
    with pytest.raises(tool.BadFile, match="no result for image 11"):
        tool.match(Path(arguments[0]), Path(arguments[1]), (Path(arguments[3]), "test"), skip=True)


def test_ids_may_be_names_and_numbers_may_be_text(written):
    for name in (str, "image-{}".format):
        ids = {image: name(image) for image in CAPTIONS}
        results = {ids[image]: caption for image, caption in RESULTS.items()}
        captions = {ids[image]: own for image, own in CAPTIONS.items()}
        named = {ids[image]: "test" for image in CAPTIONS}
        numbers = {image if name is str else ids[image]: "test" for image in CAPTIONS}
        for splits in (named, numbers):
            arguments = written(results=results, images=list(captions), splits=splits)
            content = json.loads(Path(arguments[1]).read_text())
            for row in content["annotations"]:
                row["image_id"] = ids[row["image_id"]]
            Path(arguments[1]).write_text(json.dumps(content))
            found = tool.match(Path(arguments[0]), Path(arguments[1]), (Path(arguments[3]), "test"))
            assert found == (results, captions, 0)


WRONG = {
    "unknown image in the results": (
        dict(results={**RESULTS, 99: "a cat"}),
        "results.json: results for image 99 that .*captions.json does not know",
    ),
    "image without a result": (
        dict(results={11: "a cat", 12: "a dog"}),
        r"results.json: no result for 2 images \(13, 14\) \(--skip-invalid-samples skips them, --splits scores a "
        "part of the images",
    ),
    "empty caption": (dict(results={**RESULTS, 13: "  "}), "results.json: image 13: an empty caption"),
    "empty reference": (
        dict(captions={**CAPTIONS, 12: ["two dogs", ""]}),
        "captions.json: annotation 121 of image 12: an empty caption",
    ),
    "image without references": (dict(captions={**CAPTIONS, 12: []}), "captions.json: no caption for image 12"),
    "annotation of no image": (dict(images=[11, 12, 13]), "annotation 140 of image 14: 'images' has no such image"),
    "split of unknown images": (
        dict(splits={11: "test", 77: "test", 78: "test"}),
        r"splits.json: 2 images \(77, 78\) that .*captions.json does not know",
    ),
    "split without the part": (
        dict(splits={11: "train", 12: "train", 13: "val"}),
        r"splits.json has no images in 'test'; its parts: train \(2\), val \(1\)",
    ),
    "unknown name as image id": (
        dict(results={"eleven": "a cat"}),
        "results.json: results for image eleven that .*captions.json does not know",
    ),
    "no image id": (
        dict(results={None: "a cat"}),
        "item 0 of the results must have 'image_id' of type int/str, got {'image_id': None",
    ),
    "split of no image": (
        dict(splits={None: "test"}),
        "splits.json: item 0 of 'images' must have 'cocoid' of type int/str, got {'cocoid': None",
    ),
}


@pytest.mark.parametrize("change, message", WRONG.values(), ids=WRONG)
def test_wrong_files_are_named(written, capsys, change, message):
    arguments = written(**change)
    assert tool.main([*arguments, *(["test"] if "--splits" in arguments else [])]) == 2
    error = capsys.readouterr().err
    assert error.startswith("score: ")
    assert error.count("\n") == 1
    assert re.search(message, error), error


def test_files_that_are_no_json_or_twice_the_same_image(written, tmp_path, capsys):
    arguments = written()
    twice = [dict(image_id=11, caption="a cat"), dict(image_id=11, caption="a dog")]
    for text, message in (
        (json.dumps(twice), "image 11 has two results, 'a cat' and 'a dog'"),
        ("[{]", "results.json is not JSON"),
        ("{}", "the results must be a list, got dict"),
    ):
        (tmp_path / "results.json").write_text(text)
        assert tool.main(arguments) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "results.json").unlink()
    assert tool.main(arguments) == 2
    assert "results.json cannot be read: No such file" in capsys.readouterr().err


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        MissingPackage, match=r"^scores need pycocoevalcap, .*: python -m attn_plugins install captioning$"
    ):
        evaluate(RESULTS, CAPTIONS)
