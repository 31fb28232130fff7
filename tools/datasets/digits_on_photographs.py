"""Create a small detection and segmentation set from real images, without downloads.

scikit-learn's 1,797 handwritten digits are enlarged, slightly rotated, colored and pasted on crops of the photographs
in scikit-learn and scikit-image. Train and val share neither a digit sample nor a photograph pixel. The set consists
of images, COCO annotations (boxes, run-length masks, ten classes) and semantic label images (0 is background, digit d
is d + 1)::

    python -m tools.datasets.digits_on_photographs data/digits --train 400 --val 100 --seed 0

    data/digits/{train,val}/000000.png
    data/digits/annotations/{train,val}.json
    data/digits/semantic/{train,val}/000000.png
    data/digits/annotations/one_class_{train,val}.json     the same with the one class "digit"
    data/digits/recipe.json

The side of a digit is uniform in 26 to 60 pixels, or log-uniform between ``--sides MIN MAX``, so that as many objects
have 14 to 28 pixels as 28 to 56. ``--digits 0 1 2 3 4`` draws from these digits only; the annotations still list ten
classes. A digit without a free place is left out, which happens to large ones more often.

The same recipe gives the same bytes on every run.
"""

from __future__ import annotations

import argparse
import colorsys
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tools import command_parser, need
from tools.datasets.folders import Show, new_folder, show_progress

