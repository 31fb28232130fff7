"""Pictures of the regions that each word of a caption attended to."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from tools.caption.page import WIDTH, Explanation, attended, grid_of, page
from tools.lettering import Lettering, lettering_for


def cells(rows: int, columns: int) -> np.ndarray:
    corner = np.array([(x / columns, y / rows) for y in range(rows) for x in range(columns)])
    size = np.array([1 / columns, 1 / rows])
    return np.concatenate([corner, corner + size], 1).astype(np.float32)


@pytest.mark.parametrize("size", [(70, 70), (90, 40), (31, 77)])
@pytest.mark.parametrize(("rows", "columns"), [(7, 7), (3, 5)])
def test_the_brightest_cell_is_the_strongest_region(size, rows, columns):
    draw = np.random.default_rng(0)
    boxes = draw.permutation(cells(rows, columns))
    order, grid = grid_of(boxes)
    assert grid == (rows, columns)
    weights = draw.permutation(np.arange(1, len(boxes) + 1)) / 1e3
    lit = np.asarray(attended(Image.new("RGB", size, "grey"), boxes, weights), float).sum(2)
    W, H = size
    means = []
    for x0, y0, x1, y1 in boxes:
        inside = [slice(int(np.ceil(low * n)) + 1, int(high * n) - 1) for low, high, n in ((y0, y1, H), (x0, x1, W))]
        means.append(lit[tuple(inside)].mean())
    assert np.argsort(means).tolist() == np.argsort(weights).tolist()


def test_a_detectors_boxes_are_outlined_by_their_weight():
    boxes = np.array([[0.1, 0.1, 0.4, 0.4], [0.5, 0.5, 0.9, 0.9], [0, 0, 1, 1], [1, 1, 1, 1]])
    assert grid_of(boxes) is None
    picture = Image.new("RGB", (100, 80), "grey")
    shown = np.asarray(attended(picture, boxes, np.array([0.2, 0.7, 0.06, 0.04])), int)
    yellow = shown[..., 0] - shown[..., 2]
    assert yellow[40, 60] == yellow.max() > yellow[8, 20] > yellow[0, 50] > 0
    assert shown[60, 70].tolist() == [128, 128, 128]  # within the strongest region, the picture is unchanged
    assert shown[20, 20].max() < 100


@pytest.mark.parametrize("size", [(1, 1), (2000, 3), (3, 2000), (640, 480)])
@pytest.mark.parametrize("parts", [("regions", "attributes", "visual_share"), ("regions",), ("attributes",), ()])
def test_a_page_of_any_size(size, parts):
    draw = np.random.default_rng(0)
    words = ["pneumono" * 12, "<unk>", *["a"] * 30]
    arrays = dict(
        regions=draw.dirichlet(np.ones(49), 32), attributes=draw.dirichlet(np.ones(3), 32), visual_share=draw.random(32)
    )
    shown = Explanation(
        " ".join(words), words, cells(7, 7), attribute_words=["x" * 99, "y", "z"], notes=["a note " * 80],
        **{name: arrays[name] for name in parts},
    )  # fmt: skip
    drawn = np.asarray(page(Image.new("RGB", size, "red"), shown))
    assert drawn.shape[1] == WIDTH
    assert (drawn[:, -20:] == 255).all()  # nothing extends over the margin
    assert (drawn[:, :20] == 255).all()
    assert (drawn[-10:] == 255).all()
    assert len(drawn) < 4000


@pytest.mark.parametrize("text", ["two zeros on the moon", "a " + "b" * 300 + " c", "  ", "Größe und Straße"])
def test_lines_are_no_wider_than_they_may_be(text):
    letters = lettering_for(text)
    lines = letters.wrapped(text, 20, 150)
    assert all(letters.length(line, 20) <= 150 for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    cut = letters.shortened(text, 20, 100)
    assert letters.length(cut, 20) <= 100
    assert cut == text or cut.endswith("...")
    assert len(letters.wrapped(text, 20, 60, 2)) <= 2


def test_letters_that_pillows_font_lacks_come_from_another():
    assert lettering_for("two zeros, 50 % <unk>").file is None
    other = lettering_for("Größe")
    assert other.file is not None
    font = Lettering(other.file).font(20)
    assert bytes(font.getmask("ß")) != bytes(font.getmask("\uffff"))
