"""Create small classification sets from real images, without downloads: ``train/CLASS`` and ``val/CLASS``.

::

    python -m tools.datasets.image_folders digits data/digit_folders       # handwritten digits, 8×8 pixels
    python -m tools.datasets.image_folders crops data/photograph_crops     # which photograph is this crop from?
    python -m tools.datasets.image_folders upright data/upright_digits     # digits on 128×128 pixels, of one size
    python -m tools.datasets.image_folders deformed data/deformed_digits   # … turned, sheared and scaled
    python -m tools.datasets.image_folders arrangements data/arrangements  # four digits: which is beside which?
    python -m tools.datasets.image_folders marked data/marked_digits       # two digits: which does the square mark?

``digits``: scikit-learn's 1,797 digits, every fifth of a class for validation. ``crops``: random crops of the
photographs in scikit-learn and scikit-image, one class per photograph; validation crops come from the right part of
each photograph, which no training crop touches. ``upright`` and ``deformed``: the digits of ``digits`` in the same
halves, ``--copies`` of each at random places; the deformed ones are turned by up to 60° and sheared, and their sides
are 25 to 100 pixels. ``arrangements``: the digits 0 to 3, one of each in the corners of a square, in all 24 orders; the
class is the digit beside the 0 and the one above or below it, so that only positions tell the classes apart.
``marked``: two digits and a square, which is in the row or column of the digit that is the class, ``--apart`` cells of
4 pixels from it; the other digit is as far along that axis, in another line. The same recipe gives the same pixels on
every run.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations, product
from pathlib import Path

import numpy as np
from PIL import Image

from tools import command_parser, need
from tools.datasets.digits_on_photographs import CLASSES, PHOTOGRAPHS, digit_samples, parted, photographs
from tools.datasets.recipes import new_folder

PLACED = 128  # pixels of a side
# First rows and columns of an arrangement's digits, of 16 pixels. Between two of them, and between one and the border,
# are more than the 31 pixels that a cell sees before the first attention of configs/timm/arrangements.yaml.
CORNERS = tuple(product((32, 80), repeat=2))
# First rows, in cells, of both digits of a marked picture. Between them and the border are 8 cells, more than the 31
# pixels that a cell sees before the attention of configs/timm/marked_digits.yaml.
LINES = [(own, other) for own in range(8, 21) for other in range(8, 21) if abs(own - other) >= 6]
ZOOM = (1.0, 2.0)  # pixels of the photograph per pixel of a crop


def digits() -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield (half, class, image) of every digit."""
    opacity, labels = digit_samples()
    seen = dict.fromkeys(range(10), 0)
    for image, label in zip(opacity, labels):
        seen[int(label)] += 1
        half = "val" if seen[int(label)] % 5 == 0 else "train"
        yield half, CLASSES[label], np.repeat((image * 255).round().astype(np.uint8)[..., None], 3, 2)


def samples_by_class() -> dict[tuple[str, str], list[np.ndarray]]:
    """Return the images of :func:`digits` of each (half, class)."""
    samples = defaultdict(list)
    for half, name, pixels in digits():
        samples[half, name].append(pixels)
    return samples


def placed_digits(deformed: bool, copies: int, seed: int) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield (half, class, image): ``copies`` of every digit, each at a place, size, angle and shear of its own."""
    for number, (half, name, pixels) in enumerate(digits()):
        rng = np.random.default_rng((seed, deformed, number))
        for _ in range(copies):
            size = np.exp(rng.uniform(np.log(25), np.log(100))) if deformed else 50.0
            angle, shear = (rng.uniform(-np.pi / 3, np.pi / 3), rng.uniform(-0.4, 0.4)) if deformed else (0.0, 0.0)
            turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
            back = np.linalg.inv(turn @ np.array([[1, shear], [0, 1]])) * (pixels.shape[0] / size)
            centre = PLACED / 2 + rng.uniform(-1, 1, 2) * max(0.0, (PLACED - size) / 2)
            shift = np.array(pixels.shape[:2]) / 2 - back @ centre
            data = (*back[0], shift[0], *back[1], shift[1])
            image = Image.fromarray(pixels[..., 0]).transform(
                (PLACED, PLACED), Image.Transform.AFFINE, data, Image.Resampling.BICUBIC
            )
            yield half, name, np.repeat(np.asarray(image)[..., None], 3, 2)


def crops(train: int, val: int, side: int, seed: int) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield (half, class, image): ``train`` and ``val`` random crops of every photograph."""
    for n, (name, photograph) in enumerate(zip(PHOTOGRAPHS, photographs(), strict=True)):
        for half, region, count in zip(("train", "val"), parted(photograph), (train, val)):
            rng = np.random.default_rng((seed, n, half == "val"))
            for _ in range(count):
                zoom = min(rng.uniform(*ZOOM), min(region.shape[:2]) / side)
                extent = int(side * zoom)
                top, left = (int(rng.integers(size - extent + 1)) for size in region.shape[:2])
                crop = Image.fromarray(np.ascontiguousarray(region[top : top + extent, left : left + extent]))
                yield half, name, np.asarray(crop.resize((side, side), Image.Resampling.BILINEAR))


