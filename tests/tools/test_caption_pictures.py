"""``tools.caption caption``: captions equal those of fairseq-generate, pictures of all kinds, shards, bad input."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("fairseq")

from attn_plugins.captioning.region_features import RegionFeatures, write_region_features
from tests.fairseq.fairseq_helpers import fairseq
from tests.tools.caption_helpers import CAPTIONERS, FUSIONS, SHOWN, read, run
from tools.caption import caption as tool
from tools.caption.__main__ import main
from tools.caption.attributes import AttributeDetector
from tools.caption.backbones import TimmBackbone
from tools.caption.page import WIDTH
from tools.pictures import BadPicture, open_picture

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "path", ["entangled", pytest.param(f"entangled:other:{':'.join(CAPTIONERS)}", marks=pytest.mark.slow)]
)
def test_the_caption_is_that_of_fairseq_generate(path, captioned, tmp_path, capsys):
    names = [f"{i:06}" for i in range(6, 10)]
    assert run(captioned, tmp_path, *(captioned / f"images/{name}.jpg" for name in names), path=path) == 0
    printed = capsys.readouterr().out
    models = ":".join(str(captioned.parent / f"{name}.pt") for name in path.split(":"))
    options = ["--user-dir", "plugins/fairseq", "--task=captioning", "--gen-subset=test", "--path", models, "--beam=3"]
    options += ["--max-len-b=6", "--cpu", "--num-workers=0", "--max-attributes=4", "--batch-size=1"]
    fairseq("generate", captioned, *options, "--results-json", tmp_path / "expected.json")
    expected = {f"{row['image_id']:06}": row["caption"] for row in read(tmp_path / "expected.json")}
    rows = read(tmp_path / "captions.json")
    assert {row["image_id"]: row["caption"] for row in rows} == expected
    assert list(expected) == names
    assert len(set(expected.values())) > 1
    for row in rows:
        assert row["file_name"] == str(captioned / f"images/{row['image_id']}.jpg")
        assert f"{row['file_name']}: {row['caption']}\n" in printed
        numbers = read(tmp_path / f"{row['image_id']}.json")
        assert numbers["caption"] == row["caption"] == " ".join(word["word"] for word in numbers["words"])
        assert len(numbers["attributes"]) == 3
        assert numbers["attributes"] == read(captioned / "attributes.json")[str(int(row["image_id"]))]


@pytest.mark.parametrize("fusion", SHOWN)
def test_every_fusion_shows_what_it_has(fusion, captioned, tmp_path):
    picture = captioned / "images/000007.jpg"
    assert run(captioned, tmp_path, picture, path=fusion, options=("--all-weights", "--layer", "1")) == 0
    numbers = read(tmp_path / "000007.json")
    [model] = numbers["models"]
    assert set(model) - {"regions_injection", "attributes_injection"} == SHOWN[fusion]
    assert ("regions_injection" in model) == (fusion == "entangled")
    assert numbers.keys() & {"regions", "attributes"} == SHOWN[fusion] - {"visual_share"}
    for t, word in enumerate(numbers["words"]):
        assert word.keys() - {"word", "log_probability"} == SHOWN[fusion]
        for name in word.keys() & {"regions", "attributes"}:
            assert len(word[name]) == dict(regions=9, attributes=3)[name]
            assert sum(word[name]) == pytest.approx(1, abs=1e-4)
            heads = np.array(model[name])[0, :, t]
            assert heads.shape[0] == (4 if fusion in FUSIONS else 1)
            np.testing.assert_allclose(word[name], heads.mean(0), atol=2e-5)
        if "visual_share" in word:
            assert word["visual_share"] == pytest.approx(model["visual_share"][0][t], abs=2e-5)
    assert Image.open(tmp_path / "000007.png").width == WIDTH


def test_pictures_of_every_kind(captioned, tmp_path, capsys):
    """Broken pictures are reported and skipped; all others get captions."""
    given, out = tmp_path / "given", tmp_path / "out"
    (given / "more").mkdir(parents=True)
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
    picture.save(given / "more/plain.png")
    picture.save(given / "captions.png")
    (given / "text.jpg").write_text("no picture")
    (given / "cut.jpg").write_bytes((captioned / "images/000006.jpg").read_bytes()[:700])
    pictures = [given, given / "more/plain.png", given / "gone.jpg"]
    assert run(captioned, out, *pictures) == 1
    printed = capsys.readouterr()
    assert f"skipped {given / 'text.jpg'}: cannot be read as a picture: cannot identify image file" in printed.err
    assert f"skipped {given / 'cut.jpg'}: cannot be read as a picture: image file is truncated" in printed.err
    assert f"skipped {given / 'gone.jpg'}: no such file" in printed.err
    good = ["captions-2", "clear", "cmyk", "dot", "grey", "palette", "plain", "strip", "turned", "white", "plain-2"]
    assert [row["image_id"] for row in read(out / "captions.json")] == good
    assert len(printed.out.splitlines()) == len(good) + 1
    assert {path.name for path in out.iterdir()} == {"captions.json"} | {
        f"{name}.{suffix}" for name in good for suffix in ("png", "json")
    }
    for name, same in (("turned", "plain"), ("plain-2", "plain"), ("clear", "white")):
        for part in ("words", "regions", "attributes"):
            assert read(out / f"{name}.json")[part] == read(out / f"{same}.json")[part]
    assert read(out / "grey.json")["words"] != read(out / "plain.json")["words"]
    for name in good:
        with Image.open(out / f"{name}.png") as drawn:
            assert drawn.width == WIDTH
            assert 300 < drawn.height < 2000


def test_pictures_of_cocos_list_have_its_ids(captioned, tmp_path, capsys):
    """The test server expects COCO's integer ids; its list of pictures has no captions."""
    listed = {"images": [{"id": i + 391000, "file_name": f"{i:06}.jpg"} for i in (7, 6)], "licenses": []}
    (tmp_path / "image_info.json").write_text(json.dumps(listed))
    options = ("--captions", tmp_path / "image_info.json")
    assert run(captioned, tmp_path / "out", captioned / "images", path="visual", options=options) == 0
    rows = read(tmp_path / "out/captions.json")
    assert [row["image_id"] for row in rows] == [391007, 391006]
    assert run(captioned, tmp_path / "plain", captioned / "images/000006.jpg", path="visual") == 0
    assert read(tmp_path / "plain/captions.json")[0]["caption"] == rows[1]["caption"]
    assert run(captioned, tmp_path / "two", *[captioned / "images"] * 2, path="visual", options=options) == 2
    assert "--captions needs one folder of pictures, got 2 arguments" in capsys.readouterr().err


