r"""Extract region features of a folder of pictures, for the captioner.

::

    python -m tools.caption extract data/own/images data/own/regions.hdf5 --splits data/own/splits.json \
        --torchvision fasterrcnn_resnet50_fpn

OUT is ``.hdf5``; ``attn_plugins.captioning.region_features`` documents its content. ``--torchvision`` names one of
torchvision's R-CNNs, ``--grid`` a timm backbone, whose last map is pooled to a grid of cells.

A detector keeps the regions above ``--score-threshold`` after non-maximum suppression within each class, but at least
the 10 best and at most 100 (as Anderson et al., 2018). Their boxes are refined, and their features are the inputs of
the classifier.

Image ids are those of ``--splits`` (Karpathy's file), and only the pictures listed there are read; without it, all
pictures of the folder are read, and the ids are the file names without suffix. Pictures that are missing or broken are
listed with the reason and left out.

OUT also holds the options, by which ``tools.caption caption`` computes the regions of new pictures.

Exit code: 0, all pictures have regions; 1, some were left out; 2, nothing was written.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from attn_plugins.captioning.caption_files import ImageId
from attn_plugins.captioning.region_features import RegionFeatures, write_region_features
from tools import torch_device
from tools.caption.lists import ListedImage, listed_images
from tools.caption.regions import GridRegions, Regions, Selection, TorchvisionRegions, as_stored
from tools.pictures import BadPicture, open_picture

TOOL = "tools.caption extract"
OPTIONS = (  # that change the features
    "torchvision", "grid", "grid_size", "checkpoint", "no_weights", "min_regions", "max_regions",
    "score_threshold", "nms", "size", "seed", "dtype",
)  # fmt: skip


def make_extractor(options: argparse.Namespace, device: Any) -> Any:
    """Return the requested extractor."""
    return GridRegions(options, device) if options.grid else TorchvisionRegions(options, device)


class RecordedExtractor:
    """Extractor of one picture by the options in a features file, with features in the file's precision.

    A detector's regions may differ in the last digits from the file's, which were computed in batches. ``checkpoint``
    is where the extractor's checkpoint lies now.

    Raises:
        ValueError: The file has no options, its checkpoint is missing or has changed, or no extractor can be built.
    """

    def __init__(self, features: RegionFeatures, device: Any = "cpu", checkpoint: Path | None = None) -> None:
        self.features, recipe = features, features.recipe or {}
        options = recipe.get("options", {}) if recipe.get("tool") == TOOL else {}
        if not options.keys() >= set(OPTIONS):
            raise ValueError(
                f"{features.path} lacks the options of {TOOL}, by which the regions of a new picture are computed"
            )
        path = options["checkpoint"] and Path(checkpoint or options["checkpoint"])
        if path and recipe.get("sha256") != sha256_of(path):
            what = "is another file" if path.is_file() else "does not exist"
            raise ValueError(f"{path} {what}: the regions in {features.path} need it, pass --region-checkpoint")
        options["checkpoint"] = path
        self.dtype = np.dtype(options["dtype"])
        self.extractor = make_extractor(argparse.Namespace(**options), device)

    def __call__(self, picture: Image.Image) -> np.ndarray:
        """Compute the features of a picture in RGB; raise a ValueError if they are not finite or of another width."""
        [regions] = self.extractor([self.extractor.prepare(picture)])
        width, expected = regions["features"].shape[1], self.features.feature_dim
        if width != expected:
            raise ValueError(f"the regions have {width} channels, but those of {self.features.path} {expected}")
        return as_stored(regions["features"], self.dtype)


def sha256_of(path: Path) -> str | None:
    """Return the hash of a file's content, or None if there is no file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


class Prepared(Dataset):
    """Pictures prepared for the extractor, or the reason why one is missing."""

    def __init__(self, images: Sequence[ListedImage], extractor: Any) -> None:
        self.images, self.extractor = images, extractor

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[ListedImage, tuple[int, int], Any, str | None]:
        image = self.images[index]
        try:
            picture = open_picture(image.path)
            return image, picture.size, self.extractor.prepare(picture), None
        except BadPicture as error:
            return image, (0, 0), None, str(error)


