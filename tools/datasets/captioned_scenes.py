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
SMALLEST = 64  # pixels: objects in smaller pictures are too small to recognise


@dataclass(frozen=True)
class Recipe(BaseRecipe):
    """Parameters of the set: pictures of each part, side in pixels, captions per picture."""

    train: int = option(400, "images")
    val: int = option(100, "images")
    test: int = option(100, "images")
    size: int = option(128, "side in pixels")
    captions: int = option(5, "per image")
    seed: int = option(0, "of all random numbers")
    version: int = 2

    def __post_init__(self) -> None:
        for name, least, unit in [*((part, 1, " image") for part in PARTS), ("size", SMALLEST, " pixels")]:
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}{unit}, got {getattr(self, name)}")
        if not 2 <= self.captions <= 10:
            raise ValueError(f"captions must be 2 to 10 a picture, got {self.captions}")


class Annotations:
    """Content of the JSON files, collected scene by scene."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.images: list[dict] = []
        self.captions: list[dict] = []
        self.objects: list[dict] = []
        self.karpathy: list[dict] = []
        self.categories = [dict(id=n + 1, name=kind) for n, kind in enumerate(NOUNS)]

    def add(self, part: str, name: str, scene: Scene, masks: list[list[np.ndarray]], captions: list[str]) -> None:
        number = len(self.images) + 1
        size = dict(height=scene.side, width=scene.side)
        self.images.append(dict(id=number, file_name=name, **size, background=scene.background, split=part))
        for group, own in enumerate(masks):
            kind, colour = scene.groups[group].kind, scene.groups[group].colour
            category = list(NOUNS).index(kind) + 1
            for mask in own:
                row = annotation(len(self.objects) + 1, number, category, mask)
                self.objects.append({**row, "colour": colour, "group": group})
        sentences: list[dict[str, Any]] = []
        for caption in captions:
            row = dict(id=len(self.captions) + 1, image_id=number, caption=caption)
            self.captions.append(row)
            sentences.append(dict(tokens=caption.split(), raw=caption, imgid=number - 1, sentid=row["id"]))
        ids = [sentence["sentid"] for sentence in sentences]
        place = dict(cocoid=number, imgid=number - 1, filepath="images", filename=name, split=part)
        self.karpathy.append({**place, "sentids": ids, "sentences": sentences})

    def files(self) -> dict[str, Any]:
        """Return path and content of each file."""
        info = dict(description="scenes of pasted objects", version=str(self.recipe.version))
        content: dict[str, Any] = {
            "captions.json": dict(info=info, images=self.images, annotations=self.captions),
            "splits.json": dict(dataset="captioned_scenes", images=self.karpathy),
        }
        objects = dict(info=info, images=self.images, annotations=self.objects, categories=self.categories)
        content["annotations/objects.json"] = objects
        for part in PARTS:
            images = [image for image in self.images if image["split"] == part]
            kept = {image["id"] for image in images}
            own = [row for row in self.objects if row["image_id"] in kept]
            content[f"annotations/objects_{part}.json"] = {**objects, "images": images, "annotations": own}
        return content


@builder
def build(folder: Path, recipe: Recipe, show: Show) -> None:
    """Write the set to ``folder``."""
    need("pycocotools")
    (folder / "images").mkdir()
    (folder / "annotations").mkdir()
    rng = np.random.default_rng(recipe.seed)
    samples, targets = digit_samples()
    cuts = (np.cumsum(SHARES)[:-1] * len(samples)).astype(int)
    annotations = Annotations(recipe)
    for part, chosen in zip(PARTS, np.split(rng.permutation(len(samples)), cuts)):
        painter = Painter(rng, recipe.size, samples[chosen], targets[chosen])
        count = getattr(recipe, part)
        for index in range(count):
            scene, pixels, masks = painter.paint()
            name = f"{len(annotations.images) + 1:06d}.jpg"
            Image.fromarray(pixels).save(folder / "images" / name, quality=92)
            annotations.add(part, name, scene, masks, describe(rng, scene, recipe.captions))
            show(f"{part}: {index + 1}/{count} images")
    for file, content in annotations.files().items():
        (folder / file).write_text(json.dumps(content))


def main(arguments: list[str] | None = None) -> int:
    content = "{train} train, {val} val, {test} test images"
    return command("captioned_scenes", __doc__, Recipe, build, content, arguments)


if __name__ == "__main__":
    sys.exit(main())
