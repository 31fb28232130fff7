"""Drawing of detections on annotated pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from tools.pictures import open_picture

Rectangle = tuple[float, float, float, float]  # left, top, right, bottom
Object = tuple[Rectangle, str]  # box and name
Known = dict[str, list[Object]]  # by the picture's file name
COLUMNS, LETTERS, LINE = 3, 22, 5
Place = tuple[int, int, int, int]  # left, top, width, height, relative to the margin
MARGIN, GAP = 16, 16
WIDTH = 1800 - 2 * MARGIN  # total width of the panels; the sheet is displayed 900 pixels wide
CAPTION, CAPTION_HEIGHT = 26, 52  # size of the font, and of its line
INK, PAPER = "#1a202c", "#ffffff"
RIGHT, WRONG, MISSED = "#15803d", "#c81e1e", "#ffffff"


@dataclass(frozen=True)
class Detection:
    """A box with the name and score of its class."""

    box: Rectangle
    name: str
    score: float


@dataclass(frozen=True)
class Judged:
    """Detections on a picture, and the objects missed."""

    pairs: list[tuple[Detection, str | None]]  # each detection with the name of the object that it matches, or None
    missed: list[Rectangle]  # boxes of the other objects


def known_objects(annotations: Path) -> Known:
    """Return the boxes and names of a COCO file, by the picture's file name."""
    content = json.loads(annotations.read_text(encoding="utf-8"))
    names = {category["id"]: category["name"] for category in content["categories"]}
    files = {image["id"]: image["file_name"] for image in content["images"]}
    objects: dict[str, list] = {file: [] for file in files.values()}
    for one in content["annotations"]:
        x, y, w, h = one["bbox"]
        objects[files[one["image_id"]]].append(((x, y, x + w, y + h), names[one["category_id"]]))
    return objects


def judge(detections: Sequence[Detection], objects: Sequence[Object]) -> Judged:
    """Match each detection, by falling score, with the object whose IoU with it is above one half."""
    free, pairs = list(objects), []
    for one in sorted(detections, key=lambda one: -one.score):
        shares = [_share(one.box, box) for box, _ in free]
        best = max(range(len(free)), key=shares.__getitem__, default=-1)
        pairs.append((one, free.pop(best)[1] if best >= 0 and shares[best] > 0.5 else None))
    return Judged(pairs, [box for box, _ in free])


def draw(
    files: Sequence[Path], detect: Callable[[Path], list[Detection]], objects: Known, threshold: float, out: Path
) -> str:
    """Save the pictures with the detections whose score is at least ``threshold``; return the caption below them."""
    judged = [
        judge([one for one in detect(file) if one.score >= threshold], objects.get(file.name, [])) for file in files
    ]
    caption = summary(judged, threshold)
    pictures = [open_picture(file) for file in files]
    places = justified([picture.size for picture in pictures], COLUMNS)
    page = sheet(places, caption)
    for picture, marks, (left, top, width, height) in zip(pictures, judged, places):
        scale = width / picture.width
        panel = picture.resize((width, height), Image.Resampling.BICUBIC)
        _annotate(panel, marks, scale)
        page.paste(panel, (MARGIN + left, MARGIN + top))
    page.save(out, optimize=True)
    return caption


def summary(judged: Sequence[Judged], threshold: float) -> str:
    """Return one line that counts the objects found and explains the colors."""
    pairs = [pair for marks in judged for pair in marks.pairs]
    hits = sum(name is not None for _, name in pairs)
    right = sum(one.name == name for one, name in pairs)
    missed = sum(len(marks.missed) for marks in judged)
    return (
        f"Found from a score of {threshold:g} on: {hits} of {hits + missed} objects. Green: {right} named right. "
        f"Red: {len(pairs) - right} wrong, with what it is in brackets. Dashed: {missed} missed."
    )


def place(
    boxes: Sequence[Rectangle],
    sizes: Sequence[tuple[float, float]],
    frame: tuple[float, float],
    others: Sequence[Rectangle] = (),
) -> list[Rectangle]:
    """Place a label inside the frame at each box, where it covers least of earlier labels, then of boxes.

    Args:
        boxes: Boxes to label, the most important first.
        sizes: Width and height of each label.
        frame: Width and height of the picture.
        others: Further boxes, without a label, that should stay visible.
    """
    taken: list[Rectangle] = []
    for (left, top, right, bottom), (width, height) in zip(boxes, sizes):
        columns, sides = (left, right - width, (left + right - width) / 2), (left - width, right)
        corners = [(x, y) for y in (top - height, bottom) for x in columns]
        corners += [(x, y) for x in sides for y in (top, bottom - height, top - height, bottom)]
        corners += [(x, y) for y in (top, bottom - height) for x in columns]
        corners = [(max(0.0, min(x, frame[0] - width)), max(0.0, min(y, frame[1] - height))) for x, y in corners]

        def covered(at: Rectangle) -> tuple[float, float]:
            return sum(overlap(at, one) for one in taken), sum(overlap(at, one) for one in (*boxes, *others))

        taken.append(min(((x, y, x + width, y + height) for x, y in corners), key=covered))
    return taken


