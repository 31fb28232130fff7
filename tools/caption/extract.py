r"""Extract region features of a folder of pictures, for the captioner.

::

    python -m tools.caption extract data/own/images data/own/regions.npz --splits data/own/splits.json \
        --torchvision fasterrcnn_resnet50_fpn

OUT is ``.npz``; ``attn_plugins.captioning.region_features`` documents its content. Two ways:

``--torchvision NAME``   one of torchvision's R-CNNs, such as fasterrcnn_resnet50_fpn
``--grid NAME``          the last map of a timm backbone, pooled to a grid of cells

A detector keeps the regions above ``--score-threshold`` after non-maximum suppression within each class, but at least
the 10 best and at most 100 (as Anderson et al., 2018). Their boxes are refined, and their features are the inputs of
the classifier (``--feature map``: the mean of the RoI-aligned map).

Image ids are those of ``--splits`` (Karpathy's file) or ``--captions`` (COCO's format), and only the pictures listed
there are read; without both, all pictures of the folder are read, and the ids are the file names without suffix. With
both, ``--captions`` provides file names that are missing in ``--splits``. Pictures that are missing or broken are
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
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from attn_plugins.captioning.caption_files import ImageId
from attn_plugins.captioning.region_features import RegionFeatures, write_region_features
from tools.caption.lists import ListedImage, listed_images
from tools.caption.regions import Extractor, Regions, Selection, stored
from tools.pictures import BadPicture, open_picture

TOOL = "tools.caption extract"
OPTIONS = (  # that change the features
    "torchvision", "grid", "grid_size", "checkpoint", "no_weights", "feature", "min_regions", "max_regions",
    "score_threshold", "nms", "size", "seed", "dtype",
)  # fmt: skip


def make_extractor(options: argparse.Namespace, device: str) -> Extractor:
    """Return the requested extractor; only its own toolkit is imported."""
    weights: Any = Path(options.checkpoint) if options.checkpoint else "none" if options.no_weights else "default"
    size = options.size
    if options.grid:
        from tools.caption.grid_regions import GridRegions

        size = size and (size[0], size[-1])
        return GridRegions(options.grid, options.grid_size, weights, device, options.seed, size)
    from tools.caption.torchvision_regions import TorchvisionRegions

    selection = Selection(options.min_regions, options.max_regions, options.score_threshold, options.nms)
    size = size and (size[0], size[-1] if len(size) > 1 else 1333)
    return TorchvisionRegions(options.torchvision, selection, weights, options.feature, device, options.seed, size)


class RecordedExtractor:
    """Extractor of one picture by the options in a features file, with features in the file's precision.

    A detector's regions may differ in the last digits from the file's, which were computed in batches. ``checkpoint``
    takes the place of the recorded one; its content is not checked.

    Raises:
        ValueError: the file has no options, its checkpoint is missing or has changed, or no extractor can be built.
    """

    def __init__(self, features: RegionFeatures, device: str = "cpu", checkpoint: Path | None = None) -> None:
        self.features, recipe = features, features.recipe or {}
        options = recipe.get("options", {}) if recipe.get("tool") == TOOL else {}
        if not (options.keys() >= set(OPTIONS) and (options["grid"] or options["torchvision"])):
            raise ValueError(
                f"{features.path} lacks the options of tools.caption extract --grid or --torchvision, by which the "
                "regions of a new picture are computed"
            )
        path = Path(options["checkpoint"]) if options["checkpoint"] else None
        if checkpoint is not None and not checkpoint.is_file():
            raise ValueError(f"--region-checkpoint: {checkpoint} does not exist")
        if checkpoint is None and path is not None and recipe.get("sha256") != sha256_of(path):
            what = "has changed" if path.is_file() else "does not exist"
            raise ValueError(f"the regions in {features.path} are of {path}, which {what}: pass --region-checkpoint")
        given = {**options, "checkpoint": str(checkpoint)} if checkpoint else options
        self.dtype = np.dtype(options["dtype"])
        self.extractor = make_extractor(argparse.Namespace(**given), device)

    def __call__(self, picture: Image.Image) -> Regions:
        """Compute the regions of a picture in RGB; raise a ValueError if they are not finite or of another width."""
        [regions] = self.extractor([self.extractor.prepare(picture)])
        width, expected = regions["features"].shape[1], self.features.feature_dim
        if width != expected:
            raise ValueError(f"the regions have {width} channels, but those of {self.features.path} {expected}")
        return stored(regions, self.dtype)


def sha256_of(path: Path) -> str | None:
    """Return the hash of a file's content, or None if there is no file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


class Prepared(Dataset):
    """Pictures prepared for the extractor, or the reason why one is missing."""

    def __init__(self, images: Sequence[ListedImage], extractor: Extractor) -> None:
        self.images, self.extractor = images, extractor

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[ListedImage, Any, str | None]:
        image = self.images[index]
        if not image.path.is_file():
            return image, None, "no such file"
        try:
            return image, self.extractor.prepare(open_picture(image.path)), None
        except BadPicture as error:
            return image, None, f"cannot be read as a picture: {error.__cause__}"


def extracted(
    images: Sequence[ListedImage], extractor: Extractor, options: argparse.Namespace, skipped: list[str]
) -> Iterator[tuple[ImageId, Regions]]:
    """Yield ids and regions of pictures; report those that are left out, and add them to ``skipped``."""
    loader: Any = DataLoader(
        Prepared(images, extractor), options.batch_size, num_workers=options.workers, collate_fn=list
    )
    for batch in tqdm(loader, unit="batch"):
        good = [(image, prepared) for image, prepared, reason in batch if reason is None]
        reasons = [(image, reason) for image, _, reason in batch if reason is not None]
        for (image, _), regions in zip(good, extractor([prepared for _, prepared in good]) if good else ()):
            try:
                yield image.id, stored(regions, np.dtype(options.dtype))
            except ValueError as error:
                reasons.append((image, str(error)))
        for image, reason in reasons:
            skipped.append(f"{image.path} (image {image.id}): {reason}")
            tqdm.write(f"skipped {skipped[-1]}", file=sys.stderr)


def run(options: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    if options.out.exists() and not options.overwrite:
        raise ValueError(f"OUT {options.out} already exists: --overwrite replaces it")
    if options.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {options.batch_size}")
    images = listed_images(options.images, options.captions, options.splits)
    extractor = make_extractor(options, options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    chosen, path = {name: getattr(options, name) for name in OPTIONS}, options.checkpoint and Path(options.checkpoint)
    recipe = dict(tool=TOOL, options=chosen)
    if path:
        chosen["checkpoint"], recipe["sha256"] = str(path.resolve()), sha256_of(path)
    skipped: list[str] = []
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
    option("out", type=Path, metavar="OUT", help="file of regions, .npz")
    option("--captions", type=Path, metavar="JSON", help="file in COCO's format with the images' ids")
    option("--splits", type=Path, metavar="JSON", help="Karpathy's file with the images' ids")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--torchvision", metavar="NAME")
    way.add_argument("--grid", metavar="NAME")
    weights = parser.add_mutually_exclusive_group()
    text = "weights instead of the library's own; --grid also takes the attribute detector's"
    weights.add_argument("--checkpoint", metavar="FILE", help=text)
    weights.add_argument("--no-weights", action="store_true", help="random weights, the same for the same --seed")
    option("--grid-size", type=int, default=7, metavar="N", help="cells of a side, default %(default)s")
    text = "--grid: height and width; --torchvision: shorter and longer side; default: the model's own"
    option("--size", type=int, nargs="+", metavar="PIXELS", help=text)
    option("--feature", choices=("classifier", "map"), default="classifier")
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
