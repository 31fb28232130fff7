"""Pictures of detections: correct, wrong and missed ones, and the caption below."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image, ImageColor

from tools import detections_picture
from tools.detections_picture import (
    CAPTION_HEIGHT,
    GAP,
    MARGIN,
    RIGHT,
    WIDTH,
    WRONG,
    Detection,
    draw,
    judge,
    justified,
    known_objects,
    overlap,
    place,
)  # fmt: skip

CAT, DOG = ((10, 10, 40, 50), "cat"), ((60, 20, 90, 70), "dog")


def test_each_detection_has_the_object_it_lies_on():
    sure, second = Detection((11, 9, 40, 50), "cat", 0.9), Detection((10, 12, 42, 52), "dog", 0.6)
    apart, wrong = Detection((0, 60, 20, 80), "dog", 0.5), Detection((60, 22, 88, 70), "cat", 0.3)
    judged = judge([wrong, second, sure, apart], [CAT, DOG, ((2, 2, 4, 4), "ant")])
    assert judged.pairs == [(sure, "cat"), (second, None), (apart, None), (wrong, "dog")]
    assert judged.missed == [(2, 2, 4, 4)]
    assert judge([], []).pairs == []


def test_objects_of_a_coco_file(tmp_path):
    content = dict(
        images=[dict(id=3, file_name="a.png"), dict(id=4, file_name="b.png")],
        categories=[dict(id=1, name="cat")],
        annotations=[dict(image_id=3, category_id=1, bbox=[10, 10, 30, 40])],
    )
    (tmp_path / "val.json").write_text(json.dumps(content))
    assert known_objects(tmp_path / "val.json") == {"a.png": [CAT], "b.png": []}


def test_a_picture_of_right_wrong_and_missed(tmp_path, monkeypatch):
    file = tmp_path / "a.png"
    Image.new("RGB", (100, 80), "#808080").save(file)
    detections = [Detection(CAT[0], "cat", 0.8), Detection(DOG[0], "cat", 0.5), Detection((0, 0, 9, 9), "dog", 0.2)]
    texts = []
    pen = detections_picture.ImageDraw.ImageDraw
    write = pen.text
    monkeypatch.setattr(pen, "text", lambda self, at, text, *rest, **more: texts.append(text) or write(
        self, at, text, *rest, **more
    ))  # fmt: skip
    objects = {"a.png": [CAT, DOG, ((92, 2, 98, 78), "ant")]}
    line = draw([file], lambda _: detections, objects, 0.3, tmp_path / "out.png")
    assert line == (
        "Found from a score of 0.3 on: 2 of 3 objects. Green: 1 named right. "
        "Red: 1 wrong, with what it is in brackets. Dashed: 1 missed."
    )
    assert texts == [line, "cat 0.80", "cat 0.50 (dog)"]
    pixels = np.asarray(Image.open(tmp_path / "out.png"))
    for color in (RIGHT, WRONG):
        assert (pixels == ImageColor.getrgb(color)).all(-1).sum() > 1000


@pytest.mark.parametrize("number", [1, 3, 4, 6])
def test_rows_fill_the_width(number):
    sizes = [(208, 144), (208, 173), (300, 200), (144, 208), (208, 144), (100, 100)][:number]
    places = justified(sizes, 3)
    for (width, height), (left, _, across, along) in zip(sizes, places):
        assert across / along == pytest.approx(width / height, rel=0.02)
        assert left >= 0
        assert left + across <= WIDTH
    if number >= 3:
        assert places[2][0] + places[2][2] == WIDTH
        assert len({place[1] for place in places[:3]}) == len({place[3] for place in places[:3]}) == 1
    if number == 4:
        assert places[3][:2] == (0, places[0][3] + GAP)
        assert places[3][3] == places[0][3]


def test_a_long_line_fits(tmp_path):
    page = detections_picture.sheet([(0, 0, 300, 100)], "word " * 200)
    assert page.size == (300 + 2 * MARGIN, 100 + MARGIN + CAPTION_HEIGHT)
    pixels = np.asarray(page.convert("L"))
    assert (pixels[:, -MARGIN:] == 255).all()


def test_labels_stay_inside_and_cover_little():
    frame, size = (200, 100), [(40, 10)]
    assert place([(50, 40, 80, 70)], size, frame) == [(50, 30, 90, 40)]  # above
    assert place([(50, 4, 80, 70)], size, frame) == [(50, 70, 90, 80)]  # below, as there is no room above
    assert place([(170, 40, 195, 70)], size, frame) == [(160, 30, 200, 40)]  # above, moved into the frame
    above = (50, 20, 90, 39)
    [label] = place([(50, 40, 80, 70)], size, frame, others=[above])
    assert not overlap(label, above)
    first, second = place([(50, 40, 80, 70), (60, 40, 90, 70)], size * 2, frame)
    assert not overlap(first, second)
    assert place([(0, 0, 30, 30)], [(60, 30)], (40, 30)) == [(0, 0, 60, 30)]  # wider than the frame
