"""Captioned scenes: every caption is parsed and checked against the objects in its picture."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from tools.datasets import captioned_scenes as tool
from tools.datasets.scene_captions import BACKGROUNDS, DIGITS, NOUNS
from tools.datasets.scene_pictures import COLOURS, Painter

RECIPE = tool.Recipe(train=80, val=15, test=15, size=96, seed=5)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes") / "set"
    assert tool.build(folder, RECIPE)
    return folder


def load(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


# An independent definition of what the words mean.

NUMBERS = dict(a=1, an=1, two=2, three=3, four=4, five=5, six=6)
KIND = {name: (kind, n) for kind, names in NOUNS.items() for pair in names for n, name in enumerate(pair)}
RELATIONS = {
    "above": "above", "over": "above", "below": "below", "under": "below", "beneath": "below", "left of": "left",
    "to the left of": "left", "right of": "right", "to the right of": "right", "next to": "near", "beside": "near",
}  # fmt: skip
CORNER, SIDE = "in the (?:top|bottom) (?:left|right) corner", "at the (?:top|bottom)|on the (?:left|right)"
PLACE = f"in the middle|in the centre|{CORNER}|{SIDE}"


def one_of(words):
    return "|".join(sorted(map(re.escape, words), key=len, reverse=True))


PHOTOGRAPH = (
    rf"a (?:photograph|photo|picture) of (?P<name>{one_of(n for names in BACKGROUNDS.values() for n in names)})"
)
SURFACE = one_of(name for surface in ("bricks", "grass", "gravel", "moon") for name in BACKGROUNDS[surface])
OBJECTS = re.compile(
    rf"(?P<number>{one_of(NUMBERS)}) (?:(?P<size>small|little|large|big) )?(?:(?P<colour>{one_of(COLOURS)}) )?"
    rf"(?:handwritten )?(?P<noun>{one_of(KIND)}|digits|numbers)(?: (?P<place>{PLACE}))?(?: |$)"
)


@dataclass
class Picture:
    side: int
    background: str
    objects: list[dict]  # kind, colour, box (left, top, right, bottom)


class Untrue(AssertionError):
    pass


def hold(condition, what):
    if not condition:
        raise Untrue(what)


def mentioned(picture: Picture, words: re.Match) -> list[dict]:
    """Return the objects that a noun phrase describes, after checking its number, size and position."""
    number, colour, noun = NUMBERS[words["number"]], words["colour"], words["noun"]
    if noun in ("digits", "numbers"):
        matching = [o for o in picture.objects if o["kind"] in DIGITS]
        hold(not colour or all(o["colour"] == colour for o in matching), f"all digits are {colour}")
    else:
        kind, plural = KIND[noun]
        hold(plural == (number > 1), f"{number} {noun}")
        matching = [o for o in picture.objects if o["kind"] == kind and colour in (None, o["colour"])]
    hold(len(matching) == number, f"{len(matching)}, not {number} {colour or ''} {noun}")
    first = (words["size"] or colour or ("handwritten" if "handwritten" in words[0] else noun)).replace("one", "won")
    hold(words["number"] not in ("a", "an") or (words["number"] == "an") == (first[0] in "aeiou"), "a or an")
    sides = [max(o["box"][2] - o["box"][0], o["box"][3] - o["box"][1]) / picture.side for o in matching]
    hold(words["size"] not in ("small", "little") or max(sides) < 0.23, f"small {noun}")
    hold(words["size"] not in ("large", "big") or min(sides) > 0.29, f"large {noun}")
    for left, top, right, bottom in (o["box"] for o in matching) if words["place"] else ():
        x, y = (left + right) / 2 / picture.side, (top + bottom) / 2 / picture.side
        place = words["place"].split()
        hold("left" not in place or x < 0.4, "left")
        hold("right" not in place or x > 0.6, "right")
        hold("top" not in place or y < 0.4, "top")
        hold("bottom" not in place or y > 0.6, "bottom")
        hold(place[-1] not in ("middle", "centre") or (0.3 < x < 0.7 and 0.3 < y < 0.7), "middle")
    return matching


def edges(objects):
    left, top, right, bottom = zip(*(o["box"] for o in objects))
    return min(left), min(top), max(right), max(bottom)


def related(one, other, side) -> set[str]:
    """Return the true relations of two objects: apart in a direction, and further than across it."""
    a, b = edges(one), edges(other)
    x, y = abs(a[0] + a[2] - b[0] - b[2]), abs(a[1] + a[3] - b[1] - b[3])
    true = {"above"} if a[3] <= b[1] and y >= x else set()
    true |= {"below"} if b[3] <= a[1] and y >= x else set()
    true |= {"left"} if a[2] <= b[0] and x >= y else set()
    true |= {"right"} if b[2] <= a[0] and x >= y else set()
    close = max(a[0] - b[2], b[0] - a[2]) <= 0.21 * side
    level = a[1] < b[3] and b[1] < a[3]
    return true | ({"near"} if true & {"left", "right"} and close and level else set())


def check(picture: Picture, caption: str) -> tuple[set[int], bool]:
    """Return the objects that a caption mentions and whether it names the background; raise Untrue if it is false."""
    rest, name = caption, None
    if match := re.match(rf"{PHOTOGRAPH} with ", rest):
        rest, name = rest[match.end() :], match["name"]
    else:
        match = re.search(rf" (?:(?:on|of) {PHOTOGRAPH}|on (?P<surface>{SURFACE}))$", rest)
        if match:
            rest, name = rest[: match.start()], match["name"] or match["surface"]
    hold(name is None or name in BACKGROUNDS[picture.background], f"{name} on {picture.background}")
    verb = re.match("there (is|are) ", rest)
    rest = rest[verb.end() :] if verb else rest

    spoken, links = [], []
    while True:
        words = OBJECTS.match(rest)
        assert words, f"cannot parse {rest!r} of {caption!r}"
        if verb and not spoken:
            hold((verb[1] == "is") == (words["number"] in ("a", "an")), "is or are")
        spoken.append(mentioned(picture, words))
        rest = rest[words.end() :]
        if not rest:
            break
        link = re.match(rf"({one_of([*RELATIONS, 'and', 'with', 'between'])}) ", rest)
        assert link, f"cannot parse {rest!r} of {caption!r}"
        links.append(link[1])
        rest = rest[link.end() :]
    for n, link in enumerate(links):
        if link in RELATIONS:
            hold(RELATIONS[link] in related(spoken[n], spoken[n + 1], picture.side), link)
        if link == "between":
            assert links[n + 1] == "and"
            one = related(spoken[n], spoken[n + 1], picture.side) - {"near"}
            hold(one & related(spoken[n + 2], spoken[n], picture.side), "between")
    return {id(o) for objects in spoken for o in objects}, name is not None


def pictures(folder) -> dict[int, tuple[Picture, list[str]]]:
    """Return the objects of each picture, and its captions."""
    content = load(folder, "annotations/objects")
    kinds = {category["id"]: category["name"] for category in content["categories"]}
    pictures = {i["id"]: (Picture(i["width"], i["background"], []), []) for i in content["images"]}
    for row in content["annotations"]:
        x, y, width, height = row["bbox"]
        box = (x, y, x + width, y + height)
        pictures[row["image_id"]][0].objects.append(dict(kind=kinds[row["category_id"]], colour=row["colour"], box=box))
    for row in load(folder, "captions")["annotations"]:
        pictures[row["image_id"]][1].append(row["caption"])
    return pictures


def test_every_caption_is_true(scenes):
    vocabulary = set()
    for picture, captions in pictures(scenes).values():
        assert len(set(captions)) == 5
        for n, caption in enumerate(captions):
            assert re.fullmatch("[a-z]+( [a-z]+)*", caption)
            spoken, background = check(picture, caption)
            if n < 2:
                assert len(spoken) == len(picture.objects), caption
                assert background
            vocabulary |= set(caption.split())
    assert len(vocabulary) > 90


def test_the_files_agree_and_coco_s_own_reader_takes_them(scenes, capsys):
    objects, captions = COCO(scenes / "annotations/objects.json"), COCO(scenes / "captions.json")
    split = load(scenes, "splits")
    assert len(objects.getImgIds()) == len(captions.getImgIds()) == len(split["images"]) == 110
    assert {c["name"] for c in objects.loadCats(objects.getCatIds())} == set(NOUNS)
    seen, right = set(), []
    for image in split["images"]:
        number = image["cocoid"]
        row = captions.loadImgs(number)[0]
        assert row["file_name"] == image["filename"]
        assert [s["raw"] for s in image["sentences"]] == [a["caption"] for a in captions.imgToAnns[number]]
        assert [s["sentid"] for s in image["sentences"]] == image["sentids"]
        assert all(s["tokens"] == s["raw"].split() for s in image["sentences"])
        with Image.open(scenes / "images" / row["file_name"]) as picture:
            assert (picture.size, picture.mode, picture.format) == ((96, 96), "RGB", "JPEG")
            pixels = np.asarray(picture, float)
        covered = np.zeros((96, 96), int)
        for annotation in objects.imgToAnns[number]:
            mask = objects.annToMask(annotation)
            rows, columns = np.nonzero(mask)
            x, y, width, height = annotation["bbox"]
            assert (x, y, x + width, y + height) == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
            assert annotation["area"] == mask.sum() > 40
            covered += mask
            seen.add(annotation["category_id"])
            if annotation["colour"]:
                distances = np.linalg.norm(np.median(pixels[mask > 0], 0) - list(COLOURS.values()), axis=1)
                right.append(list(COLOURS)[distances.argmin()] == annotation["colour"])
        assert covered.max() == 1  # nothing is hidden
    assert len(seen) == len(NOUNS)
    assert len(right) > 100
    assert np.mean(right) > 0.95  # thin strokes lose some colour in the JPEG
    for part, count in (("train", 80), ("val", 15), ("test", 15)):
        chosen = {image["cocoid"] for image in split["images"] if image["split"] == part}
        content = load(scenes, f"annotations/objects_{part}")
        assert {image["id"] for image in content["images"]} == chosen
        assert len(chosen) == count
        assert {a["image_id"] for a in content["annotations"]} == chosen


def test_no_handwritten_digit_is_in_two_parts(monkeypatch, tmp_path):
    given = []

    class Seen(Painter):
        def __init__(self, rng, side, samples, targets):
            given.append(samples.reshape(len(samples), -1))
            super().__init__(rng, side, samples, targets)

    monkeypatch.setattr(tool, "Painter", Seen)
    tool.build(tmp_path / "set", tool.Recipe(train=1, val=1, test=1, size=64))
    whole = tool.digit_samples()[0].reshape(1797, -1)
    assert [round(len(samples) / 1797, 1) for samples in given] == [0.6, 0.2, 0.2]
    assert np.array_equal(np.sort(np.concatenate(given), 0), np.sort(whole, 0))
