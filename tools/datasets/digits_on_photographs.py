"""Create a small detection and segmentation set from real images, without downloads.

scikit-learn's 1,797 handwritten digits are enlarged, slightly rotated, coloured and pasted on crops of the photographs
in scikit-learn and scikit-image. Train and val share neither a digit sample nor a photograph pixel. The set consists
of images, COCO annotations (boxes, run-length masks, ten classes) and semantic label images (0 is background, digit d
is d + 1)::

    python -m tools.datasets.digits_on_photographs data/digits --train 400 --val 100 --seed 0

    data/digits/{train,val}/000000.png
    data/digits/annotations/{train,val}.json
    data/digits/semantic/{train,val}/000000.png
    data/digits/annotations/one_class_{train,val}.json     the same with the one class "digit"
    data/digits/one_class/{train,val}/000000.png
    data/digits/recipe.json

By default the side of a digit is uniform in 26 to 60 pixels and its rotation uniform in ±18 degrees. For objects whose
scale and rotation vary as in photographs::

    python -m tools.datasets.digits_on_photographs data/digits_varied --sides 14 100 --turn 60

The side is then log-uniform between the two, so that as many objects have 14 to 28 pixels as 28 to 56 (as in
photographs, most objects are small), and the rotation is uniform in ±60 degrees (beyond 90, a six can be a nine).
``--shear 0.4`` slants digits as well, by up to 0.4 columns a row. ``--digits 0 1 2 3 4`` draws from these digits only;
the annotations still list ten classes. A digit without a free place is left out, which
happens to large ones more often.

The same recipe gives the same bytes on every run.
"""

from __future__ import annotations

import colorsys
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from tools import need
from tools.datasets.pasting import DIGITS as CLASSES
from tools.datasets.pasting import TURN, annotation, digit_samples, draw_digit, free_place, paste, photograph
from tools.datasets.recipes import BaseRecipe, Show, builder, command, option