def test_a_vocabulary_that_could_not_be_written(captioned, tmp_path):
    """Without dict.txt in the data folder of the training, the words are counted again, as in training."""
    kept, picture = (captioned / "dict.txt").read_bytes(), captioned / "images/000006.jpg"
    assert run(captioned, tmp_path / "one", picture, path="visual") == 0
    (captioned / "dict.txt").unlink()
    try:
        assert run(captioned, tmp_path / "two", picture, path="visual") == 0
    finally:
        (captioned / "dict.txt").write_bytes(kept)
    assert read(tmp_path / "one/captions.json") == read(tmp_path / "two/captions.json")


def test_none_of_the_pictures(captioned, tmp_path, capsys):
    assert run(captioned, tmp_path / "out", tmp_path / "gone.jpg") == 1
    assert not (tmp_path / "out").exists()
    assert "gone.jpg: no such file" in capsys.readouterr().err


def test_a_broken_orientation_does_not_make_a_broken_picture(tmp_path, monkeypatch):
    Image.new("RGB", (5, 3), "red").save(tmp_path / "x.png")

    def fails(picture):
        raise ValueError("a broken tag")

    monkeypatch.setattr("PIL.ImageOps.exif_transpose", fails)
    assert open_picture(tmp_path / "x.png").size == (5, 3)
    (tmp_path / "y.png").write_bytes((tmp_path / "x.png").read_bytes()[:50])
    with pytest.raises(BadPicture, match=r"y\.png cannot be read as a picture"):
        open_picture(tmp_path / "y.png")


def contents(folder: Path) -> dict[str, Any]:
    """Return the contents of every file: the bytes of captions, the values of other JSON files, and pixels."""
    pictures = {path.name: Image.open(path).tobytes() for path in folder.glob("*.png")}
    values = {path.name: read(path) for path in folder.glob("*.json")}
    assert len(pictures) + len(values) == len(list(folder.iterdir()))
    return {**pictures, **values, "captions": (folder / "captions.json").read_bytes()}


