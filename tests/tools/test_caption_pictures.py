"""``tools.caption caption``: captions equal those of fairseq-generate, pictures of all kinds, bad input."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

pytest.importorskip("fairseq")

from attn_plugins.captioning.region_features import RegionFeatures, write_region_features
from tests.fairseq.console_helpers import in_one_process
from tests.tools.caption_helpers import read, run
from tools.caption.__main__ import main
from tools.pictures import BadPicture, open_picture

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_the_captions_are_those_of_fairseq_generate(captioned, tmp_path, capsys):
    paths = ["semantic", "show_attend_tell", "entangled:other:visual"]
    names, commands, distinct = ["000005", "000011"], [], set()
    for path in paths:
        models = ":".join(str(captioned.parent / f"{name}.pt") for name in path.split(":"))
        options = ["--user-dir=plugins/fairseq", "--task=captioning", "--gen-subset=test", "--path", models, "--beam=3"]
        options += ["--max-len-b=6", "--cpu", "--num-workers=0", "--max-attributes=4", "--batch-size=1"]
        commands.append(["generate", captioned, *options, "--results-json", tmp_path / f"{path}.json"])
    in_one_process(*commands)
    for path in paths:
        assert (
            run(captioned, tmp_path / "out.json", *(captioned / f"images/{name}.jpg" for name in names), path=path) == 0
        )
        printed, rows = capsys.readouterr().out, read(tmp_path / "out.json")
        expected = {f"{row['image_id']:06}": row["caption"] for row in read(tmp_path / f"{path}.json")}
        assert {row["image_id"]: row["caption"] for row in rows} == expected
        assert list(expected) == names
        distinct |= set(expected.values())
        for row in rows:
            assert row["file_name"] == str(captioned / f"images/{row['image_id']}.jpg")
            assert f"{row['file_name']}: {row['caption']}\n" in printed
    assert len(distinct) > len(paths)  # some model sees the difference


def test_pictures_of_every_kind(captioned, tmp_path, capsys):
    """Broken pictures are reported and skipped; all others get captions."""
    given, out = tmp_path / "given", tmp_path / "out.json"
    given.mkdir()
    picture = open_picture(captioned / "images/000006.jpg").resize((90, 60))
    picture.save(given / "plain.png")
    turned, exif = picture.transpose(Image.Transpose.ROTATE_90), Image.Exif()
    exif[0x0112] = 6  # rotate clockwise for display
    turned.save(given / "turned.png", exif=exif)
    picture.convert("L").save(given / "grey.jpg")
    picture.convert("CMYK").save(given / "cmyk.jpg")
    clear = picture.convert("RGBA")
    clear.putalpha(0)
    clear.save(given / "clear.png")
    Image.new("RGB", (90, 60), "white").save(given / "white.png")
    picture.convert("P").save(given / "palette.gif")
    picture.resize((300, 7)).save(given / "strip.png")
    picture.resize((1, 1)).save(given / "dot.png")
    picture.save(tmp_path / "more.png")
    picture.save(tmp_path / "grey.png")
    (given / "text.jpg").write_text("no picture")
    (given / "cut.jpg").write_bytes((captioned / "images/000006.jpg").read_bytes()[:700])
    pictures = [given, tmp_path / "more.png", given / "gone.jpg"]
    assert run(captioned, out, *pictures, path="visual") == 1
    printed = capsys.readouterr()
    for name, reason in (("text", "cannot identify image"), ("cut", "image file is truncated"), ("gone", ".* No such")):
        skipped = rf"skipped image {name}: {given / name}\.jpg cannot be read as a picture: {reason}"
        assert re.search(skipped, printed.err)
    good = ["clear", "cmyk", "dot", "grey", "palette", "plain", "strip", "turned", "white", "more"]
    captions = {row["image_id"]: row["caption"] for row in read(out)}
    assert list(captions) == good
    assert f"{out}: {len(good)} captions" in printed.out
    assert captions["turned"] == captions["more"] == captions["plain"]
    assert captions["clear"] == captions["white"]
    assert len(set(captions.values())) > 2
    out.unlink()
    assert run(captioned, out, given / "text.jpg", path="visual") == 1
    assert not out.exists()
    assert run(captioned, out, given, tmp_path / "grey.png") == 2
    assert "have the same name" in capsys.readouterr().err


def test_a_broken_orientation_does_not_make_a_broken_picture(tmp_path, monkeypatch):
    Image.new("RGB", (5, 3), "red").save(tmp_path / "x.png")

    def fails(picture):
        raise ValueError("a broken tag")

    monkeypatch.setattr("PIL.ImageOps.exif_transpose", fails)
    assert open_picture(tmp_path / "x.png").size == (5, 3)
    (tmp_path / "y.png").write_bytes((tmp_path / "x.png").read_bytes()[:50])
    with pytest.raises(BadPicture, match=r"y\.png cannot be read as a picture"):
        open_picture(tmp_path / "y.png")


def copied(data: Path, tmp_path: Path) -> Path:
    return shutil.copytree(data, tmp_path / "data")


def of_other_task(data: Path, tmp_path: Path) -> list:
    state = torch.load(data.parent / "entangled.pt", weights_only=False)
    state["cfg"]["task"]["_name"] = "translation"
    torch.save(state, tmp_path / "other.pt")
    return ["--path", tmp_path / "other.pt"]


def of_other_regions(data: Path, tmp_path: Path) -> list:
    """Return a data folder whose features have no options."""
    folder, features = copied(data, tmp_path), RegionFeatures(data / "regions.hdf5")
    write_region_features(
        folder / "regions.hdf5", [(i, dict(features=features.features(i))) for i in features.image_ids]
    )
    return ["--data", folder]


def without_vocabulary(data: Path, tmp_path: Path) -> list:
    (copied(data, tmp_path) / "dict.txt").unlink()
    return ["--data", tmp_path / "data"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (of_other_task, r"--path: .*other\.pt is of the task translation, not captioning"),
        (["--path", "nowhere.pt"], r"--path: nowhere\.pt does not exist"),
        (["--path", __file__], r"test_caption_pictures\.py cannot be read as a fairseq checkpoint"),
        (of_other_regions, r"regions\.hdf5 lacks the options of tools.caption extract"),
        (without_vocabulary, r"the vocabulary .*dict\.txt does not exist: .*--data takes another folder"),
        (["--data", "nowhere"], r"nowhere.* does not exist: .*--data takes another folder"),
        (["--attributes", "nowhere.json"], r"nowhere\.json cannot be read: No such file"),
        (["--beam", "0"], "--beam must be at least 1, got 0"),
    ],
)
def test_bad_input_is_reported_once(options, message, captioned, tmp_path, capsys):
    given = options(captioned, tmp_path) if callable(options) else options
    pictures = [captioned / "images/000006.jpg", captioned / "images/000007.jpg"]
    assert run(captioned, tmp_path / "out", *pictures, options=tuple(given)) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("caption: ")
    assert re.search(message, line), line
    assert not (tmp_path / "out").exists()


def test_attributes_that_are_missing(captioned, tmp_path, capsys):
    picture, path = captioned / "images/000006.jpg", str(captioned.parent / "semantic.pt")
    assert main(["caption", str(picture), "--path", path, "--out", str(tmp_path)]) == 2
    assert "--attributes is needed: the fusion of --path" in capsys.readouterr().err
    file = tmp_path / "attributes.json"
    for words in ({"000006": [["quark", 1.0]]}, {}):
        file.write_text(json.dumps(words))
        assert run(captioned, tmp_path / "out", picture, options=("--attributes", file)) == 1
        reason = f"skipped image 000006: {file}: image 000006 has no attribute that is in the dictionary"
        assert reason in capsys.readouterr().err