SIZES = ((144, 208), (208, 144), (160, 192))  # (H, W): never square, so that swapped axes are noticed
DIGIT_SIDE = (26, 60)  # pixels
LARGEST = int((min(min(size) for size in SIZES) - 2) / 2**0.5)  # a rotated digit of this side fits every image
DIGITS_PER_IMAGE = (2, 6)
ZOOM = (1.0, 1.6)  # pixels of the photograph per pixel of a crop
TRAIN_WIDTH, GAP = 0.66, 0.02  # share of each photograph's width for training crops, then unused columns
MIN_CONTRAST = 90.0  # between the colours of a digit and the mean below it, in grey levels
PHOTOGRAPHS = (
    "china", "flower", "astronaut", "chelsea", "coffee", "rocket", "camera", "coins", "brick", "grass", "gravel",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe(BaseRecipe):
    """Parameters of the set; without ``sides`` and ``turn``, ``DIGIT_SIDE`` and ``pasting.TURN`` hold."""

    train: int = option(400, "training images", 1)
    val: int = option(100, "validation images", 1)
    seed: int = option(0, "of all random numbers")
    version: int = 1
    sides: tuple[int, int] | None = option(
        None, "sides of digits in pixels, log-uniform; see above", type=int, nargs=2, metavar=("MIN", "MAX")
    )
    turn: float | None = option(None, "maximum rotation of digits, either way", type=float, metavar="DEGREES")
    shear: float | None = option(None, "maximum slant of digits, either way", type=float, metavar="COLUMNS")
    digits: tuple[int, ...] | None = option(
        None, "digits that appear, default all ten", type=int, nargs="+", metavar="DIGIT"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sides is not None and not 10 <= self.sides[0] <= self.sides[1] <= LARGEST:
            raise ValueError(f"sides must be two rising numbers from 10 to {LARGEST} pixels, got {self.sides}")
        if self.turn is not None and not 0 <= self.turn <= 180:
            raise ValueError(f"turn must be between 0 and 180 degrees, got {self.turn}")
        if self.digits is not None and not (self.digits and {*self.digits} <= {*range(10)}):
            raise ValueError(f"digits must be between 0 and 9, got {self.digits}")
        if self.shear is not None and not 0 <= self.shear <= 1:
            raise ValueError(f"shear must be between 0 and 1 columns a row, got {self.shear}")

    def side(self, rng: np.random.Generator) -> int:
        """Draw a digit's side in pixels."""
        if self.sides is None:
            return int(rng.integers(DIGIT_SIDE[0], DIGIT_SIDE[1] + 1))
        return round(float(np.exp(rng.uniform(*np.log(self.sides)))))


def photographs() -> list[np.ndarray]:
    """Return the packaged photographs, each (H, W, 3) uint8."""
    return [photograph(name) for name in PHOTOGRAPHS]


def parted(photograph: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the columns of a photograph (H, W, 3) for training, and those for validation."""
    W = photograph.shape[1]
    return photograph[:, : int(TRAIN_WIDTH * W)], photograph[:, int((TRAIN_WIDTH + GAP) * W) :]


def halves(
    rng: np.random.Generator, pictures: list[np.ndarray]
) -> Iterator[tuple[str, np.ndarray, np.ndarray, list[np.ndarray]]]:
    """Yield train and val with their handwritten digits (N, 8, 8), what these show (N,), and parts of ``pictures``."""
    samples, targets = digit_samples()
    chosen = np.split(rng.permutation(len(samples)), [int(TRAIN_WIDTH * len(samples))])
    for split, own, regions in zip(("train", "val"), chosen, zip(*map(parted, pictures))):
        yield split, samples[own], targets[own], list(regions)


def crop_background(rng: np.random.Generator, regions: list[np.ndarray], size: tuple[int, int]) -> np.ndarray:
    """Return a random crop of a random region, (H, W, 3) float in 0..255, mirrored half the time."""
    region = regions[rng.integers(len(regions))]
    most = min(region.shape[0] / size[0], region.shape[1] / size[1])  # regions may be narrower than an image
    zoom = min(rng.uniform(*ZOOM), most)
    height, width = int(size[0] * zoom), int(size[1] * zoom)
    top = rng.integers(region.shape[0] - height + 1)
    left = rng.integers(region.shape[1] - width + 1)
    crop = Image.fromarray(np.ascontiguousarray(region[top : top + height, left : left + width]))
    pixels = np.asarray(crop.resize(size[::-1], Image.Resampling.BILINEAR), float)
    return pixels[:, ::-1] if rng.random() < 0.5 else pixels


def contrasting_colour(rng: np.random.Generator, below: np.ndarray) -> np.ndarray:
    grey = below.reshape(-1, 3).mean(0) @ (0.299, 0.587, 0.114)
    while True:
        colour = rng.uniform(0, 255, 3)
        if abs(colour @ (0.299, 0.587, 0.114) - grey) >= MIN_CONTRAST:
            return colour


def compose(
    rng: np.random.Generator, regions: list[np.ndarray], samples: np.ndarray, targets: np.ndarray, recipe: Recipe
) -> tuple[np.ndarray, list[tuple[int, np.ndarray]]]:
    """Compose one image (H, W, 3) uint8 and its objects: (digit, mask (H, W) bool) each."""
    size = SIZES[rng.integers(len(SIZES))]
    canvas, taken = crop_background(rng, regions, size), np.zeros(size, bool)
    objects: list[tuple[int, np.ndarray]] = []
    wanted = rng.integers(DIGITS_PER_IMAGE[0], DIGITS_PER_IMAGE[1] + 1)
    while len(objects) < wanted:
        which = rng.integers(len(samples))
        turn = TURN if recipe.turn is None else recipe.turn
        opacity = draw_digit(rng, samples[which], recipe.side(rng), turn, recipe.shear or 0.0)
        place = free_place(rng, taken, opacity.shape)
        if place is None:
            wanted = max(1, wanted - 1)  # crowded: fewer digits, but at least one
            continue
        (top, left), (height, width) = place, opacity.shape
        colour = contrasting_colour(rng, canvas[top : top + height, left : left + width])
        window = paste(canvas, place, opacity, colour)
        taken[window] = True
        mask = np.zeros(size, bool)
        mask[window] = opacity > 0.5
        objects.append((int(targets[which]), mask))
    return canvas.round().clip(0, 255).astype(np.uint8), objects


def palette() -> list[int]:
    """Return the colours of the semantic label images: black, then ten hues."""
    hues = [colorsys.hsv_to_rgb(digit / 10, 0.8, 0.95) for digit in range(10)]
    return [0, 0, 0] + [round(255 * channel) for hue in hues for channel in hue]


def write_split(
    folder: Path, split: str, images: Iterator[tuple[np.ndarray, list[tuple[int, np.ndarray]]]], count: int, show: Show
) -> None:
    (folder / split).mkdir()
    for labels in ("semantic", "one_class"):
        (folder / labels / split).mkdir(parents=True)
    infos: list[dict] = []
    annotations: list[dict] = []
    for index, (pixels, objects) in enumerate(images):
        name = f"{index:06d}.png"
        Image.fromarray(pixels).save(folder / split / name)
        labels = np.zeros(pixels.shape[:2], np.uint8)
        for digit, mask in objects:
            labels[mask] = digit + 1
            annotations.append(annotation(len(annotations) + 1, index, digit + 1, mask))
        semantic = Image.fromarray(labels)
        semantic.putpalette(palette())
        semantic.save(folder / "semantic" / split / name)
        Image.fromarray((labels > 0).astype(np.uint8)).save(folder / "one_class" / split / name)
        infos.append(dict(id=index, file_name=name, height=pixels.shape[0], width=pixels.shape[1]))
        show(f"{split}: {index + 1}/{count} images")
    categories = [dict(id=n + 1, name=name) for n, name in enumerate(CLASSES)]
    content = dict(images=infos, annotations=annotations, categories=categories)
    (folder / "annotations" / f"{split}.json").write_text(json.dumps(content))
    digits = [{**one, "category_id": 1} for one in annotations]
    content.update(annotations=digits, categories=[dict(id=1, name="digit")])
    (folder / "annotations" / f"one_class_{split}.json").write_text(json.dumps(content))


@builder
def build(folder: Path, recipe: Recipe, show: Show) -> None:
    """Write the set to ``folder``."""
    need("pycocotools")
    (folder / "annotations").mkdir()
    rng = np.random.default_rng(recipe.seed)
    for split, samples, targets, regions in halves(rng, photographs()):
        count = getattr(recipe, split)
        if recipe.digits is not None:
            wanted = np.isin(targets, recipe.digits)
            samples, targets = samples[wanted], targets[wanted]
        images = (compose(rng, regions, samples, targets, recipe) for _ in range(count))
        write_split(folder, split, images, count, show)


def main(arguments: list[str] | None = None) -> int:
    content = "{train} training and {val} validation images"
    return command("digits_on_photographs", __doc__, Recipe, build, content, arguments)


if __name__ == "__main__":
    sys.exit(main())
