"""Defects of the made-up images of a captioning task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from attn_plugins.captioning.region_features import RegionFeatures, write_region_features
from tests.fairseq.captioning_helpers import change


def spoil_features(folder: Path, *image_ids: int) -> None:
    """Set a feature of each of these images to NaN."""
    arrays = {name: np.array(array) for name, array in np.load(folder / "regions.npz").items()}
    places = dict(zip(arrays["image_ids"].tolist(), arrays["offsets"].tolist()))
    for image_id in image_ids:
        arrays["features"][places[image_id], 2] = np.nan
    np.savez(folder / "regions.npz", **arrays)


def _other_image(folder: Path, image: int = 102) -> None:
    change(folder / "captions.json", lambda c: c["annotations"][2 * (image - 100)].update(image_id=7))


def _empty_caption(folder: Path, image: int = 102) -> None:
    change(folder / "captions.json", lambda c: c["annotations"][2 * (image - 100) + 1].update(caption=" .. "))


def _unknown_image(folder: Path, image: int = 555) -> None:
    change(folder / "splits.json", lambda c: c["images"].append({"cocoid": image, "split": "train"}))


def _twice(folder: Path, image: int = 102) -> None:
    change(folder / "splits.json", lambda c: c["images"].append({"cocoid": image, "split": "test"}))


def _unknown_attribute(folder: Path, image: int = 102) -> None:
    change(folder / "attributes.json", lambda c: c[str(image)].append(["zebra", 0.5]))


def _no_attributes(folder: Path, image: int = 102) -> None:
    change(folder / "attributes.json", lambda c: c.update({str(image): []}))


def _unattributed(folder: Path, image: int = 102) -> None:
    change(folder / "attributes.json", lambda c: c.pop(str(image)))


def _rewritten(folder: Path, edit: Any) -> None:
    regions = RegionFeatures(folder / "regions.npz")
    images = [(i, regions.regions(i)) for i in regions.image_ids]
    (folder / "regions.npz").unlink()
    write_region_features(folder / "regions.npz", [image for image in map(edit, images) if image])


def _no_image(folder: Path, image: int = 102) -> None:
    _rewritten(folder, lambda im: im if im[0] != image else None)


def _no_regions(folder: Path, image: int = 102) -> None:
    _rewritten(folder, lambda im: im if im[0] != image else (image, {name: x[:0] for name, x in im[1].items()}))


BAD_SAMPLES = {
    _other_image: (r"captions\.json: caption 4 belongs to image 7, which is not in its list of images", 31),
    _empty_caption: (r"captions\.json: caption 5 of image 102 is empty, got ' \.\. '", 31),
    _unknown_image: (r"splits\.json: image 555 is not in .*captions\.json", 32),
    _twice: (r"splits\.json: image 102 appears twice, in train and in test", 32),
    _unknown_attribute: (r"attributes\.json: attribute 'zebra' of image 102 is not in the dictionary", 32),
    _no_attributes: (r"attributes\.json: image 102 has no attributes", 30),
    _unattributed: (r"attributes\.json has no image 102", 30),
    _no_image: (r"regions\.npz has no image 102", 30),
    _no_regions: (r"regions\.npz: image 102 has no regions", 30),
}