def extracted(
    images: Sequence[ListedImage], extractor: Any, options: argparse.Namespace, skipped: list[ImageId]
) -> Iterator[tuple[ImageId, Regions]]:
    """Yield ids and regions of pictures; report those that are left out, and add them to ``skipped``."""
    prepared = Prepared(images, extractor)
    loader: Any = DataLoader(prepared, options.batch_size, num_workers=options.workers, collate_fn=list)
    for batch in tqdm(loader, unit="batch"):
        inputs = [one for *_, one, reason in batch if reason is None]
        regions = iter(extractor(inputs) if inputs else ())
        for image, size, _, reason in batch:
            try:
                if reason is not None:
                    raise ValueError(reason)
                own = next(regions)
                features = as_stored(own["features"], np.dtype(options.dtype))
                yield image.id, dict(features=features, boxes=own["boxes"] * np.array([*size, *size]))
            except ValueError as error:
                skipped.append(image.id)
                tqdm.write(f"skipped image {image.id}: {error}", file=sys.stderr)


def run(options: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    if options.out.exists() and not options.overwrite:
        raise ValueError(f"OUT {options.out} already exists: --overwrite replaces it")
    if options.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {options.batch_size}")
    if options.size and (len(options.size) > 2 or min(options.size) < 1):
        raise ValueError(f"--size must be one or two numbers of pixels, at least 1 each, got {options.size}")
    images = listed_images(options.images, options.splits)
    extractor = make_extractor(options, torch_device(options.device))
    recipe = dict(tool=TOOL, options={name: getattr(options, name) for name in OPTIONS})
    if options.checkpoint:
        recipe["options"]["checkpoint"] = str(options.checkpoint.resolve())
        recipe["sha256"] = sha256_of(options.checkpoint)
    skipped: list[ImageId] = []
    write_region_features(options.out, extracted(images, extractor, options, skipped), options.dtype, recipe)
    features = RegionFeatures(options.out)
    print(f"{options.out}: {len(features)} images with regions of {features.feature_dim} channels")
    if skipped:
        print(f"{len(skipped)} of {len(images)} pictures were skipped", file=sys.stderr)
    return 1 if skipped else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    option = parser.add_argument
    option("images", type=Path, metavar="IMAGES", help="folder of the pictures")
    option("out", type=Path, metavar="OUT", help="file of regions, .hdf5")
    option("--splits", type=Path, metavar="JSON", help="Karpathy's file with the images' ids")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--torchvision", metavar="NAME")
    way.add_argument("--grid", metavar="NAME")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--checkpoint", type=Path, metavar="FILE", help="weights instead of the library's own")
    weights.add_argument("--no-weights", action="store_true", help="random weights, the same for the same --seed")
    option("--grid-size", type=int, default=7, metavar="N", help="cells of a side, default %(default)s")
    text = "--grid: height and width; --torchvision: shorter and longer side; default: the model's own"
    option("--size", type=int, nargs="+", metavar="PIXELS", help=text)
    option("--min-regions", type=int, default=Selection.minimum, help="default %(default)s")
    option("--max-regions", type=int, default=Selection.maximum, help="default %(default)s")
    option("--score-threshold", type=float, default=Selection.threshold, help="default %(default)s")
    option("--nms", type=float, default=Selection.iou, metavar="IOU", help="default %(default)s")
    option("--batch-size", type=int, default=4, help="default %(default)s")
    option("--workers", type=int, default=0, help="processes that read pictures, default %(default)s")
    option("--dtype", choices=("float16", "float32"), default="float16", help="default %(default)s")
    option("--seed", type=int, default=0, help="seed of random weights, default %(default)s")
    option("--overwrite", action="store_true", help="replace OUT")
    option("--device", help="default: cuda where there is one, else cpu")
