r"""Extract region features of a folder of pictures, for the captioner.

::

    python -m tools.caption extract data/scenes/images data/scenes/regions.npz \
        --splits data/scenes/splits.json --grid resnet10t --checkpoint work_dirs/attributes/best.safetensors

OUT is ``.npz``; ``attn_plugins.captioning.region_features`` documents its content. Three ways:

``--mmdet CONFIG [CHECKPOINT]``  any two-stage config of mmdet, including ours with attention
``--torchvision NAME``           one of torchvision's R-CNNs, such as fasterrcnn_resnet50_fpn
``--grid NAME``                  the last map of a timm backbone, pooled to a grid of cells

A detector keeps the regions above ``--score-threshold`` after non-maximum suppression within each class, but at least
the 10 best and at most 100 (as Anderson et al., 2018). Their boxes are refined, and their features are the inputs of
the classifier (``--feature map``: the mean of the RoI-aligned map).

Image ids are those of ``--splits`` (Karpathy's file) or ``--captions`` (COCO's format), and only the pictures listed
there are read; without both, all pictures of the folder are read, and the ids are the file names without suffix. With
both, ``--captions`` provides file names that are missing in ``--splits``.

The same command resumes an interrupted run and writes the same file. Pictures that are missing or broken, or that fail
in the network, are listed with the reason and left out. With ``--shard i/n`` a process extracts a share of the
pictures; ``python -m tools.caption merge OUT`` then writes the file that one process with as many threads writes. An
interrupted run may be resumed with another n. Machines share a file system for OUT.

OUT also holds the recipe by which ``tools.caption caption`` computes the regions of new pictures: the options, and the
paths of the weights.

Exit code: 0, all pictures have regions; 1, some were left out; 2, nothing was written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from attn_plugins.captioning.region_features import RegionFeaturesWriter, check_npz
from attn_plugins.captioning.region_parts import RegionParts
from tools import files
from tools.caption import shards
from tools.caption.lists import ListedImage, listed_images
from tools.caption.recipe import digest, make_extractor, recipe_of
from tools.caption.regions import Extractor, Regions, Selection
from tools.pictures import BadPicture, open_picture


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
        except Exception as error:  # affects one picture: continue with the others
            return image, None, f"{type(error).__name__}: {error}"


class Extraction:
    """Extraction of a shard's pictures, batch by batch.

    A padded batch changes its members slightly. Therefore batches do not depend on the shards, and a resumed run
    computes some pictures again.
    """

    def __init__(self, images: Sequence[ListedImage], extractor: Extractor, run: shards.Run) -> None:
        self.images, self.extractor, self.run = images, extractor, run

    def __call__(self, options: argparse.Namespace) -> None:
        """Append the regions of the shard's remaining pictures."""
        size, done = options.batch_size, self.run.done
        batches = [range(i, min(i + size, len(self.images))) for i in range(0, len(self.images), size)]
        own = self.run.shard.of(batches)
        left = [batch for batch in own if any(str(self.images[i].id) not in done for i in batch)]
        loader: Any = DataLoader(
            Prepared(self.images, self.extractor),
            batch_sampler=[list(batch) for batch in left],
            num_workers=options.workers,
            collate_fn=list,
        )
        total, rest = sum(map(len, own)), sum(map(len, left))
        lines = dict(miniters=max(1, total // 20), mininterval=0, bar_format="{l_bar}{n}/{total}, {remaining} left\n")
        look = {} if sys.stderr.isatty() else lines  # in a log
        progress = tqdm(total=total, initial=total - rest, unit="image", **look)
        with RegionFeaturesWriter(self.run.part, options.dtype) as writer, progress:
            for batch in loader:
                for image, _, reason in batch:
                    if reason is not None:
                        self.skip(image, reason)
                for image, regions in self.extract([(image, x) for image, x, reason in batch if reason is None]):
                    if str(image.id) in done:
                        continue
                    try:
                        writer.append(image.id, regions)
                    except ValueError as error:
                        self.skip(image, str(error))
                progress.update(len(batch))

    def skip(self, image: ListedImage, reason: str) -> None:
        """Report a picture that is left out."""
        self.run.skip(image.id, reason)
        tqdm.write(f"skipped {image.path} (image {image.id}): {reason}", file=sys.stderr)

    def extract(self, batch: list[tuple[ListedImage, Any]]) -> Iterator[tuple[ListedImage, Regions]]:
        """Yield the regions of a batch; if it fails, of its pictures one by one."""
        if not batch:
            return
        try:
            regions = self.extractor([prepared for _, prepared in batch])
        except torch.cuda.OutOfMemoryError as error:
            raise ValueError(f"{error}; a smaller --batch-size needs less; --restart with it") from error
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            if len(batch) > 1:
                for one in batch:
                    yield from self.extract([one])
            elif not self.works():
                raise
            else:
                self.skip(batch[0][0], f"{type(error).__name__}: {error}")
            return
        yield from zip((image for image, _ in batch), regions)

    def works(self) -> bool:
        """Return whether the network finds regions in a plain picture; if not, the pictures are not at fault."""
        try:
            return len(self.extractor([self.extractor.prepare(Image.new("RGB", (64, 64), "grey"))])) == 1
        except Exception:
            return False


def check_out(out: Path, overwrite: bool) -> None:
    """Raise an error if ``out`` must not be written."""
    check_npz(out)
    if out.exists() and not overwrite:
        raise ValueError(f"OUT {out} already exists: --overwrite replaces it")


def run(options: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    check_out(options.out, options.overwrite)
    if options.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {options.batch_size}")
    images = listed_images(options.images, options.captions, options.splits)
    extractor = make_extractor(options, options.shard.device(options.device))
    recipe = recipe_of(options, options.out)
    settings = {**recipe["options"], "content of the list": digest([image.path.name for image in images])}
    settings.update({f"content of the {name}": file["sha256"] for name, file in recipe["files"].items()})
    plan = dict(settings=settings, images=[image.id for image in images], recipe=recipe)
    with shards.Run(work_folder(options.out), options.shard, plan, options.restart) as work:
        Extraction(images, extractor, work)(options)
    h, w = getattr(extractor, "map_size", None) or (options.grid_size,) * 2
    if min(h, w) < options.grid_size:
        print(
            f"note: the map of {options.grid} has {h} x {w} cells, so that of {options.grid_size} x "
            f"{options.grid_size} regions some are the same: a larger --size, or --grid-size {min(h, w)}",
            file=sys.stderr,
        )
    return shards.end(work, options.out, lambda: merge(options.out, options.overwrite))


def work_folder(out: Path) -> Path:
    """Return the work folder of the runs that write ``out``."""
    return out.with_name(f".{out.name}.partial")


def merge(out: Path, overwrite: bool) -> int:
    """Write ``out`` from the shards in its work folder; return the exit code.

    Raises:
        ValueError: there is nothing to write, something is left to do, or ``out`` exists.
    """
    check_out(out, overwrite)

    def save(parts: list[Path], plan: dict[str, Any]) -> None:
        regions = RegionParts(parts, plan["images"])
        if not regions.image_ids:
            raise ValueError(f"none of the {len(plan['images'])} pictures gave regions")
        files.write(out, lambda partial: regions.save(partial, plan["recipe"]), work_folder(out))
        print(f"{out}: {len(regions.image_ids)} images, {regions.rows} regions of {regions.feature_dim} channels")

    return shards.merge(work_folder(out), save)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    option = parser.add_argument
    option("images", type=Path, metavar="IMAGES", help="folder of the pictures")
    option("out", type=Path, metavar="OUT", help="file of regions, .npz")
    option("--captions", type=Path, metavar="JSON", help="file in COCO's format with the images' ids")
    option("--splits", type=Path, metavar="JSON", help="Karpathy's file with the images' ids")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--mmdet", nargs="+", metavar=("CONFIG", "CHECKPOINT"))
    way.add_argument("--torchvision", metavar="NAME")
    way.add_argument("--grid", metavar="NAME")
    weights = parser.add_mutually_exclusive_group()
    text = "weights instead of the library's own; --grid also takes those of tools.train"
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
    shards.add_arguments(parser)
