"""``tools.caption splits``: a captioned set in parts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from attn_plugins.captioning.caption_files import Problems, read_splits
from tools.caption.__main__ import main
from tools.caption.lists import listed_images


def write(folder: Path, ids: list[Any], captions: list[Any]) -> Path:
    """Write captions of these images, and an empty picture of each."""
    (folder / "images").mkdir(parents=True)
    for i in ids:
        (folder / f"images/{i}.jpg").touch()
    images = [dict(id=i, file_name=f"{i}.jpg") for i in ids]
    rows = [dict(id=n, image_id=i, caption="a cat") for n, i in enumerate(captions)]
    (folder / "captions.json").write_text(json.dumps(dict(images=images, annotations=rows)))
    return folder


def parts(folder: Path) -> dict[Any, str]:
    return {row["cocoid"]: row["split"] for row in json.loads((folder / "splits.json").read_text())["images"]}


def test_shares_and_seeds(tmp_path, capsys):
    ids = list(range(10, 60))
    assert main(["splits", str(write(tmp_path / "one", ids, ids))]) == 0
    assert capsys.readouterr().out.endswith("splits.json: 40 train, 5 val, 5 test\n")
    assert main(["splits", str(write(tmp_path / "two", ids[::-1], ids * 2))]) == 0
    first = parts(tmp_path / "one")
    assert first == parts(tmp_path / "two")  # for any order and number of captions
    assert Counter(first.values()) == dict(train=40, val=5, test=5)
    assert main(["splits", str(tmp_path / "one")]) == 2
    assert "already exists: --overwrite replaces it" in capsys.readouterr().err
    assert main(["splits", str(tmp_path / "one"), "--overwrite", "--seed", "1", "--shares", ".6", ".4", "0"]) == 0
    second = parts(tmp_path / "one")
    assert Counter(second.values()) == dict(train=30, val=20)
    assert [i for i in ids if first[i] == "val"] != [i for i in ids if second[i] == "val"][:5]


@pytest.mark.parametrize("ids", [[1, 2, 3, 4], ["a b", "c", "d", "e"], ["1", "2", "3", "4"]])
def test_a_folder_of_pictures_and_captions_is_enough(tmp_path, ids, capsys):
    """An image without captions is left out."""
    folder = write(tmp_path / "set", ids, [*ids[1:], ids[2]])
    assert main(["splits", str(folder)]) == 0
    assert f"skipped: no caption for image {ids[0]}" in capsys.readouterr().err
    images = listed_images(folder / "images", folder / "splits.json")
    assert {image.id: image.path.name for image in images} == {i: f"{i}.jpg" for i in ids[1:]}
    captions = read_splits([folder / "captions.json"], folder / "splits.json", Problems(skip=False))
    assert captions.keys() == {"train", "val", "test"}
    assert {part: list(own) for part, own in captions.items()} == {image.part: [image.id] for image in images}


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ('{"images": [{"id": 7, "file_name": "x"}, {"id": "7", "file_name": "y"}]}', [], "image 7 is repeated"),
        ('{"images": [], "annotations": []}', [], "0 images are too few for the parts train val test"),
        ('{"images": [], "annotations": [{"image_id": 3, "caption": "a", "id": 8}]}', [], "caption 8 is of image 3"),
        ("", ["--shares", "0", "1", "1"], "--shares must be positive, that of TEST may be 0, got 0.0 1.0 1.0"),
        ("", ["--seed", "-1"], "--seed must be 0 or more, got -1"),
    ],
)
def test_bad_input_is_reported(tmp_path, content, options, message, capsys):
    (tmp_path / "captions.json").write_text(content)
    assert main(["splits", str(tmp_path), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("splits: ")
    assert message in error
    assert not (tmp_path / "splits.json").exists()
