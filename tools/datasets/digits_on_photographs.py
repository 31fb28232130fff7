"""Create a small detection and segmentation set from real images, without downloads.

scikit-learn's 1,797 handwritten digits are enlarged, slightly rotated, coloured and pasted on crops of the photographs
in scikit-learn and scikit-image. Train and val share neither a digit sample nor a photograph pixel. The set consists
of images, COCO annotations (boxes, run-length masks, ten classes) and semantic label images (0 is background, digit d
is d + 1)::

    python -m tools.datasets.digits_on_photographs data/digits --train 400 --val 100 --seed 0

    data/digits/{train,val}/000000.png
    data/digits/annotations/{train,val}.json
    data/digits/semantic/{train,val}/000000.png
    data/digits/recipe.json

By default the side of a digit is uniform in 26 to 60 pixels and its rotation uniform in ±18 degrees. For objects whose
scale and rotation vary as in photographs::

    python -m tools.datasets.digits_on_photographs data/digits_varied --sides 14 100 --turn 60

The side is then log-uniform between the two, so that as many objects have 14 to 28 pixels as 28 to 56 (as in
photographs, most objects are small), and the rotation is uniform in ±60 degrees (beyond 90, a six can be a nine). A
digit without a free place is left out, which happens to large ones more often.

The same recipe gives the same bytes on every run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from tools import need
from tools.datasets import pasting
from tools.datasets.pasting import SAMPLE_IMAGES, annotation, digit_samples, draw_digit, free_place, photograph
from tools.datasets.recipes import is_made, new_folder

CLASSES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SIZES = ((144, 208), (208, 144), (160, 192))  # (H, W): never square, so that swapped axes are noticed
DIGIT_SIDE = (26, 60)  # pixels
LARGEST = int((min(min(size) for size in SIZES) - 2) / 2**0.5)  # a rotated digit of this side fits every image
DIGITS_PER_IMAGE = (2, 6)
ZOOM = (1.0, 1.6)  # pixels of the photograph per pixel of a crop
TRAIN_WIDTH, GAP = 0.66, 0.02  # share of each photograph's width for training crops, then unused columns
MIN_CONTRAST = 90.0  # between the colours of a digit and the mean below it, in grey levels
OTHERS = ("astronaut", "chelsea", "coffee", "rocket", "camera", "coins", "brick", "grass", "gravel")
PHOTOGRAPHS = (*SAMPLE_IMAGES, *OTHERS)


@dataclass(frozen=True)
class Recipe:
    """Parameters that determine the set, byte for byte.

    Attributes:
        train: Training images.
        val: Validation images.
        seed: Seed of all random numbers.
        version: Version of this module.
        sides: Smallest and largest side of a digit in pixels, log-uniform; None: uniform in ``DIGIT_SIDE``.
        turn: Maximum rotation of a digit in degrees, either way, uniform; None: ``pasting.TURN``.
    """

    train: int = 400
    val: int = 100
    seed: int = 0
    version: int = 1
    sides: tuple[int, int] | None = None
    turn: float | None = None

    def __post_init__(self) -> None:
        for name in ("train", "val"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 image, got {getattr(self, name)}")
        if self.sides is not None and not 10 <= self.sides[0] <= self.sides[1] <= LARGEST:
            raise ValueError(f"sides must be two rising numbers from 10 to {LARGEST} pixels, got {self.sides}")
        if self.turn is not None and not 0 <= self.turn <= 180:
            raise ValueError(f"turn must be between 0 and 180 degrees, got {self.turn}")

    def stamp(self) -> dict:
        """Return the content of ``recipe.json``, without parameters that are None."""
        return json.loads(json.dumps({name: value for name, value in asdict(self).items() if value is not None}))

    def side(self, rng: np.random.Generator) -> int:
        """Draw a digit's side in pixels."""
        if self.sides is None:
            return int(rng.integers(DIGIT_SIDE[0], DIGIT_SIDE[1] + 1))
        return round(float(np.exp(rng.uniform(*np.log(self.sides)))))


