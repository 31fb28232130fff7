"""Makes a small set of clips from real images, with no download: digits that move over photographs.

The class of a clip is the direction that its digits move in. They leave the picture on one side and enter it on the
other, so that a digit is anywhere with the same probability in every frame of every class: no single frame tells the
class, and no model of single frames can learn it. Digits are scikit-learn's, photographs those that scikit-learn and
scikit-image carry; train and val share neither a digit sample nor a photograph pixel::

    python -m tools.datasets.moving_digits data/moving --train 400 --val 100 --frames 8
    python -m tools.datasets.moving_digits data/moving --format mp4

    data/moving/{train,val}/{down,left,right,up}/000000/000.png    or .../000000.mp4
    data/moving/recipe.json

The same recipe gives the same pixels on every run. MPEG-4 stores differences of frames, of which some are left in what
is decoded: where single frames must hold nothing of the direction at all, take PNG.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.requires import extras, need

with extras("tools"):
    import numpy as np
    from PIL import Image

    from tools.datasets.digits_on_photographs import GAP, TRAIN_WIDTH, contrasting_colour, crop_background, photographs
    from tools.datasets.pasting import digit_samples, draw_digit
    from tools.datasets.recipes import making, stands

DIRECTIONS = {"down": (1, 0), "left": (0, -1), "right": (0, 1), "up": (-1, 0)}  # of rows and columns
FORMATS = ("png", "mp4")
DIGITS = (1, 2)  # a clip
SIDE = (0.35, 0.6)  # of a digit, as share of the picture's height
SPEED = (0.03, 0.08)  # of the picture's height, a frame; at least a pixel
FRAME_RATE = 8.0
SMALLEST = 32  # pixels of a side


@dataclass(frozen=True)
class Recipe:
    """What determines the set.

    Attributes:
        train: Training clips, of all classes in turn.
        val: Validation clips.
        frames: Of a clip.
        height: In pixels, even, as MPEG-4 wants it.
        width: Likewise.
        format: ``'png'``: a clip is a folder of frames, or ``'mp4'``.
        seed: Of all that is random.
    """

    train: int = 400
    val: int = 100
    frames: int = 8
    height: int = 64
    width: int = 96  # not square, so that swapped axes show
    format: str = "png"
    seed: int = 0
    version: int = 1

    def __post_init__(self) -> None:
        for name, least in (("train", 1), ("val", 1), ("frames", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("height", "width"):
            if getattr(self, name) < SMALLEST or getattr(self, name) % 2:
                raise ValueError(f"{name} must be even and at least {SMALLEST} pixels, got {getattr(self, name)}")
        if self.format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {self.format!r}")


def compose(
    rng: np.random.Generator, regions: list[np.ndarray], samples: np.ndarray, direction: tuple[int, int], recipe: Recipe
) -> np.ndarray:
    """One clip, (T, H, W, 3) uint8."""
    size = recipe.height, recipe.width
    background = crop_background(rng, regions, size)
    frames = np.repeat(background[None], recipe.frames, 0)
    for _ in range(rng.integers(DIGITS[0], DIGITS[1] + 1)):
        side = int(recipe.height * rng.uniform(*SIDE))
        digit = draw_digit(rng, samples[rng.integers(len(samples))], side)[: size[0], : size[1]]
        layer = np.zeros(size)
        layer[: digit.shape[0], : digit.shape[1]] = digit
        start, speed = rng.integers(size), max(1.0, recipe.height * rng.uniform(*SPEED))
        colour = contrasting_colour(rng, background)
        for time in range(recipe.frames):
            place = [int(at + step * round(speed * time)) for at, step in zip(start, direction)]
            alpha = np.roll(layer, place, (0, 1))[..., None]
            frames[time] = alpha * colour + (1 - alpha) * frames[time]
    return frames.round().clip(0, 255).astype(np.uint8)


def write_png(path: Path, frames: np.ndarray) -> None:
    """Write frames (T, H, W, 3) as 000.png and so on into the folder ``path``."""
    path.mkdir()
    for time, frame in enumerate(frames):
        Image.fromarray(frame).save(path / f"{time:03d}.png")


def write_mp4(path: Path, frames: np.ndarray) -> None:
    """Write frames (T, H, W, 3) as an MPEG-4 video.

    Raises:
        RuntimeError: this build of OpenCV has no encoder.
    """
    import cv2

    file = path.with_suffix(".mp4")
    encoder = cv2.VideoWriter(str(file), cv2.VideoWriter_fourcc(*"mp4v"), FRAME_RATE, frames.shape[2:0:-1])
    if not encoder.isOpened():
        raise RuntimeError(f"this build of OpenCV ({cv2.__version__}) cannot write {file}: it has no MPEG-4 encoder")
    for frame in frames:
        encoder.write(np.ascontiguousarray(frame[..., ::-1]))  # OpenCV wants BGR
    encoder.release()


def build(folder: Path, recipe: Recipe, show: Callable[[str], None] = lambda line: None) -> bool:
    """Write the set to ``folder``; True where it was written, False where it already stood there.

    Raises:
        ValueError: ``folder`` holds something else, or a set of another recipe.
    """
    if stands(folder, asdict(recipe)):
        return False
    write = write_mp4 if recipe.format == "mp4" else write_png
    with making(folder, asdict(recipe)) as partial:
        rng = np.random.default_rng(recipe.seed)
        samples, _ = digit_samples()
        order, pictures = rng.permutation(len(samples)), photographs()
        cut = int(TRAIN_WIDTH * len(samples))
        parts = {
            "train": (order[:cut], [p[:, : int(TRAIN_WIDTH * p.shape[1])] for p in pictures]),
            "val": (order[cut:], [p[:, int((TRAIN_WIDTH + GAP) * p.shape[1]) :] for p in pictures]),
        }
        for split, (chosen, regions) in parts.items():
            for name in DIRECTIONS:
                (partial / split / name).mkdir(parents=True)
            count = getattr(recipe, split)
            for index in range(count):
                name = list(DIRECTIONS)[index % len(DIRECTIONS)]
                frames = compose(rng, regions, samples[chosen], DIRECTIONS[name], recipe)
                write(partial / split / name / f"{index:06d}", frames)
                show(f"{split}: {index + 1}/{count} clips")
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.datasets.moving_digits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where the set goes")
    for name, text in (
        ("train", "training clips"), ("val", "validation clips"), ("frames", "of a clip"),
        ("height", "of a frame, in pixels"), ("width", "of a frame, in pixels"), ("seed", "of all that is random"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=getattr(Recipe, name), help=f"{text}, default %(default)s")
    parser.add_argument("--format", default=Recipe.format, help="png (folders of frames) or mp4; default %(default)s")
    options = vars(parser.parse_args(arguments))
    folder = options.pop("folder")
    need("sklearn", "skimage", *(["cv2"] if options["format"] == "mp4" else []))
    end = "\r" if sys.stdout.isatty() else "\n"

    def show(line: str) -> None:
        if sys.stdout.isatty() or line.split("/")[0].endswith("00"):
            print(f"{line}   ", end=end, flush=True)

    try:
        recipe = Recipe(**options)
        written = build(folder, recipe, show)
    except (RuntimeError, ValueError) as error:
        parser.exit(2, f"moving_digits: {error}\n")
    state = "written to" if written else "already in"
    print(f"{recipe.train} training and {recipe.val} validation clips {state} {folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
