"""Pictures of scenes: cut-outs of packaged photographs and coloured handwritten digits on crops of photographs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image, ImageDraw

from tools.datasets.pasting import DIGITS, draw_digit, free_place, paste, photograph
from tools.datasets.scene_captions import BACKGROUNDS, NOUNS, Box, Group, Scene

COLOURS = {
    "red": (215, 25, 30),
    "orange": (250, 135, 15),
    "yellow": (250, 225, 30),
    "green": (35, 160, 60),
    "blue": (35, 75, 215),
    "purple": (130, 40, 165),
    "pink": (250, 135, 195),
    "white": (248, 248, 248),
    "black": (15, 15, 15),
}
SHADE = 12  # maximum deviation of a colour's channels from these
MIN_CONTRAST = 80.0  # between an object's colour and what is below it, as a distance in RGB,
CONTRASTING = 0.8  # at this share of its pixels
COUNTS = (0.55, 0.27, 0.13, 0.05)  # probability of 1, 2, 3, 4 objects in a group
GROUPS = (0.2, 0.5, 0.3)  # probability of 1, 2, 3 groups in a scene
MOST = 6  # objects in a scene
SIDES = {"small": (0.15, 0.2), "middling": (0.23, 0.28), "large": (0.31, 0.42)}  # longer side, relative to the picture
ATTEMPTS = 8  # to find a place with enough contrast


@dataclass(frozen=True)
class Ground:
    """Source of a background."""

    photograph: str  # its name in :func:`tools.datasets.pasting.photograph`
    # Centre of the subject, relative to width and height, which crops keep near their middle; None if the subject fills
    # the photograph.
    focus: tuple[float, float] | None = None
    share: tuple[float, float] = (0.8, 1.0)  # range of a crop's side, relative to the photograph's shorter side


CLOSE = (0.3, 0.9)
GROUNDS = {
    "pagoda": Ground("china", (0.34, 0.5)),
    "flower": Ground("flower", (0.48, 0.5)),
    "astronaut": Ground("astronaut", (0.42, 0.4)),
    "cat": Ground("chelsea", (0.48, 0.5)),
    "cup": Ground("coffee", (0.45, 0.5)),
    "rocket": Ground("rocket", (0.5, 0.6)),
    "photographer": Ground("camera", (0.4, 0.4)),
    "coin": Ground("coins", share=(0.5, 1.0)),
    "bricks": Ground("brick", share=CLOSE),
    "grass": Ground("grass", share=CLOSE),
    "gravel": Ground("gravel", share=CLOSE),
    "moon": Ground("moon", share=(0.6, 1.0)),
    "galaxies": Ground("hubble_deep_field", share=CLOSE),
    "motorcycle": Ground("motorcycle", (0.5, 0.5), (0.9, 1.0)),
}
assert GROUNDS.keys() == BACKGROUNDS.keys()

# Kind of object: photograph, and boxes whose inscribed ellipses are cut out (left, top, right, bottom).
CUT_OUTS: dict[str, tuple[str, tuple[tuple[int, int, int, int], ...]]] = {
    "cat": ("chelsea", ((70, 10, 360, 295),)),
    "astronaut": ("astronaut", ((20, 0, 370, 512),)),
    "cup": ("coffee", ((70, 15, 485, 392),)),
    "flower": ("flower", ((168, 80, 448, 360),)),
    "motorcycle": ("motorcycle", ((40, 40, 690, 430),)),
    "coin": (
        "coins",
        ((315, 156, 380, 218), (305, 16, 365, 72), (18, 233, 75, 288), (144, 236, 201, 288), (245, 95, 296, 144)),
    ),
}
assert {*CUT_OUTS, *DIGITS, "horse"} == NOUNS.keys()


def crop(rng: np.random.Generator, ground: Ground, side: int) -> np.ndarray:
    """Return a square crop that shows the background's subject, (side, side, 3) float in 0..255."""
    picture = photograph(ground.photograph)
    extent = int(min(picture.shape[:2]) * rng.uniform(*ground.share))
    corner = []
    for axis in (0, 1):
        most = picture.shape[axis] - extent
        if ground.focus is None:
            corner.append(int(rng.integers(most + 1)))
        else:
            wanted = ground.focus[1 - axis] * picture.shape[axis] - extent * rng.uniform(0.35, 0.65)
            corner.append(int(min(max(wanted, 0), most)))
    part = picture[corner[0] : corner[0] + extent, corner[1] : corner[1] + extent]
    small = Image.fromarray(np.ascontiguousarray(part)).resize((side, side), Image.Resampling.BOX)
    pixels = np.asarray(small, float) * rng.uniform(0.85, 1.1)
    return (pixels[:, ::-1] if rng.random() < 0.5 else pixels).clip(0, 255)


def scaled(picture: Image.Image, longer: int) -> Image.Image:
    factor = longer / max(picture.size)
    size = tuple(max(1, round(n * factor)) for n in picture.size)
    return picture.resize(size, Image.Resampling.BOX)


def cut_out(rng: np.random.Generator, kind: str, longer: int) -> tuple[np.ndarray, np.ndarray]:
    """Return opacity (H, W) in 0..1 and pixels (H, W, 3) of a cut-out whose longer side has ``longer`` pixels."""
    name, boxes = CUT_OUTS[kind]
    whole = Image.fromarray(photograph(name)).crop(boxes[rng.integers(len(boxes))])
    mask = Image.new("L", whole.size)
    ImageDraw.Draw(mask).ellipse((0, 0, whole.size[0] - 1, whole.size[1] - 1), fill=255)
    opacity, pixels = np.asarray(scaled(mask, longer), float) / 255, np.asarray(scaled(whole, longer), float)
    return (opacity[:, ::-1], pixels[:, ::-1]) if rng.random() < 0.5 else (opacity, pixels)


