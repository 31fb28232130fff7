"""The digits-on-photographs set: contents, reproducibility, and protection of other files."""

from __future__ import annotations

import json

import numpy as np
import pytest
from mmdet.datasets import CocoDataset
from PIL import Image

from tools.datasets import digits_on_photographs as tool


def test_mmdet_reads_it_and_boxes_masks_and_semantics_agree(digits):
    data = CocoDataset(
        data_root=str(digits),
        ann_file="annotations/train.json",
        data_prefix=dict(img="train/"),
        metainfo=dict(classes=tool.CLASSES),
        pipeline=[dict(type="LoadImageFromFile"), dict(type="mmdet.LoadAnnotations", with_bbox=True, with_mask=True)],
    )
    assert len(data) == 16
    seen = set()
    for sample in data:
        height, width = sample["img"].shape[:2]
        assert height != width
        name = sample["img_path"].rsplit("/", 1)[1]
        semantic = np.asarray(Image.open(digits / "semantic/train" / name))
        assert semantic.shape == (height, width)
        union = np.zeros((height, width), bool)
        for box, mask, label in zip(sample["gt_bboxes"].numpy(), sample["gt_masks"].masks, sample["gt_bboxes_labels"]):
            rows, columns = np.nonzero(mask)
            assert box.tolist() == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert (semantic[mask > 0] == label + 1).all()
            assert not (union & (mask > 0)).any()
            union |= mask > 0
            seen.add(int(label))
        assert (semantic[~union] == 0).all()
    assert len(seen) == 10


def test_all_digits_as_one_class(digits):
    """As the transformers' configs read them: names alone differ."""
    for part in ("train", "val"):
        ten, one = (json.loads((digits / f"annotations/{n}{part}.json").read_text()) for n in ("", "one_class_"))
        assert one["categories"] == [{"id": 1, "name": "digit"}]
        assert one["images"] == ten["images"]
        assert one["annotations"] == [{**each, "category_id": 1} for each in ten["annotations"]]
        assert len({each["category_id"] for each in ten["annotations"]}) > 1


def test_train_and_val_share_no_digit_and_no_pixel(monkeypatch, tmp_path):
    given = []
    real = tool.compose

    def compose(rng, regions, samples, targets, recipe):
        given.append((regions, samples))
        return real(rng, regions, samples, targets, recipe)

    pictures = [np.stack([np.arange(300 * 400).reshape(300, 400) % 251] * 3, -1).astype(np.uint8)]
    monkeypatch.setattr(tool, "photographs", lambda: pictures)
    monkeypatch.setattr(tool, "compose", compose)
    tool.build(tmp_path / "set", tool.Recipe(train=1, val=1))
    (train_regions, train_samples), (val_regions, val_samples) = given
    assert len(train_samples) + len(val_samples) == 1797
    whole, _ = tool.digit_samples()
    both = np.concatenate([train_samples, val_samples]).reshape(1797, -1)
    assert np.array_equal(np.sort(both, 0), np.sort(whole.reshape(1797, -1), 0))  # a partition of all samples
    assert not np.shares_memory(train_regions[0], val_regions[0][:, 1:])
    assert train_regions[0].shape[1] + val_regions[0].shape[1] < 400


def test_sides_and_chosen_digits(monkeypatch, tmp_path):
    sides = []
    real = tool.draw_digit
    monkeypatch.setattr(tool, "draw_digit", lambda rng, sample, side: sides.append(side) or real(rng, sample, side))
    assert tool.build(tmp_path / "set", tool.Recipe(train=24, val=8, seed=3, sides=(14, 100), digits=(1, 7)))
    recipe = json.loads((tmp_path / "set/recipe.json").read_text())
    assert recipe == {"train": 24, "val": 8, "seed": 3, "version": 1, "sides": [14, 100], "digits": [1, 7]}
    sides = np.array(sides)
    assert sides.min() >= 14
    assert 80 < sides.max() <= 100
    octaves = [((sides >= low) & (sides < 2 * low)).sum() for low in (14, 28)]  # equally many in both
    assert 0.5 < octaves[0] / octaves[1] < 2
    for part, count in (("train", 24), ("val", 8)):
        content = json.loads((tmp_path / f"set/annotations/{part}.json").read_text())
        assert [one["name"] for one in content["categories"]] == list(tool.CLASSES)
        assert {one["category_id"] for one in content["annotations"]} == {2, 8}
        assert {one["image_id"] for one in content["annotations"]} == set(range(count))  # no image is empty
    for wrong in ((), (3, 10)):
        with pytest.raises(ValueError, match="digits must be between 0 and 9, got"):
            tool.Recipe(digits=wrong)


def test_the_largest_digit_fits_every_image():
    rng = np.random.default_rng(0)
    for _ in range(20):
        opacity = tool.draw_digit(rng, np.ones((8, 8)), tool.LARGEST)
        assert max(opacity.shape) <= min(min(size) for size in tool.SIZES)


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        tool.main(arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_a_recipe_determines_the_bytes_and_other_files_are_kept(tmp_path, capsys):
    small = ["--train", "2", "--val", "1"]
    for folder, seed, state in (
        ("one", 3, "written to"),
        ("two", 3, "written to"),
        ("one", 3, "already in"),
        ("four", 4, "written to"),
    ):
        assert tool.main([str(tmp_path / folder), *small, "--seed", str(seed)]) == 0
        said = f"2 training and 1 validation images {state} {tmp_path / folder}"
        assert capsys.readouterr().out.splitlines()[-1] == said
    before = files(tmp_path / "one")
    assert files(tmp_path / "two") == before
    assert files(tmp_path / "four")["semantic/train/000001.png"] != before["semantic/train/000001.png"]
    assert "holds a set of another recipe" in refusal([str(tmp_path / "one"), *small, "--seed", "4"], capsys)
    assert files(tmp_path / "one") == before
    (tmp_path / "two/recipe.json").unlink()
    assert "exists already; remove it" in refusal([str(tmp_path / "two"), *small], capsys)
    assert len(files(tmp_path / "two")) == len(before) - 1
    for options, message in (
        ("--train 0", "train must be at least 1, got 0"),
        ("--sides 9 40", "sides must be two rising numbers from 10 to 100 pixels, got (9, 40)"),
        ("--sides 40 20", "sides must be two rising numbers from 10 to 100 pixels, got (40, 20)"),
    ):
        shown = refusal([str(tmp_path / "set"), *options.split()], capsys)
        assert shown == f"digits_on_photographs: {message}\n"
    assert not (tmp_path / "set").exists()