def overlap(a: Rectangle, b: Rectangle) -> float:
    """Return the area of the intersection of two rectangles."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return max(width, 0) * max(height, 0)


def justified(sizes: Sequence[tuple[int, int]], columns: int, width: int = WIDTH, gap: int = GAP) -> list[Place]:
    """Place pictures in rows that all fill the width.

    Args:
        sizes: Width and height of each picture.
        columns: Pictures in a row.
        width: Width of the sheet.
        gap: Space between two pictures.

    Returns:
        The place of each picture. An incomplete row is as high as the row before it.
    """
    places: list[Place] = []
    top = height = 0
    for first in range(0, len(sizes), columns):
        row = sizes[first : first + columns]
        if len(row) == columns or not first:
            height = round((width - (len(row) - 1) * gap) / sum(w / h for w, h in row))
        left = 0
        for n, (w, h) in enumerate(row):
            last = n == len(row) - 1 == columns - 1
            across = width - left if last else round(height * w / h)
            places.append((left, top, across, height))
            left += across + gap
        top += height + gap
    return places


def sheet(places: Sequence[Place], caption: str) -> Image.Image:
    """Return a white sheet for panels at ``places``, with a margin and a line of ``caption`` below."""
    right, bottom = (max(place[side] + place[side + 2] for place in places) for side in (0, 1))
    picture = Image.new("RGB", (right + 2 * MARGIN, bottom + MARGIN + CAPTION_HEIGHT), PAPER)
    fonts = (ImageFont.load_default(size) for size in range(CAPTION, 11, -1))
    font = next((font for font in fonts if font.getlength(caption) <= right), ImageFont.load_default(12))
    while font.getlength(caption) > right:
        caption = caption[:-1]
    ImageDraw.Draw(picture).text((MARGIN, bottom + MARGIN + CAPTION_HEIGHT / 2), caption, INK, font, anchor="lm")
    return picture


def _annotate(panel: Image.Image, judged: Judged, scale: float) -> None:
    """Draw boxes and labels on a picture magnified by ``scale``."""
    pen = ImageDraw.Draw(panel)
    frame = panel.size
    missed = [_scaled(box, scale, frame) for box in judged.missed]
    for box in missed:
        _dashed(pen, box)
    boxes, texts, colors = [], [], []
    for one, name in judged.pairs:
        boxes.append(_scaled(one.box, scale, frame))
        texts.append(f"{one.name} {one.score:.2f}" + ("" if one.name == name else f" ({name or 'nothing'})"))
        colors.append(RIGHT if one.name == name else WRONG)
    font = ImageFont.load_default(LETTERS)
    sizes = [(font.getlength(text) + 10, LETTERS + 8.0) for text in texts]
    for box, color in zip(boxes, colors):
        pen.rectangle(box, outline=color, width=LINE)
    for place_, text, color in zip(place(boxes, sizes, frame, missed), texts, colors):
        pen.rectangle(place_, fill=color)
        middle = (place_[0] + place_[2]) / 2, (place_[1] + place_[3]) / 2
        pen.text(middle, text, "white", font, anchor="mm")


def _scaled(box: Rectangle, scale: float, frame: tuple[int, int]) -> Rectangle:
    left, top, right, bottom = (scale * side for side in box)
    return max(left, 0), max(top, 0), min(right, frame[0] - 1), min(bottom, frame[1] - 1)


def _dashed(pen: ImageDraw.ImageDraw, box: Rectangle, dash: int = 14) -> None:
    left, top, right, bottom = map(round, box)
    for x in range(left, right, 2 * dash):
        for y in (top, bottom):
            pen.line((x, y, min(x + dash, right), y), MISSED, LINE)
    for y in range(top, bottom, 2 * dash):
        for x in (left, right):
            pen.line((x, y, x, min(y + dash, bottom)), MISSED, LINE)


def _share(a: Rectangle, b: Rectangle) -> float:
    """Return intersection over union."""
    shared = overlap(a, b)
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b))
    return shared / (areas - shared) if shared else 0.0