def test_interrupted_shards_write_what_one_process_writes(captioned, tmp_path, capsys, monkeypatch):
    shutil.copytree(captioned / "images", tmp_path / "images")
    (tmp_path / "images/000004.jpg").write_text("no picture")

    def command(out: str, *options: str) -> int:
        return run(captioned, tmp_path / out, tmp_path / "images", path="visual", options=("--beam", "1", *options))

    assert command("one") == 1
    assert "resuming" not in capsys.readouterr().out
    whole = tool.caption_picture

    def ended(captioner, name, *given):
        if name == "000006":
            raise KeyboardInterrupt
        return whole(captioner, name, *given)

    for shard in ("1/1", "2/2"):
        with monkeypatch.context() as patched:
            patched.setattr(tool, "caption_picture", ended)
            with pytest.raises(KeyboardInterrupt):
                command("out", "--shard", shard)
    assert not (tmp_path / "out/captions.json").exists()
    assert command("out", "--max-len", "7") == 2
    assert "interrupted run with max_len = 6, not 7: --restart discards it" in capsys.readouterr().err
    shutil.copytree(tmp_path / "out", tmp_path / "alone")
    assert main(["merge", str(tmp_path / "out")]) == 2
    assert "left to do" in capsys.readouterr().err
    assert [command("out", "--shard", f"{i}/2") for i in (1, 2)] == [0, 1]
    assert "resuming after 4 of 9 pictures" in capsys.readouterr().out
    assert main(["merge", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr()
    assert f"{tmp_path / 'out/captions.json'}: 8 captions\n" in printed.out
    assert "1 pictures were skipped:\n  image 000004: cannot be read as a picture" in printed.err
    assert command("alone") == 1
    expected = contents(tmp_path / "one")
    assert len(expected) == 18
    assert contents(tmp_path / "out") == contents(tmp_path / "alone") == expected


def copied(data: Path, tmp_path: Path) -> Path:
    shutil.copytree(data, tmp_path / "data")
    shutil.copy(data.parent / "best.safetensors", tmp_path)
    return tmp_path / "data"


def of_other_task(data: Path, tmp_path: Path) -> list:
    state = torch.load(data.parent / "entangled.pt", weights_only=False)
    state["cfg"]["task"]["_name"] = "translation"
    torch.save(state, tmp_path / "other.pt")
    return ["--path", tmp_path / "other.pt"]


def of_other_regions(data: Path, tmp_path: Path, width: int | None = None, **changes: Any) -> list:
    """Return a data folder with features of another width, and a recipe with other options or, without any, none."""
    folder, features = copied(data, tmp_path), RegionFeatures(data / "regions.npz")
    images = [(i, features.regions(i)) for i in features.image_ids]
    recipe = {**features.recipe, "options": features.recipe["options"] | changes} if changes else None
    images = [(i, {**own, "features": own["features"][:, :width]}) for i, own in images]
    write_region_features(folder / "regions.npz", images, recipe=recipe)
    return ["--data", folder]


def of_another_recipe(data: Path, tmp_path: Path) -> list:
    torch.save(TimmBackbone("test_vit").model.state_dict(), tmp_path / "vit.pth")
    options = of_other_regions(data, tmp_path, grid="test_vit")
    return [*options, "--region-checkpoint", tmp_path / "vit.pth"]


def without_vocabulary(data: Path, tmp_path: Path) -> list:
    (copied(data, tmp_path) / "dict.txt").unlink()
    return ["--data", tmp_path / "data"]


def of_other_words(data: Path, tmp_path: Path) -> list:
    AttributeDetector(TimmBackbone("test_resnet", (64, 64)), ["quark", "gluon"]).save(tmp_path / "other.safetensors")
    return ["--detector", tmp_path / "other.safetensors"]


def another_vocabulary(data: Path, tmp_path: Path) -> list:
    with (copied(data, tmp_path) / "dict.txt").open("a") as file:
        file.write("quark 9\n")
    return ["--data", tmp_path / "data"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (of_other_task, r"--path: .*other\.pt is of the task translation, not captioning"),
        (["--path", "nowhere.pt"], r"--path: nowhere\.pt does not exist"),
        (["--path", __file__], r"test_caption_pictures\.py cannot be read as a fairseq checkpoint"),
        (of_other_regions, r"regions\.npz has no recipe.*caption extract --overwrite writes it"),
        (
            partial(of_other_regions, width=5, seed=0),
            r"the checkpoint has \d+ channels per region; those of .*regions\.npz have 5",
        ),
        (of_another_recipe, r"the regions have 64 channels, but those of .*regions\.npz \d+"),
        (without_vocabulary, r"the vocabulary .*dict\.txt does not exist: .*--data takes another folder"),
        (another_vocabulary, r"the checkpoint has \d+ words; the task's dictionary has \d+"),
        (["--data", "nowhere"], r"nowhere.* does not exist: .*--data takes another folder"),
        (["--detector", "nowhere.safetensors"], r"weights nowhere\.safetensors: no such file"),
        (of_other_words, "the detector's words, such as 'quark', are not in the vocabulary"),
        (["--region-checkpoint", "nowhere"], "--region-checkpoint: nowhere does not exist"),
        (["--layer", "3"], "--layer must be from 1 to 2, the model's blocks, or all, got 3"),
        (["--beam", "0"], "--beam must be at least 1, got 0"),
        (["--max-len", "0"], "--max-len must be at least 1, got 0"),
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


def test_a_model_of_attributes_needs_a_detector(captioned, tmp_path, capsys):
    path = str(captioned.parent / "semantic.pt")
    assert main(["caption", str(captioned / "images/000006.jpg"), "--path", path, "--out", str(tmp_path)]) == 2
    assert "--detector is needed: the fusion of --path" in capsys.readouterr().err
