"""A drawn captioned set: a colored shape on each picture, and two captions that name both."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

COLORS = ("red", "green", "blue", "black")
SHAPES = ("circle", "square", "bar")
PARTS = ("train", "train", "train", "train", "val", "test")


def draw(folder: Path, number: int = 12, side: int = 64) -> Path:
    """Write images 1, 2, ... to ``folder/images``, ``captions.json`` and ``splits.json``; the third is not square."""
    (folder / "images").mkdir(parents=True)
    rng = np.random.default_rng(0)
    images, annotations, splits = [], [], []
    for i in range(1, number + 1):
        color, shape, part = COLORS[i % 4], SHAPES[i % 3], PARTS[i % 6]
        noise = rng.integers(-40, 40, (side - 24 * (i == 3), side, 3))
        picture = Image.fromarray(np.clip(rng.integers(40, 256, 3) + noise, 0, 255).astype(np.uint8))
        x, y = rng.integers(0, side // 4, 2)
        box = (x, y, x + side // 2, y + side // 2 // (1 + 3 * (shape == "bar")))
        pen = ImageDraw.Draw(picture)
        (pen.ellipse if shape == "circle" else pen.rectangle)(box, fill=color)
        name = f"{i:06}.jpg"
        picture.save(folder / "images" / name)
        texts = [f"A {color} {shape}.", f"there is a {shape} that is {color}"]
        images.append(dict(id=i, file_name=name))
        annotations += [dict(id=10 * i + n, image_id=i, caption=text) for n, text in enumerate(texts)]
        sentences = [dict(tokens=text.lower().strip(".").split(), raw=text) for text in texts]
        splits.append(dict(cocoid=i, filename=name, split=part, sentences=sentences))
    (folder / "captions.json").write_text(json.dumps(dict(images=images, annotations=annotations)))
    (folder / "splits.json").write_text(json.dumps(dict(images=splits)))
    return folder