CLASSES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TURN = 18.0  # maximum rotation of a digit in degrees, either way
SIZES = ((144, 208), (208, 144), (160, 192))  # (H, W): never square, so that swapped axes are noticed
DIGIT_SIDE = (26, 60)  # pixels
LARGEST = int((min(min(size) for size in SIZES) - 2) / 2**0.5)  # a rotated digit of this side fits every image
DIGITS_PER_IMAGE = (2, 6)
ZOOM = (1.0, 1.6)  # pixels of the photograph per pixel of a crop
TRAIN_WIDTH, GAP = 0.66, 0.02  # share of each photograph's width for training crops, then unused columns
MIN_CONTRAST = 90.0  # between the colors of a digit and the mean below it, in grey levels
PHOTOGRAPHS = (
    "china", "flower", "astronaut", "chelsea", "coffee", "rocket", "camera", "coins", "brick", "grass", "gravel",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """Parameters that determine the set, byte for byte; None draws all digits, and sides from ``DIGIT_SIDE``."""

    train: int = 400
    val: int = 100
    seed: int = 0
    version: int = 1
    sides: tuple[int, int] | None = None
    digits: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("train", "val"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.sides is not None and not 10 <= self.sides[0] <= self.sides[1] <= LARGEST:
            raise ValueError(f"sides must be two rising numbers from 10 to {LARGEST} pixels, got {self.sides}")
        if self.digits is not None and not (self.digits and {*self.digits} <= {*range(10)}):
            raise ValueError(f"digits must be between 0 and 9, got {self.digits}")

    def stamp(self) -> dict[str, Any]:
        """Return the content of ``recipe.json``, without parameters that are None."""
        return json.loads(json.dumps({name: value for name, value in asdict(self).items() if value is not None}))

    def side(self, rng: np.random.Generator) -> int:
        """Draw a digit's side in pixels."""
        if self.sides is None:
            return int(rng.integers(DIGIT_SIDE[0], DIGIT_SIDE[1] + 1))
        return round(float(np.exp(rng.uniform(*np.log(self.sides)))))


@cache
def photograph(name: str) -> np.ndarray:
    """Return a packaged photograph, (H, W, 3) uint8, read-only."""
    if name in ("china", "flower"):  # scikit-learn's; all others are scikit-image's
        from sklearn.datasets import load_sample_image

        image = load_sample_image(f"{name}.jpg")
    else:
        from skimage import data

        image = getattr(data, name)()
    return np.repeat(image[..., None], 3, 2) if image.ndim == 2 else image


def digit_samples() -> tuple[np.ndarray, np.ndarray]:
    """Return the handwritten digits: opacity (1797, 8, 8) in 0..1, and the digit of each."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images / 16.0, digits.target


def draw_digit(rng: np.random.Generator, sample: np.ndarray, side: int) -> np.ndarray:
    """Return the opacity of an 8x8 sample at ``side`` pixels, rotated by up to ``TURN`` and cropped to its ink."""
    coarse = Image.fromarray((sample * 255).astype(np.uint8)).resize((side, side), Image.Resampling.BICUBIC)
    turned = coarse.rotate(rng.uniform(-TURN, TURN), Image.Resampling.BILINEAR, expand=True)
    opacity = np.clip((np.asarray(turned, float) / 255 - 0.25) / 0.3, 0, 1)  # blur -> an edge
    rows, columns = np.flatnonzero(opacity.max(1) > 0.5), np.flatnonzero(opacity.max(0) > 0.5)
    return opacity[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


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


def contrasting_color(rng: np.random.Generator, below: np.ndarray) -> np.ndarray:
    grey = below.reshape(-1, 3).mean(0) @ (0.299, 0.587, 0.114)
    while True:
        color = rng.uniform(0, 255, 3)
        if abs(color @ (0.299, 0.587, 0.114) - grey) >= MIN_CONTRAST:
            return color


def free_place(
    rng: np.random.Generator, taken: np.ndarray, shape: tuple[int, int], attempts: int = 25
) -> tuple[int, int] | None:
    """Return a top-left corner where an object of ``shape`` covers no other object's box, or None."""
    if shape[0] > taken.shape[0] or shape[1] > taken.shape[1]:
        return None
    for _ in range(attempts):
        top = int(rng.integers(taken.shape[0] - shape[0] + 1))
        left = int(rng.integers(taken.shape[1] - shape[1] + 1))
        if not taken[top : top + shape[0], left : left + shape[1]].any():
            return top, left
    return None


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
        opacity = draw_digit(rng, samples[which], recipe.side(rng))
        place = free_place(rng, taken, opacity.shape)
        if place is None:
            wanted = max(1, wanted - 1)  # crowded: fewer digits, but at least one
            continue
        (top, left), (height, width) = place, opacity.shape
        window, alpha = np.s_[top : top + height, left : left + width], opacity[..., None]
        color = contrasting_color(rng, canvas[window])
        canvas[window] = alpha * color + (1 - alpha) * canvas[window]
        taken[window] = True
        mask = np.zeros(size, bool)
        mask[window] = opacity > 0.5
        objects.append((int(targets[which]), mask))
    return canvas.round().clip(0, 255).astype(np.uint8), objects


def annotation(number: int, image: int, category: int, mask: np.ndarray) -> dict:
    """Return an object in COCO's detection format: box, area and run-length mask of ``mask`` (H, W)."""
    from pycocotools import mask as run_length

    encoded = run_length.encode(np.asfortranarray(mask.astype(np.uint8)))
    return dict(
        id=number,
        image_id=image,
        category_id=category,
        bbox=[float(n) for n in run_length.toBbox(encoded)],
        area=float(run_length.area(encoded)),
        segmentation=dict(size=[int(n) for n in encoded["size"]], counts=encoded["counts"].decode()),
        iscrowd=0,
    )


def palette() -> list[int]:
    """Return the colors of the semantic label images: black, then ten hues."""
    hues = [colorsys.hsv_to_rgb(digit / 10, 0.8, 0.95) for digit in range(10)]
    return [0, 0, 0] + [round(255 * channel) for hue in hues for channel in hue]


def write_split(
    folder: Path, split: str, images: Iterator[tuple[np.ndarray, list[tuple[int, np.ndarray]]]], count: int, show: Show
) -> None:
    (folder / split).mkdir()
    (folder / "semantic" / split).mkdir(parents=True)
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
        infos.append(dict(id=index, file_name=name, height=pixels.shape[0], width=pixels.shape[1]))
        show(f"{split}: {index + 1}/{count} images")
    categories = [dict(id=n + 1, name=name) for n, name in enumerate(CLASSES)]
    content = dict(images=infos, annotations=annotations, categories=categories)
    (folder / "annotations" / f"{split}.json").write_text(json.dumps(content))
    digits = [{**one, "category_id": 1} for one in annotations]
    content.update(annotations=digits, categories=[dict(id=1, name="digit")])
    (folder / "annotations" / f"one_class_{split}.json").write_text(json.dumps(content))


def build(folder: Path, recipe: Recipe, show: Show = lambda line: None) -> bool:
    """Write the set to ``folder``; return False if it holds the set already.

    Raises:
        ValueError: ``folder`` holds anything else.
    """
    need("sklearn", "skimage", "pycocotools")
    file, stamp = folder / "recipe.json", recipe.stamp()
    if file.is_file():
        if (held := json.loads(file.read_text())) == stamp:
            return False
        raise ValueError(f"{folder} holds a set of another recipe, {held}; remove it or name another folder")
    with new_folder(folder) as partial:
        (partial / "annotations").mkdir()
        rng = np.random.default_rng(recipe.seed)
        for split, samples, targets, regions in halves(rng, photographs()):
            if recipe.digits is not None:
                chosen = np.isin(targets, recipe.digits)
                samples, targets = samples[chosen], targets[chosen]
            count = getattr(recipe, split)
            images = (compose(rng, regions, samples, targets, recipe) for _ in range(count))
            write_split(partial, split, images, count, show)
        (partial / "recipe.json").write_text(json.dumps(stamp, indent=1))
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("datasets.digits_on_photographs", __doc__)
    option = parser.add_argument
    option("folder", type=Path, help="output folder")
    option("--train", type=int, default=400, help="training images, default %(default)s")
    option("--val", type=int, default=100, help="validation images, default %(default)s")
    option("--seed", type=int, default=0, help="of all random numbers, default %(default)s")
    option("--sides", type=int, nargs=2, metavar=("MIN", "MAX"), help="sides of digits in pixels, log-uniform")
    option("--digits", type=int, nargs="+", metavar="DIGIT", help="digits that appear, default all ten")
    options = parser.parse_args(arguments, argparse.Namespace(version=1))
    chosen = {key: tuple(value) if isinstance(value, list) else value for key, value in vars(options).items()}
    folder = chosen.pop("folder")
    try:
        written = build(folder, Recipe(**chosen), show_progress)
    except (ValueError, OSError) as error:
        parser.exit(2, f"digits_on_photographs: {error}\n")
    state = "written to" if written else "already in"
    print(f"{options.train} training and {options.val} validation images {state} {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
