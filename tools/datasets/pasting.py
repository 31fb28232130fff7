"""Shared parts of the pasted sets: photographs, handwritten digits, free places, annotations."""

from __future__ import annotations

from functools import cache

import numpy as np
from PIL import Image

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TURN = 18.0  # maximum rotation of a digit in degrees, either way
SAMPLE_IMAGES = ("china", "flower")  # scikit-learn's; all others are scikit-image's


@cache
def photograph(name: str) -> np.ndarray:
    """Return a packaged photograph, (H, W, 3) uint8, read-only."""
    if name in SAMPLE_IMAGES:
        from sklearn.datasets import load_sample_image

        image = load_sample_image(f"{name}.jpg")
    else:
        from skimage import data

        image = data.stereo_motorcycle()[0] if name == "motorcycle" else getattr(data, name)()
    return np.repeat(image[..., None], 3, 2) if image.ndim == 2 else image


def digit_samples() -> tuple[np.ndarray, np.ndarray]:
    """Return the handwritten digits: opacity (1797, 8, 8) in 0..1, and the digit of each."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images / 16.0, digits.target


def draw_digit(
    rng: np.random.Generator, sample: np.ndarray, side: int, turn: float = TURN, shear: float = 0.0
) -> np.ndarray:
    """Return the opacity of an 8x8 sample at ``side`` pixels, deformed and cropped to its ink.

    It is slanted by up to ``shear`` columns a row and then rotated by up to ``turn`` degrees, either way.
    """
    coarse = Image.fromarray((sample * 255).astype(np.uint8)).resize((side, side), Image.Resampling.BICUBIC)
    if shear:
        slant = rng.uniform(-shear, shear)
        wide, affine = side + round(abs(slant) * side), (1, slant, -max(slant, 0.0) * side, 0, 1, 0)
        coarse = coarse.transform((wide, side), Image.Transform.AFFINE, affine, Image.Resampling.BILINEAR)
    turned = coarse.rotate(rng.uniform(-turn, turn), Image.Resampling.BILINEAR, expand=True)
    opacity = np.clip((np.asarray(turned, float) / 255 - 0.25) / 0.3, 0, 1)  # blur -> an edge
    rows, columns = np.flatnonzero(opacity.max(1) > 0.5), np.flatnonzero(opacity.max(0) > 0.5)
    return opacity[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


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


def paste(canvas: np.ndarray, corner: tuple[int, int], opacity: np.ndarray, colour: np.ndarray) -> tuple[slice, slice]:
    """Blend ``opacity`` (h, w) of a ``colour``, (3,) or (h, w, 3), into ``canvas`` (H, W, 3); return its window."""
    (top, left), (height, width), alpha = corner, opacity.shape, opacity[..., None]
    window = slice(top, top + height), slice(left, left + width)
    canvas[window] = alpha * colour + (1 - alpha) * canvas[window]
    return window


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
