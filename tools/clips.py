"""Clips from files: videos, which OpenCV decodes, and folders of pictures."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from PIL import Image

from tools.pictures import BadPicture, open_picture

VIDEOS = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm")
PICTURES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


def is_video(path: Path) -> bool:
    """Return whether a file name is that of a video."""
    return path.suffix.lower() in VIDEOS and path.is_file()


def pictures_in(folder: Path) -> list[Path]:
    """Return the pictures of a folder, sorted by name."""
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in PICTURES)


def is_clip(path: Path) -> bool:
    """Return whether a path is a video or a folder of pictures."""
    return is_video(path) or (path.is_dir() and bool(pictures_in(path)))


def sampled(frames: int, count: int) -> list[int]:
    """Return indices of ``frames``: the middles of ``count`` equal parts.

    >>> sampled(8, 4), sampled(2, 4)
    ([1, 3, 5, 7], [0, 0, 1, 1])
    """
    return [(2 * n + 1) * frames // (2 * count) for n in range(count)]


def segments(frames: int, count: int) -> list[int]:
    """Return indices of ``frames``: a random one from each of ``count`` equal parts (Wang et al. 2016, TSN).

    Draws from torch's generator. A clip of exactly ``count`` frames is returned whole.

    >>> segments(8, 8), segments(2, 4)
    ([0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 1])
    """
    starts = [n * frames // count for n in range(count + 1)]
    return [start + int(torch.randint(max(end - start, 1), ())) for start, end in pairwise(starts)]


def strided(frames: int, count: int) -> list[int]:
    """Return ``count`` indices of ``frames`` with a random stride from a random start.

    Draws from torch's generator; all strides that fit are equally probable. A clip of fewer than ``count`` frames
    repeats some, like :func:`sampled`.

    >>> strided(8, 8), strided(2, 4)
    ([0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 1])
    """
    if frames < count:
        return sampled(frames, count)
    stride = 1 + int(torch.randint((frames - 1) // max(count - 1, 1) or 1, ()))
    first = int(torch.randint(frames - stride * (count - 1), ()))
    return [first + n * stride for n in range(count)]


SAMPLINGS: dict[str, Callable[[int, int], list[int]]] = {"uniform": sampled, "segments": segments, "stride": strided}


def open_clip(path: str | Path, count: int, sampling: str = "uniform") -> list[Image.Image]:
    """Read ``count`` frames of a clip in RGB.

    Args:
        path: A video, or a folder of pictures whose sorted names give their order in time.
        count: Number of frames; a shorter clip repeats some.
        sampling: ``'uniform'``, spread over the whole clip (:func:`sampled`), or the random ``'segments'``
            (:func:`segments`) or ``'stride'`` (:func:`strided`).

    Raises:
        BadPicture: The clip cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        return _decode(path, lambda total: SAMPLINGS[sampling](total, count))
    files = pictures_in(path)
    if not files:
        raise BadPicture(f"{path} cannot be read as a clip: it holds no picture")
    wanted = SAMPLINGS[sampling](len(files), count)
    frames = {n: open_picture(files[n]) for n in sorted(set(wanted))}
    sizes = {frame.size for frame in frames.values()}
    if len(sizes) > 1:
        raise BadPicture(f"{path} cannot be read as a clip: its pictures differ in size, {sorted(sizes)}")
    return [frames[n] for n in wanted]


def _decode(path: Path, choose: Callable[[int], list[int]]) -> list[Image.Image]:
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")  # errors are reported here
    import cv2

    if not path.is_file():
        raise BadPicture(f"{path} cannot be read as a clip: there is no such file")
    video = cv2.VideoCapture(str(path))
    try:
        total = int(video.get(cv2.CAP_PROP_FRAME_COUNT)) if video.isOpened() else 0
        if total <= 0:
            raise BadPicture(f"{path} cannot be read as a clip: it is no video that OpenCV decodes, or has no frame")
        wanted, frames = choose(total), dict[int, Image.Image]()
        for number in range(max(wanted) + 1):
            if not video.grab():
                break
            if number in wanted:
                decoded, pixels = video.retrieve()
                if not decoded:
                    break
                frames[number] = Image.fromarray(pixels[..., ::-1].copy())  # from BGR
        if len(frames) < len(set(wanted)):
            raise BadPicture(f"{path} cannot be read as a clip: it has {total} frames, and not all can be decoded")
        return [frames[n] for n in wanted]
    finally:
        video.release()
