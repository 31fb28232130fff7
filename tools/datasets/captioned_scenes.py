"""Create a set of captioned pictures from images inside packages, without downloads.

Coloured handwritten digits (scikit-learn's) and cut-outs of photographs (scikit-image's and scikit-learn's: a cat, an
astronaut, a cup of coffee, a flower, coins, a motorcycle, a horse) are pasted on crops of 14 photographs. A grammar
writes true captions from the positions of the pasted objects: "two red sevens above a blue three on a photograph of a
cat"::

    python -m tools.datasets.captioned_scenes data/scenes --train 400 --val 100 --test 100 --size 128 --seed 0

    data/scenes/images/000001.jpg           all pictures
    data/scenes/captions.json               captions in COCO's format
    data/scenes/splits.json                 the parts, in the layout of Karpathy's dataset_coco.json
    data/scenes/annotations/objects.json    boxes and masks in COCO's detection format, with colours
    data/scenes/annotations/objects_{train,val,test}.json    the same by part, to train a detector
    data/scenes/recipe.json

The result is a data folder of fairseq's task ``captioning``, without attributes and regions.

Each handwritten digit is in one part only; the photographs are in all parts, as different crops. The same recipe gives
the same annotations, byte for byte.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tools import need
from tools.datasets.pasting import annotation, digit_samples
from tools.datasets.recipes import BaseRecipe, Show, builder, command, option
from tools.datasets.scene_captions import NOUNS, Scene, describe
from tools.datasets.scene_pictures import Painter

PARTS = ("train", "val", "test")
SHARES = (0.6, 0.2, 0.2)  # of the handwritten digits


@dataclass(frozen=True)
class Recipe(BaseRecipe):
    """Parameters of the set: pictures of each part, side in pixels, captions per picture."""

    train: int = option(400, "images", 1)
    val: int = option(100, "images", 1)
    test: int = option(100, "images", 1)
    size: int = option(128, "side in pixels", 64)  # objects in smaller pictures are too small to recognise
    captions: int = option(5, "per image")
    seed: int = option(0, "of all random numbers")
    version: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.captions <= 10:
            raise ValueError(f"captions must be 2 to 10 a picture, got {self.captions}")


def paint(
    folder: Path, recipe: Recipe, show: Show
) -> Iterator[tuple[str, str, Scene, list[list[np.ndarray]], list[str]]]:
    """Write all pictures; yield part, file name, scene, masks of each group, and captions of each."""
    rng = np.random.default_rng(recipe.seed)
    samples, targets = digit_samples()
    cuts = (np.cumsum(SHARES)[:-1] * len(samples)).astype(int)
    number = 0
    for part, chosen in zip(PARTS, np.split(rng.permutation(len(samples)), cuts)):
        painter = Painter(rng, recipe.size, samples[chosen], targets[chosen])
        count = getattr(recipe, part)
        for index in range(count):
            number += 1
            scene, pixels, masks = painter.paint()
            Image.fromarray(pixels).save(folder / f"{number:06d}.jpg", quality=92)
            yield part, f"{number:06d}.jpg", scene, masks, describe(rng, scene, recipe.captions)
            show(f"{part}: {index + 1}/{count} images")


@builder
def build(folder: Path, recipe: Recipe, show: Show) -> None:
    """Write the set to ``folder``."""
    need("pycocotools")
    images, captions, objects, karpathy = list[dict](), list[dict](), list[dict](), list[dict]()
    (folder / "images").mkdir()
    for number, (part, name, scene, masks, texts) in enumerate(paint(folder / "images", recipe, show), 1):
        size = dict(height=scene.side, width=scene.side)
        images.append(dict(id=number, file_name=name, **size, background=scene.background, split=part))
        for n, (group, own) in enumerate(zip(scene.groups, masks)):
            for mask in own:
                row = annotation(len(objects) + 1, number, list(NOUNS).index(group.kind) + 1, mask)
                objects.append({**row, "colour": group.colour, "group": n})
        sentences: list[dict[str, Any]] = []
        for text in texts:
            captions.append(dict(id=len(captions) + 1, image_id=number, caption=text))
            sentences.append(dict(tokens=text.split(), raw=text, imgid=number - 1, sentid=len(captions)))
        place = dict(cocoid=number, imgid=number - 1, filepath="images", filename=name, split=part)
        karpathy.append({**place, "sentids": [s["sentid"] for s in sentences], "sentences": sentences})

    def write(file: str, content: dict[str, Any]) -> None:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(json.dumps(content))

    info = dict(description="scenes of pasted objects", version=str(recipe.version))
    write("captions.json", dict(info=info, images=images, annotations=captions))
    write("splits.json", dict(dataset="captioned_scenes", images=karpathy))
    categories = [dict(id=n + 1, name=kind) for n, kind in enumerate(NOUNS)]
    for part in (None, *PARTS):
        shown = [image for image in images if part in (None, image["split"])]
        kept = {image["id"] for image in shown}
        rows = [row for row in objects if row["image_id"] in kept]
        content = dict(info=info, images=shown, annotations=rows, categories=categories)
        write(f"annotations/objects{f'_{part}' if part else ''}.json", content)


def main(arguments: list[str] | None = None) -> int:
    content = "{train} train, {val} val, {test} test images"
    return command("captioned_scenes", __doc__, Recipe, build, content, arguments)


if __name__ == "__main__":
    sys.exit(main())