def photographs() -> list[np.ndarray]:
    """Return the packaged photographs, each (H, W, 3) uint8."""
    return [photograph(name) for name in PHOTOGRAPHS]


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
        turn = pasting.TURN if recipe.turn is None else recipe.turn
        opacity = draw_digit(rng, samples[which], recipe.side(rng), turn)
        place = free_place(rng, taken, opacity.shape)
        if place is None:
            wanted -= 1  # crowded: fewer digits; there is always room for the first one
            continue
        window = slice(place[0], place[0] + opacity.shape[0]), slice(place[1], place[1] + opacity.shape[1])
        colour, alpha = contrasting_colour(rng, canvas[window]), opacity[..., None]
        canvas[window] = alpha * colour + (1 - alpha) * canvas[window]
        taken[window] = True
        mask = np.zeros(size, bool)
        mask[window] = opacity > 0.5
        objects.append((int(targets[which]), mask))
    return canvas.round().clip(0, 255).astype(np.uint8), objects


def palette() -> list[int]:
    """Return the colours of the semantic label images: black, then ten hues."""
    import colorsys

    hues = [colorsys.hsv_to_rgb(digit / 10, 0.8, 0.95) for digit in range(10)]
    return [0, 0, 0] + [round(255 * channel) for hue in hues for channel in hue]


def write_split(
    folder: Path,
    split: str,
    images: Iterator[tuple[np.ndarray, list[tuple[int, np.ndarray]]]],
    count: int,
    show: Callable[[str], None],
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


def build(folder: Path, recipe: Recipe, show: Callable[[str], None] = lambda line: None) -> bool:
    """Write the set to ``folder``; return False if it already existed.

    Raises:
        ValueError: ``folder`` holds something else, or a set of another recipe.
    """
    if is_made(folder, recipe.stamp()):
        return False
    with new_folder(folder, recipe.stamp()) as partial:
        (partial / "annotations").mkdir()
        rng = np.random.default_rng(recipe.seed)
        samples, targets = digit_samples()
        order = rng.permutation(len(samples))
        cut = int(TRAIN_WIDTH * len(samples))
        pictures = photographs()
        parts = {
            "train": (order[:cut], [p[:, : int(TRAIN_WIDTH * p.shape[1])] for p in pictures]),
            "val": (order[cut:], [p[:, int((TRAIN_WIDTH + GAP) * p.shape[1]) :] for p in pictures]),
        }
        for split, (chosen, regions) in parts.items():
            count = getattr(recipe, split)
            images = (compose(rng, regions, samples[chosen], targets[chosen], recipe) for _ in range(count))
            write_split(partial, split, images, count, show)
    return True


def main(arguments: list[str] | None = None) -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("folder", type=Path, help="output folder")
    parser.add_argument("--train", type=int, default=Recipe.train, help="training images, default %(default)s")
    parser.add_argument("--val", type=int, default=Recipe.val, help="validation images, default %(default)s")
    parser.add_argument("--seed", type=int, default=Recipe.seed, help="default %(default)s")
    parser.add_argument(
        "--sides", type=int, nargs=2, metavar=("MIN", "MAX"), help="sides of digits in pixels, log-uniform; see above"
    )
    parser.add_argument("--turn", type=float, metavar="DEGREES", help="maximum rotation of digits, either way")
    options = parser.parse_args(arguments)
    need("sklearn", "skimage", "pycocotools")
    end = "\r" if sys.stdout.isatty() else "\n"

    def show(line: str) -> None:
        if sys.stdout.isatty() or line.split("/")[0].endswith("00"):
            print(f"{line}   ", end=end, flush=True)

    try:
        sides = options.sides and tuple(options.sides)
        recipe = Recipe(options.train, options.val, options.seed, sides=sides, turn=options.turn)
        written = build(options.folder, recipe, show)
    except ValueError as error:
        parser.exit(2, f"digits_on_photographs: {error}\n")
    state = "written to" if written else "already in"
    print(f"{options.train} training and {options.val} validation images {state} {options.folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
