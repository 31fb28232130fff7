"""Drawing of detections on annotated pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from tools.label_places import Rectangle, overlap, place
from tools.picture_sheet import MARGIN, justified, sheet
from tools.pictures import open_picture

Object = tuple[Rectangle, str]  # box and name
Known = dict[str, list[Object]]  # by the picture's file name
COLUMNS, LETTERS, LINE = 3, 22, 5
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
    """Return one line that counts the objects found and explains the colours."""
    pairs = [pair for marks in judged for pair in marks.pairs]
    hits = sum(name is not None for _, name in pairs)
    right = sum(one.name == name for one, name in pairs)
    missed = sum(len(marks.missed) for marks in judged)
    return (
        f"Found from a score of {threshold:g} on: {hits} of {hits + missed} objects. Green: {right} named right. "
        f"Red: {len(pairs) - right} wrong, with what it is in brackets. Dashed: {missed} missed."
    )


def _annotate(panel: Image.Image, judged: Judged, scale: float) -> None:
    """Draw boxes and labels on a picture magnified by ``scale``."""
    pen = ImageDraw.Draw(panel)
    frame = panel.size
    missed = [_scaled(box, scale, frame) for box in judged.missed]
    for box in missed:
        _dashed(pen, box)
    boxes, texts, colours = [], [], []
    for one, name in judged.pairs:
        boxes.append(_scaled(one.box, scale, frame))
        texts.append(f"{one.name} {one.score:.2f}" + ("" if one.name == name else f" ({name or 'nothing'})"))
        colours.append(RIGHT if one.name == name else WRONG)
    font = ImageFont.load_default(LETTERS)
    sizes = [(font.getlength(text) + 10, LETTERS + 8.0) for text in texts]
    for box, colour in zip(boxes, colours):
        pen.rectangle(box, outline=colour, width=LINE)
    for place_, text, colour in zip(place(boxes, sizes, frame, missed), texts, colours):
        pen.rectangle(place_, fill=colour)
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