@cache
def horse() -> Image.Image:
    """Return the silhouette of a horse, white on black, cropped to its box."""
    from skimage import data

    inside = ~np.asarray(data.horse(), bool)
    rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
    return Image.fromarray(inside[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].astype(np.uint8) * 255)


def silhouette(rng: np.random.Generator, longer: int) -> np.ndarray:
    """Return the opacity (H, W) of the horse."""
    opacity = np.asarray(scaled(horse(), longer), float) / 255
    return opacity[:, ::-1] if rng.random() < 0.5 else opacity


class Painter:
    """Composer of scenes of ``side`` pixels with the given handwritten digits.

    Args:
        samples: Opacity of the digits, (N, 8, 8) in 0..1.
        targets: The digit of each sample, (N,).
    """

    def __init__(self, rng: np.random.Generator, side: int, samples: np.ndarray, targets: np.ndarray) -> None:
        self.rng, self.side = rng, side
        self.samples = [samples[targets == digit] for digit in range(10)]

    def paint(self) -> tuple[Scene, np.ndarray, list[list[np.ndarray]]]:
        """Return a scene, its pixels (side, side, 3) uint8 and for each group its objects' masks (side, side) bool."""
        while True:  # until every object has a place
            if painted := self._attempt():
                return painted

    def _attempt(self) -> tuple[Scene, np.ndarray, list[list[np.ndarray]]] | None:
        rng = self.rng
        background = list(GROUNDS)[rng.integers(len(GROUNDS))]
        canvas = crop(rng, GROUNDS[background], self.side)
        taken = np.zeros(canvas.shape[:2], bool)
        number = 1 + int(rng.choice(len(GROUPS), p=GROUPS))
        counts = 1 + rng.choice(len(COUNTS), number, p=COUNTS)
        if counts.sum() > MOST:
            return None
        kinds = [kind for kind in NOUNS if kind != background]
        chances = np.array(
            [0.6 / len(DIGITS) if kind in DIGITS else 0.4 / (len(kinds) - len(DIGITS)) for kind in kinds]
        )
        groups, masks, seen = [], [], set()
        for window, count in zip(self._windows(number), counts):
            kind = kinds[rng.choice(len(kinds), p=chances)]
            colour = list(COLOURS)[rng.integers(len(COLOURS))] if kind not in CUT_OUTS else None
            if (kind, colour) in seen:
                return None
            seen.add((kind, colour))
            size = list(SIDES)[rng.choice(3, p=(0.3, 0.4, 0.3))]
            if size == "large" and (number > 2 or count > 2):
                size = "middling"
            placed = [self._place(canvas, taken, window, kind, colour, size) for _ in range(count)]
            if any(mask is None for mask in placed):
                return None
            masks.append([mask for mask in placed if mask is not None])
            groups.append(Group(kind, colour, tuple(map(box, masks[-1]))))
        pixels = canvas.round().clip(0, 255).astype(np.uint8)
        return Scene(self.side, background, tuple(groups)), pixels, masks

    def _windows(self, number: int) -> list[tuple[slice, slice]]:
        """Return a window for each group: in rows, in columns or anywhere; a single group is often on one side."""
        rng, whole = self.rng, slice(0, self.side)
        cuts = [round(self.side * n / number) for n in range(number + 1)]
        bands = [slice(*cuts[n : n + 2]) for n in rng.permutation(number)]
        layout = rng.choice(["rows", "columns", "anywhere"], p=(0.4, 0.4, 0.2))
        if number == 1 and rng.random() < 0.7:
            half = self.side // 2
            parts = [slice(0, half), slice(self.side - half, self.side), whole, slice(half // 2, self.side - half // 2)]
            return [(parts[rng.integers(4)], parts[rng.integers(4)])]
        if layout == "anywhere":
            return [(whole, whole)] * number
        return [(band, whole) if layout == "rows" else (whole, band) for band in bands]

    def _draw(self, kind: str, colour: str | None, size: str) -> tuple[np.ndarray, np.ndarray]:
        """Return opacity (H, W) and pixels, (H, W, 3) or one colour (3,), of an object."""
        rng = self.rng
        longer = round(self.side * rng.uniform(*SIDES[size]))
        if colour is None:
            return cut_out(rng, kind, longer)
        ink = np.clip(np.array(COLOURS[colour]) + rng.uniform(-SHADE, SHADE, 3), 0, 255)
        if kind == "horse":
            return silhouette(rng, longer), ink
        samples = self.samples[DIGITS.index(kind)]
        return draw_digit(rng, samples[rng.integers(len(samples))], longer), ink

    def _place(
        self,
        canvas: np.ndarray,
        taken: np.ndarray,
        window: tuple[slice, slice],
        kind: str,
        colour: str | None,
        size: str,
    ) -> np.ndarray | None:
        """Paste an object into ``window`` of ``canvas``; return its mask, or None if there is no room."""
        opacity, pixels = self._draw(kind, colour, size)
        for _ in range(ATTEMPTS):
            corner = free_place(self.rng, taken[window], opacity.shape)
            if corner is None:
                return None
            top, left = window[0].start + corner[0], window[1].start + corner[1]
            seen = opacity > 0.5
            if colour:
                below = canvas[top : top + opacity.shape[0], left : left + opacity.shape[1]][seen]
                if (np.linalg.norm(below - pixels, axis=1) >= MIN_CONTRAST).mean() < CONTRASTING:
                    continue
            here = paste(canvas, (top, left), opacity, pixels)
            taken[here] = True
            mask = np.zeros(taken.shape, bool)
            mask[here] = seen
            return mask
        return None


def box(mask: np.ndarray) -> Box:
    """Return left, top, right and bottom of the True values in ``mask``."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)
