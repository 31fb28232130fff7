"""Conversion of the published layouts of HELEN and LFW-PL to mmseg's: made-up faces, and malformed folders."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from tests.mm.made_up_faces import HELEN, SPLIT_OF
from tools.datasets import face_parsing as tool


def test_helen_is_split_as_published_and_the_most_probable_label_wins(helen, tmp_path):
    source, truth = helen
    name = "11564757_2"
    maps = [source / f"labels/{name}/{name}_lbl{n:02d}.png" for n in range(11)]
    edited = np.stack([np.asarray(Image.open(path)) for path in maps])
    edited[:, 0, 0] = 0  # no label at all means background
    edited[:, 0, 1] = 7
    edited[[3, 6], 0, 1] = 128  # ties take the first label
    for path, pixels in zip(maps, edited):
        Image.fromarray(pixels).save(path)
    truth[name][0, :2] = 0, 3

    assert tool.build("helen", source, tmp_path / "out") == {"train": 2, "val": 1, "test": 1}
    split_of = {name: SPLIT_OF[file] for file, names in HELEN.items() for name in names}
    for name, split in split_of.items():
        labels = Image.open(tmp_path / f"out/labels/{split}/{name}.png")
        assert labels.mode == "P"
        assert np.array_equal(labels, truth[name])
        copied = tmp_path / f"out/images/{split}/{name}.jpg"
        assert copied.read_bytes() == (source / f"images/{name}.jpg").read_bytes()


def test_lfw_pl_is_split_as_published_and_its_colors_become_labels(lfw, tmp_path):
    source, truth = lfw
    assert tool.build("lfw_pl", source, tmp_path / "out") == {"train": 2, "val": 1, "test": 1}
    for name, split in (
        ("Aaron_Eckhart_0001", "train"),
        ("Jean-Pierre_Bemba_0013", "train"),
        ("Aaron_Eckhart_0002", "val"),
        ("Zico_0003", "test"),
    ):
        assert np.array_equal(Image.open(tmp_path / f"out/labels/{split}/{name}.png"), truth[name])
        assert (tmp_path / f"out/images/{split}/{name}.jpg").is_file()
        assert set(np.unique(truth[name])) == {0, 1, 2}


def remove(name):
    return lambda source: (source / name).rename(source / f"{name}.away")


def write(name, text):
    return lambda source: (source / name).write_text(text)


def change_image(name, change):
    def apply(source):
        change(Image.open(source / name)).save(source / name)

    return apply


def narrower(image):
    return image.crop((0, 0, image.width - 1, image.height))


def one_white_pixel(image):
    image.putpixel((5, 3), (255, 255, 255))
    return image


FIRST = "labels/100032540_1/100032540_1_lbl"
ZICO = "parts_lfw_funneled_gt_images/Zico_0003.ppm"


@pytest.mark.parametrize(
    "kind, spoil, message",
    [
        ("helen", remove("tuning.txt"), r"lacks tuning.txt: name the folder"),
        ("helen", remove("labels/100032540_1"), r"11 listed files are missing: .*_lbl02.png and 8 more"),
        ("helen", write("tuning.txt", "1 11564757_2\n"), r"tuning.txt, line 1: expected one like '1 , 1000"),
        ("helen", write("tuning.txt", "\n"), r"tuning.txt lists no face"),
        ("helen", write("testing.txt", "1 , 11564757_2\n"), r"twice: tuning.txt, line 1 and testing.txt, line 1"),
        ("helen", change_image(f"{FIRST}04.png", narrower), r"100032540_1: the maps of a face must have the same"),
        ("helen", change_image("images/100032540_1.jpg", narrower), r"has 48x63 pixels, its labels .* 48x64"),
        ("helen", change_image(f"{FIRST}04.png", lambda i: i.convert("RGB")), r"must be an 8-bit L image, got RGB"),
        ("helen", write(f"{FIRST}04.png", "not an image"), r"_lbl04.png cannot be read as an image"),
        ("helen", write("images/11564757_2.jpg", "not an image"), r"11564757_2.jpg cannot be read as a JPEG image"),
        ("lfw_pl", change_image(ZICO, one_white_pixel), r"\(255, 255, 255\) at row 3, column 5"),
    ],
)
def test_a_folder_that_is_not_as_published_is_named_and_leaves_nothing(kind, spoil, message, request, tmp_path):
    source, _ = request.getfixturevalue("helen" if kind == "helen" else "lfw")
    spoil(source)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=message):
        tool.build(kind, source, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_command_line_spares_what_stands_there(lfw, tmp_path, capsys):
    (tmp_path / "out").mkdir()  # an empty folder counts as missing
    arguments = ["lfw_pl", str(lfw[0]), str(tmp_path / "out")]
    assert tool.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "parts_train.txt lists 2 faces, the published one 1500" in shown
    assert f"2 train, 1 val, 1 test faces in {tmp_path / 'out'}" in shown
    kept = sorted((tmp_path / "out").rglob("*"))
    for wrong, message in (
        (arguments, "exists already; remove it or name another folder"),
        (["helen", arguments[1], str(tmp_path / "new")], "lacks exemplars.txt, tuning.txt, testing.txt, images/"),
    ):
        with pytest.raises(SystemExit) as stop:
            tool.main(wrong)
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
    assert sorted((tmp_path / "out").rglob("*")) == kept
