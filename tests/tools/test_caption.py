"""``tools.caption``: captions equal those of fairseq-generate, pictures of all kinds, several processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("fairseq")

from tests.fairseq.fairseq_helpers import fairseq
from tests.tools.caption_helpers import CAPTIONERS, FUSIONS, SHOWN, read, run
from tools import caption as tool
from tools.captioning.caption_picture import WIDTH
from tools.captioning.captioner import Captioner
from tools.pictures import BadPicture, open_picture

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", ["entangled", f"entangled:other:{':'.join(CAPTIONERS)}"])
def test_the_caption_is_that_of_fairseq_generate(path, captioned, tmp_path, capsys):
    names = [f"{i:06}" for i in range(6, 10)]
    assert run(captioned, tmp_path, *(captioned / f"images/{name}.jpg" for name in names), path=path) == 0
    printed = capsys.readouterr().out
    models = ":".join(str(captioned.parent / f"{name}.pt") for name in path.split(":"))
    options = ["--user-dir", "plugins/fairseq", "--task=captioning", "--gen-subset=test", "--path", models, "--beam=3"]
    options += ["--max-len-b=6", "--cpu", "--num-workers=0", "--max-attributes=4", "--batch-size=1"]
    fairseq("generate", captioned, *options, "--results-json", tmp_path / "expected.json")
    expected = {f"{row['image_id']:06}": row["caption"] for row in read(tmp_path / "expected.json")}
    found = read(tmp_path / "captions.json")
    assert {row["image_id"]: row["caption"] for row in found} == expected
    assert list(expected) == names
    assert len(set(expected.values())) > 1
    for row in found:
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
    assert len(printed.out.splitlines()) == len(good)
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


KILLED = """
import os, signal, sys
from tools import caption

whole, calls = caption.caption_picture, []
def killed(*arguments):
    calls.append(0)
    if len(calls) == 2 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*arguments)

caption.caption_picture = killed
sys.exit(caption.main(sys.argv[1:]))
"""


def torchrun(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def ended_at(last: str, whole: Any, captioner: Captioner, name: str, *given: Any) -> Any:
    if name == last:
        raise KeyboardInterrupt
    return whole(captioner, name, *given)


def contents(folder: Path) -> dict[str, Any]:
    """Return the contents of every file: the values of JSON files, and the pixels of pictures."""
    found: dict[str, Any] = {}
    for path in folder.iterdir():
        found[path.name] = read(path) if path.suffix == ".json" else Image.open(path).tobytes()
    return found


@pytest.mark.parametrize("interrupted", ["alone", pytest.param("killed", marks=pytest.mark.slow)])
def test_two_processes_after_an_interruption_write_what_one_writes(
    interrupted, captioned, tmp_path, capsys, monkeypatch
):
    (tmp_path / "killed.py").write_text(KILLED)
    shutil.copytree(captioned / "images", tmp_path / "images")
    (tmp_path / "images/000004.jpg").write_text("no picture")
    options = ["--path", captioned.parent / "visual.pt", "--device", "cpu", "--max-len", 6, "--beam", 1]
    out = tmp_path / "out"
    command = [tmp_path / "images", *options, "--out", out]
    if interrupted == "killed":
        assert torchrun(tmp_path / "killed.py", *command).returncode != 0
        assert len(list((out / ".captions.partial").glob("part-*"))) == 2
    else:
        whole = tool.caption_picture
        with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
            patched.setattr(tool, "caption_picture", lambda *given: ended_at("000006", whole, *given))
            tool.main(list(map(str, command)))
    assert not (out / "captions.json").exists()
    shutil.copytree(out, tmp_path / "alone")

    assert tool.main([*map(str, command), "--max-len", "7"]) == 2
    assert "interrupted run with max_len = 6, not 7: --restart discards it" in capsys.readouterr().err
    ended = torchrun("-m", "tools.caption", *command)
    assert ended.returncode == 1, ended.stderr
    assert "resuming after " in ended.stdout
    assert f"{out / 'captions.json'}: 8 captions, 1 pictures skipped" in ended.stdout
    assert ended.stderr.count("000004.jpg: cannot be read as a picture") == 1

    assert tool.main(list(map(str, [tmp_path / "images", *options, "--out", tmp_path / "one"]))) == 1
    assert "resuming" not in capsys.readouterr().out
    expected = contents(tmp_path / "one")
    assert len(expected) == 17
    assert contents(out) == expected
    assert (out / "captions.json").read_bytes() == (tmp_path / "one/captions.json").read_bytes()
    assert tool.main(list(map(str, [tmp_path / "images", *options, "--out", tmp_path / "alone"]))) == 1
    assert "resuming after " in capsys.readouterr().out
    assert contents(tmp_path / "alone") == expected
