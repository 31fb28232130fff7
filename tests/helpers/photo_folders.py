"""Small folders of photographs in the layout of ``tools.train``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from skimage import data

SCENES = {"cat": data.chelsea, "coffee": data.coffee, "rocket": data.rocket}


def make_photographs(root: Path, train: int, val: int, size: tuple[int, int] = (48, 64)) -> Path:
    """Write ``train`` and ``val`` crops of three photographs as JPEG files of (H, W) pixels."""
    generator = np.random.default_rng(0)
    for name, picture in SCENES.items():
        pixels = np.asarray(Image.fromarray(picture()).resize((160, 120)))
        for half, count in (("train", train), ("val", val)):
            folder = root / half / name
            folder.mkdir(parents=True)
            for n in range(count):
                y, x = generator.integers(0, (120 - size[0], 160 - size[1]))
                Image.fromarray(pixels[y : y + size[0], x : x + size[1]]).save(folder / f"{n:03}.jpg")
    return root