def arranged(parts: Sequence[np.ndarray], corners: Iterable[tuple[int, int]] = CORNERS) -> np.ndarray:
    """Enlarge pictures (8, 8, 3) twice and place them at ``corners``, by default those of a square, row by row."""
    image = np.zeros((PLACED, PLACED, 3), np.uint8)
    for pixels, (top, left) in zip(parts, corners, strict=True):
        image[top : top + 16, left : left + 16] = pixels.repeat(2, 0).repeat(2, 1)
    return image


def marked(train: int, val: int, apart: tuple[int, int], seed: int) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield (half, class, image): two digits, and a square in the row or column of that of the class.

    Both digits are distributed alike and ``apart`` cells (minimum and maximum) from the square along the same axis, so
    that the square would mark the other one from the latter's line with the same probability.
    """
    samples = samples_by_class()
    square = np.zeros((8, 8, 3), np.uint8)
    square[2:6, 2:6, 0] = 255
    for n, name in enumerate(CLASSES):
        for half, count in (("train", train), ("val", val)):
            rng = np.random.default_rng((seed, n, half == "val"))
            for _ in range(count):
                classes = name, CLASSES[(n + rng.integers(1, 10)) % 10]
                parts = [pixels[rng.integers(len(pixels))] for pixels in (samples[half, name] for name in classes)]
                lines = rng.choice(LINES)
                start = rng.integers(29 - apart[1])
                along = start + np.array([0, *rng.integers(apart[0], apart[1] + 1, 2)])
                corners = 4 * np.stack((lines[[0, 0, 1]], 28 - along if rng.integers(2) else along), 1)
                yield half, name, arranged([square, *parts], corners[:, ::-1] if rng.integers(2) else corners)


def arrangements(train: int, val: int, seed: int) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield (half, class, image): ``train`` and ``val`` images of every order of the digits 0 to 3."""
    samples = samples_by_class()
    for n, order in enumerate(permutations(range(4))):
        zero = order.index(0)
        beside, above_or_below = order[zero ^ 1], order[zero ^ 2]
        for half, count in (("train", train), ("val", val)):
            rng = np.random.default_rng((seed, n, half == "val"))
            own = [samples[half, CLASSES[digit]] for digit in order]
            for _ in range(count):
                yield half, f"{beside}{above_or_below}", arranged([one[rng.integers(len(one))] for one in own])


def build(output: Path, images: Iterator[tuple[str, str, np.ndarray]]) -> int:
    """Write the images; return their number."""
    count = 0
    with new_folder(output) as partial:
        for count, (half, name, pixels) in enumerate(images, 1):
            folder = partial / half / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / f"{count:05d}.png")
    return count


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("datasets.image_folders", __doc__)
    parser.add_argument("set", choices=("digits", "crops", "upright", "deformed", "arrangements", "marked"))
    parser.add_argument("output", type=Path, metavar="DIR")
    parser.add_argument("--train", type=int, default=200, help="training images of a photograph, an order or a class")
    parser.add_argument("--val", type=int, default=50, help="the same for validation")
    parser.add_argument("--side", type=int, default=32, help="side of a crop, in pixels")
    parser.add_argument("--copies", type=int, default=4, help="upright or deformed copies of each digit")
    parser.add_argument("--apart", type=int, nargs=2, default=(11, 15), metavar="N", help="range of cells, 4 to 28")
    parser.add_argument("--seed", type=int, default=0, help="seed of all sets but digits")
    options = parser.parse_args(arguments)
    for name in ("train", "val", "side", "copies"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    if not 4 <= options.apart[0] <= options.apart[1] <= 28:
        parser.error(f"--apart must be two numbers from 4 to 28 in order, got {options.apart}")
    need("sklearn", *(["skimage"] if options.set == "crops" else []))
    images = {
        "digits": digits,
        "crops": lambda: crops(options.train, options.val, options.side, options.seed),
        "upright": lambda: placed_digits(False, options.copies, options.seed),
        "deformed": lambda: placed_digits(True, options.copies, options.seed),
        "arrangements": lambda: arrangements(options.train, options.val, options.seed),
        "marked": lambda: marked(options.train, options.val, options.apart, options.seed),
    }[options.set]()
    try:
        print(f"{build(options.output, images)} images in {options.output}")
    except ValueError as error:
        parser.exit(2, f"image_folders: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
