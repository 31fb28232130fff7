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

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from tools import need
from tools.datasets.digits_on_photographs import crop_background, halves, photographs
from tools.datasets.pasting import draw_digit, paste
from tools.datasets.recipes import BaseRecipe, Show, builder, command, option

DIRECTIONS = {"down": (1, 0), "left": (0, -1), "right": (0, 1), "up": (-1, 0)}  # in rows and columns
CHOICES = {2: ("left", "right"), 4: ("down", "left", "right", "up")}
FORMATS = ("png", "mp4")
BACKGROUND = 0.35  # factor of a photograph's brightness
COLOUR = (170.0, 255.0)  # range of a digit's red, green and blue
FRAME_RATE = 8.0
SMALLEST = 32  # minimum side in pixels
RANGE = dict(type=float, nargs=2, metavar=("LEAST", "GREATEST"))


@dataclass(frozen=True)
class Recipe(BaseRecipe):
    """Parameters of the set; MPEG-4 requires an even height and width."""

    train: int = option(8000, "training clips, of all classes in turn", 1)
    val: int = option(400, "validation clips", 1)
    frames: int = option(4, "frames of a clip", 2)
    height: int = option(32, "in pixels")
    width: int = option(32, "in pixels")
    directions: int = option(4, "4, or 2: left and right")
    speed: tuple[float, float] = option((0.15, 0.2), "speed of a digit, in heights per frame", **RANGE)
    side: tuple[float, float] = option((0.3, 0.4), "side of a digit, in heights", **RANGE)
    format: str = option("png", "png (folders of frames) or mp4")
    seed: int = option(0, "of all random numbers")
    version: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
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


def places(rng: np.random.Generator, shape: tuple[int, int], axis: int, recipe: Recipe) -> np.ndarray:
    """Return the places (T, 2), in rows and columns, of a digit that moves along ``axis`` at a random speed."""
    room = [recipe.height - shape[0], recipe.width - shape[1]]
    steps = recipe.frames - 1
    speed = min(recipe.height * rng.uniform(*recipe.speed), room[axis] / steps)
    room[axis] -= speed * steps
    corners = np.repeat([[rng.uniform(0, room[0]), rng.uniform(0, room[1])]], recipe.frames, 0)
    corners[:, axis] += speed * np.arange(recipe.frames)
    return np.floor(corners + 0.5).astype(int)


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
        digits.append((digit, rng.uniform(*COLOUR, 3), places(rng, digit.shape, along, recipe)[order]))
    frames = np.repeat(background[None], T, 0)
    for which in rng.permutation(len(digits)):
        opacity, colour, corners = digits[which]
        for frame, corner in zip(frames, corners):
            paste(frame, corner, opacity, colour)
    return frames.round().clip(0, 255).astype(np.uint8)


def write_png(path: Path, frames: np.ndarray) -> None:
    """Write frames (T, H, W, 3) as 000.png and so on into the folder ``path``."""
    path.mkdir()
    for time, frame in enumerate(frames):
        Image.fromarray(frame).save(path / f"{time:03d}.png")


def write_mp4(path: Path, frames: np.ndarray) -> None:
    """Write frames (T, H, W, 3) as an MPEG-4 video; raise a RuntimeError if this build of OpenCV has no encoder."""
    import cv2

    file = path.with_suffix(".mp4")
    encoder = cv2.VideoWriter(str(file), cv2.VideoWriter_fourcc(*"mp4v"), FRAME_RATE, frames.shape[2:0:-1])
    if not encoder.isOpened():
        raise RuntimeError(f"this build of OpenCV ({cv2.__version__}) cannot write {file}: it has no MPEG-4 encoder")
    for frame in frames:
        encoder.write(np.ascontiguousarray(frame[..., ::-1]))  # OpenCV expects BGR
    encoder.release()


@builder
def build(folder: Path, recipe: Recipe, show: Show) -> None:
    """Write the set to ``folder``."""
    if recipe.format == "mp4":
        need("cv2")
    write = write_mp4 if recipe.format == "mp4" else write_png
    rng, names = np.random.default_rng(recipe.seed), CHOICES[recipe.directions]
    for split, samples, _, regions in halves(rng, photographs()):
        for name in names:
            (folder / split / name).mkdir(parents=True)
        count = getattr(recipe, split)
        for index in range(count):
            name = names[index % len(names)]
            frames = compose(rng, regions, samples, DIRECTIONS[name], recipe)
            write(folder / split / name / f"{index:06d}", frames)
            show(f"{split}: {index + 1}/{count} clips")


def main(arguments: list[str] | None = None) -> int:
    content = "{train} training and {val} validation clips"
    return command("moving_digits", __doc__, Recipe, build, content, arguments)


if __name__ == "__main__":
    sys.exit(main())
