"""Create a small set of clips from real images, without downloads: digits that move over dimmed photographs.

The class of a clip is the constant direction in which a digit moves. With four directions a second digit jumps on the
other axis: its places are those of such a movement in a random order. Digits are scikit-learn's, photographs those in
scikit-learn and scikit-image; train and val share neither a digit sample nor a photograph pixel::

    python -m tools.datasets.moving_digits data/moving
    python -m tools.datasets.moving_digits data/moving --directions 2 --train 3000
    python -m tools.datasets.moving_digits data/moving --frames 8 --height 64 --width 96 --speed 0.04 0.08 --format mp4

    data/moving/{train,val}/{down,left,right,up}/000000/000.png    or .../000000.mp4
    data/moving/recipe.json

A clip is drawn as follows, for digit m that moves and digit j that jumps, each with its own sample, rotation, side,
colour, speed v and start, all from the same distributions::

    place of m in frame t      start_m + v_m * t * direction                      t = 0 ... T - 1
    place of j in frame t      start_j + v_j * order[t] on the other axis         order: a random one of all T! orders

The start is uniform over all places from which the digit stays in the picture; if there is none, the speed is reduced.
Which digit covers the other is random, too. So the frames of a clip, in an unknown order, have the same distribution
for all classes: reversed, they are a clip of the opposite direction, and in the order of j one of the other axis.
Neither a frame nor the average of all frames reveals the class, and no model that ignores their order, such as
``pattern='space'``, can do better than chance. There are two limits: the index of a frame reveals a little (what moves
right starts further left), and so does the spacing if a model uses fewer frames than the clip has: use all. One clip
in T!/2 has a digit j that moves steadily by chance. With two directions, left and right, there is no j: reversed, the
frames are already a clip of the other class.

The same recipe gives the same pixels on every run. MPEG-4 stores differences between frames, and decoded frames keep
traces of them: use PNG if single frames must not contain any information on the direction.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tools import need
from tools.datasets.digits_on_photographs import GAP, TRAIN_WIDTH, crop_background, photographs
from tools.datasets.pasting import digit_samples, draw_digit
from tools.datasets.recipes import is_made, new_folder

DIRECTIONS = {"down": (1, 0), "left": (0, -1), "right": (0, 1), "up": (-1, 0)}  # in rows and columns
CHOICES = {2: ("left", "right"), 4: ("down", "left", "right", "up")}
FORMATS = ("png", "mp4")
BACKGROUND = 0.35  # factor of a photograph's brightness
COLOUR = (170.0, 255.0)  # range of a digit's red, green and blue
FRAME_RATE = 8.0
SMALLEST = 32  # minimum side in pixels


@dataclass(frozen=True)
class Recipe:
    """Parameters of the set.

    Attributes:
        train: Training clips, of all classes in turn.
        val: Validation clips.
        frames: Frames of a clip.
        height: Height in pixels, even, as MPEG-4 requires.
        width: Width, likewise.
        directions: 4, or 2: left and right.
        speed: Minimum and maximum speed per frame, relative to the picture's height.
        side: Minimum and maximum side of a digit, relative to the picture's height.
        format: ``'png'``: a clip is a folder of frames, or ``'mp4'``.
        seed: Seed of all random numbers.
    """

    train: int = 8000
    val: int = 400
    frames: int = 4
    height: int = 32
    width: int = 32
    directions: int = 4
    speed: tuple[float, float] = (0.15, 0.2)
    side: tuple[float, float] = (0.3, 0.4)
    format: str = "png"
    seed: int = 0
    version: int = 2

    def __post_init__(self) -> None:
        for name, least in (("train", 1), ("val", 1), ("frames", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("height", "width"):
            if getattr(self, name) < SMALLEST or getattr(self, name) % 2:
                raise ValueError(f"{name} must be even and at least {SMALLEST} pixels, got {getattr(self, name)}")
        if self.directions not in CHOICES:
            raise ValueError(f"directions must be 2 or 4, got {self.directions}")
        for name in ("speed", "side"):
            least, greatest = getattr(self, name)
            if not 0 < least <= greatest <= 0.5:
                raise ValueError(f"{name} must be two shares, 0 < least <= greatest <= 0.5, got {least} {greatest}")
        if self.side[0] * self.height < 6:
            raise ValueError(f"side must be at least 6 pixels, got {self.side[0]} of {self.height}")
        if self.format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {self.format!r}")

    def stamp(self) -> dict[str, Any]:
        """Return the recipe as JSON stores it."""
        return json.loads(json.dumps(asdict(self)))


def places(rng: np.random.Generator, shape: tuple[int, int], axis: int, recipe: Recipe) -> np.ndarray:
    """Return the places (T, 2), in rows and columns, of a digit that moves along ``axis`` at a random speed."""
    room = [recipe.height - shape[0], recipe.width - shape[1]]
    steps = recipe.frames - 1
    speed = min(recipe.height * rng.uniform(*recipe.speed), room[axis] / steps)
    room[axis] -= speed * steps
    found = np.repeat([[rng.uniform(0, room[0]), rng.uniform(0, room[1])]], recipe.frames, 0)
    found[:, axis] += speed * np.arange(recipe.frames)
    return np.floor(found + 0.5).astype(int)


def compose(
    rng: np.random.Generator, regions: list[np.ndarray], samples: np.ndarray, direction: tuple[int, int], recipe: Recipe
) -> np.ndarray:
    """Compose one clip, (T, H, W, 3) uint8."""
    T, axis = recipe.frames, int(direction[0] == 0)
    moves = np.arange(T)[:: direction[axis]]
    background = BACKGROUND * crop_background(rng, regions, (recipe.height, recipe.width))
    digits = []
    orders = {axis: moves, 1 - axis: rng.permutation(T)} if recipe.directions > 2 else {axis: moves}
    for along, order in orders.items():
        side = round(recipe.height * rng.uniform(*recipe.side))
        digit = draw_digit(rng, samples[rng.integers(len(samples))], side)
        digits.append((digit[..., None], rng.uniform(*COLOUR, 3), places(rng, digit.shape, along, recipe)[order]))
    frames = np.repeat(background[None], T, 0)
    for which in rng.permutation(len(digits)):
        alpha, colour, corners = digits[which]
        for frame, (top, left) in zip(frames, corners):
            window = frame[top : top + alpha.shape[0], left : left + alpha.shape[1]]
            window[:] = alpha * colour + (1 - alpha) * window
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
        encoder.write(np.ascontiguousarray(frame[..., ::-1]))  # OpenCV expects BGR
    encoder.release()


def build(folder: Path, recipe: Recipe, show: Callable[[str], None] = lambda line: None) -> bool:
    """Write the set to ``folder``; return False if it already existed.

    Raises:
        ValueError: ``folder`` holds something else, or a set of another recipe.
    """
    if is_made(folder, recipe.stamp()):
        return False
    write = write_mp4 if recipe.format == "mp4" else write_png
    with new_folder(folder, recipe.stamp()) as partial:
        rng = np.random.default_rng(recipe.seed)
        samples, _ = digit_samples()
        order, pictures = rng.permutation(len(samples)), photographs()
        cut = int(TRAIN_WIDTH * len(samples))
        parts = {
            "train": (order[:cut], [p[:, : int(TRAIN_WIDTH * p.shape[1])] for p in pictures]),
            "val": (order[cut:], [p[:, int((TRAIN_WIDTH + GAP) * p.shape[1]) :] for p in pictures]),
        }
        for split, (chosen, regions) in parts.items():
            names = CHOICES[recipe.directions]
            for name in names:
                (partial / split / name).mkdir(parents=True)
            count = getattr(recipe, split)
            for index in range(count):
                name = names[index % len(names)]
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
    parser.add_argument("folder", type=Path, help="output folder")
    for name, text in (
        ("train", "training clips"), ("val", "validation clips"), ("frames", "frames of a clip"),
        ("height", "in pixels"), ("width", "in pixels"), ("seed", "of all random numbers"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=getattr(Recipe, name), help=f"{text}, default %(default)s")
    parser.add_argument("--directions", type=int, default=Recipe.directions, help="4 (default), or 2: left and right")
    for name, text in (("speed", "speed of a digit per frame"), ("side", "side of a digit")):
        parser.add_argument(
            f"--{name}", type=float, nargs=2, default=getattr(Recipe, name), metavar=("LEAST", "GREATEST"),
            help=f"{text}, relative to the height, default %(default)s",
        )  # fmt: skip
    parser.add_argument("--format", default=Recipe.format, help="png (folders of frames) or mp4; default %(default)s")
    options = vars(parser.parse_args(arguments))
    folder = options.pop("folder")
    need("sklearn", "skimage", *(["cv2"] if options["format"] == "mp4" else []))
    end = "\r" if sys.stdout.isatty() else "\n"

    def show(line: str) -> None:
        if sys.stdout.isatty() or line.split("/")[0].endswith("00"):
            print(f"{line}   ", end=end, flush=True)

    try:
        recipe = Recipe(**{**options, "speed": tuple(options["speed"]), "side": tuple(options["side"])})
        written = build(folder, recipe, show)
    except (RuntimeError, ValueError) as error:
        parser.exit(2, f"moving_digits: {error}\n")
    state = "written to" if written else "already in"
    print(f"{recipe.train} training and {recipe.val} validation clips {state} {folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
