"""Region features of a folder of pictures, for the captioner.

::

    python -m tools.captioning.extract_regions data/scenes/images data/scenes/regions.npz \\
        --splits data/scenes/splits.json --grid resnet10t --checkpoint work_dirs/attributes/best.safetensors

OUT is ``.npz``, ``.h5`` (h5py) or ``.lmdb`` (lmdb); ``attn_plugins.captioning.region_features`` tells its content.
Three ways:

``--mmdet CONFIG [CHECKPOINT]``  any two-stage config of mmdet, also our attended ones
``--torchvision NAME``           one of torchvision's R-CNNs, such as fasterrcnn_resnet50_fpn
``--grid NAME``                  the last map of a timm backbone, pooled to a grid of cells

A detector keeps the regions above ``--score-threshold`` after suppression within each class, but at least the 10 best
and at most 100 (as Anderson et al., 2018); their boxes are the refined ones, and their features what the classifier
reads of them (``--feature map``: the mean of the RoI-aligned map).

Image ids are those of ``--splits`` (Karpathy's file) or ``--captions`` (COCO's format), and only the pictures named
there are read; without both, all pictures of the folder are, and their ids are the names without suffix. With both,
``--captions`` tells the names of files that ``--splits`` does not.

What is done is kept in a folder beside OUT: the same command goes on where it was interrupted, and gives the same file.
A picture that is missing, broken or fails in the network is named with its reason and left out.

OUT also holds the recipe, by which ``tools.caption`` computes the regions of new pictures: the options, and where the
weights lie.

Exit code: 0, all pictures are in OUT; 1, OUT is written without some, which are named; 2, nothing was written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from tools.requires import extras, need

with extras("captioning", "timm", "tools"):
    import torch
    from torch.utils.data import DataLoader, Dataset

    from attn_plugins.captioning.region_features import RegionFeaturesWriter
    from attn_plugins.captioning.region_formats import PACKAGES, package_of
    from tools import files
    from tools.captioning.image_list import ImageId, ListedImage, listed_images
    from tools.captioning.json_files import BadFile
    from tools.captioning.region_recipe import make_extractor, recipe_of
    from tools.captioning.regions import BadExtractor, Extractor, Regions, Selection
    from tools.pictures import BadPicture, open_picture


class Prepared(Dataset):
    """Pictures as the extractor takes them, or why there is none."""

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
        except Exception as error:  # of one picture: the others go on
            return image, None, f"{type(error).__name__}: {error}"


class Extraction:
    """Goes through the pictures batch by batch and keeps what comes."""

    def __init__(self, writer: RegionFeaturesWriter, extractor: Extractor) -> None:
        self.writer, self.extractor = writer, extractor
        self.skipped: dict[ImageId, str] = {}
        self.worked = False  # a first failure of the network is the network's, not the picture's

    def run(self, images: Sequence[ListedImage], batch_size: int, workers: int) -> None:
        """Append the regions of all pictures that the writer does not have yet."""
        done = set(map(str, self.writer.image_ids))
        # A padded batch changes its members a little: batches are the same in a run that goes on, some computed again.
        batches = [range(i, min(i + batch_size, len(images))) for i in range(0, len(images), batch_size)]
        left = [list(batch) for batch in batches if any(str(images[i].id) not in done for i in batch)]
        loader: Any = DataLoader(
            Prepared(images, self.extractor), batch_sampler=left, num_workers=workers, collate_fn=list
        )
        progress = Progress(len(images), len(images) - sum(map(len, left)))
        for batch in loader:
            for image, _, reason in batch:
                if reason is not None:
                    self.skip(image, reason)
            good = [(image, prepared) for image, prepared, reason in batch if reason is None]
            for image, regions in self.extract(good):
                if str(image.id) in done:
                    continue
                try:
                    self.writer.append(image.id, regions)
                except ValueError as error:
                    self.skip(image, str(error))
            progress.add(len(batch), len(self.skipped))

    def skip(self, image: ListedImage, reason: str) -> None:
        """Name a picture that is left out."""
        self.skipped[image.id] = reason
        print(f"\nskipped {image.path} (image {image.id}): {reason}", file=sys.stderr, flush=True)

    def extract(self, batch: list[tuple[ListedImage, Any]]) -> Iterator[tuple[ListedImage, Regions]]:
        """The regions of a batch; where it fails, of its pictures one by one."""
        if not batch:
            return
        try:
            found = self.extractor([prepared for _, prepared in batch])
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            if len(batch) > 1:
                for one in batch:
                    yield from self.extract([one])
            elif not self.worked:
                raise
            else:
                self.skip(batch[0][0], f"{type(error).__name__}: {error}")
            return
        self.worked = True
        yield from zip((image for image, _ in batch), found)


class Progress:
    """A line that tells how far it is: rewritten on a terminal, else one every twentieth part."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done, self.began, self.first = total, done, time.monotonic(), done
        self.terminal, self.shown = sys.stdout.isatty(), -1

    def add(self, number: int, skipped: int) -> None:
        self.done += number
        part = 20 * self.done // self.total
        if not self.terminal and part == self.shown:
            return
        self.shown = part
        rate = (self.done - self.first) / max(time.monotonic() - self.began, 1e-9)
        left = timedelta(seconds=round((self.total - self.done) / rate))
        line = f"{self.done}/{self.total} images, {rate:.1f} a second, left {left}"
        line += f", {skipped} skipped" if skipped else ""
        print(f"{line}   ", end="\r" if self.terminal and self.done < self.total else "\n", flush=True)


def open_writer(
    folder: Path, recipe: dict[str, Any], images: Sequence[ListedImage], restart: bool
) -> RegionFeaturesWriter:
    """A new writer, or that of an interrupted run of the same recipe.

    Raises:
        BadFile: the run was of another one.
    """
    if restart:
        shutil.rmtree(folder, ignore_errors=True)
    names = json.dumps([[image.id, image.path.name] for image in images])
    own = dict(recipe["options"], images=hashlib.sha256(names.encode()).hexdigest())
    own.update({f"content of the {name}": found["sha256"] for name, found in recipe["files"].items()})
    file = folder / "recipe.json"
    if file.is_file():
        before = json.loads(file.read_text())
        for name, value in json.loads(json.dumps(own)).items():
            if before.get(name) != value:
                what = f"{name} = {before.get(name)!r}, not {value!r}"
                what = "other images" if name == "images" else f"another {name}" if name.startswith("content") else what
                raise BadFile(f"{folder} is of an interrupted run with {what}: --restart begins anew")
    else:
        files.write_text(file, json.dumps(own))
    return RegionFeaturesWriter(folder, recipe["options"]["dtype"])


def extract(options: argparse.Namespace) -> int:
    """What the command line asks for; returns how many pictures were left out."""
    out: Path = options.out
    if (package := PACKAGES.get(out.suffix)) is not None:
        need(package)
    package_of(out)
    if out.exists() and not options.overwrite:
        raise BadFile(f"OUT {out} is there already: --overwrite makes it anew")
    if options.batch_size < 1:
        raise BadExtractor(f"--batch-size must be at least 1, got {options.batch_size}")
    images = listed_images(options.images, options.captions, options.splits)
    extractor = make_extractor(options, options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    recipe = recipe_of(options, out)
    folder = out.with_name(f".{out.name}.partial")
    with open_writer(folder, recipe, images, options.restart) as writer:
        before = len(writer.image_ids)
        if before:
            print(f"going on after {before} of {len(images)} images")
        extraction = Extraction(writer, extractor)
        extraction.run(images, options.batch_size, options.workers)
        if not writer.image_ids:
            raise BadFile(f"none of the {len(images)} pictures gave regions; the first: {images[0].path}")
        writer.assemble(out, recipe)
        rows, D = writer.offsets[-1], writer.feature_dim
    shutil.rmtree(folder)
    number = len(images) - len(extraction.skipped)
    print(f"{out}: {number} images, {rows} regions of {D} channels")
    h, w = getattr(extractor, "map_size", None) or (options.grid_size,) * 2
    if min(h, w) < options.grid_size:
        print(
            f"note: the map of {options.grid} has {h} x {w} cells, so that of {options.grid_size} x "
            f"{options.grid_size} regions some are the same: a larger --size, or --grid-size {min(h, w)}",
            file=sys.stderr,
        )
    if extraction.skipped:
        print(f"{len(extraction.skipped)} pictures were skipped:", file=sys.stderr)
        for image_id, reason in extraction.skipped.items():
            print(f"  image {image_id}: {reason}", file=sys.stderr)
    return len(extraction.skipped)


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m tools.captioning.extract_regions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("images", type=Path, metavar="IMAGES", help="folder of the pictures")
    made.add_argument("out", type=Path, metavar="OUT", help=".npz, .h5, .hdf5 or .lmdb")
    made.add_argument("--captions", type=Path, metavar="JSON", help="file in COCO's format with the images' ids")
    made.add_argument("--splits", type=Path, metavar="JSON", help="Karpathy's file with the images' ids")
    way = made.add_mutually_exclusive_group(required=True)
    way.add_argument("--mmdet", nargs="+", metavar=("CONFIG", "CHECKPOINT"))
    way.add_argument("--torchvision", metavar="NAME")
    way.add_argument("--grid", metavar="NAME")
    weights = made.add_mutually_exclusive_group()
    weights.add_argument(
        "--checkpoint", metavar="FILE",
        help="weights instead of the library's own; --grid also takes those of train_attributes and train_classifier",
    )  # fmt: skip
    weights.add_argument("--no-weights", action="store_true", help="random weights, the same for the same --seed")
    made.add_argument("--grid-size", type=int, default=7, metavar="N", help="cells of a side, default %(default)s")
    made.add_argument(
        "--size", type=int, nargs="+", metavar="PIXELS",
        help="--grid: height and width; --torchvision: shorter and longer side; default: the model's own",
    )  # fmt: skip
    made.add_argument("--feature", choices=("classifier", "map"), default="classifier")
    made.add_argument("--min-regions", type=int, default=Selection.minimum, help="default %(default)s")
    made.add_argument("--max-regions", type=int, default=Selection.maximum, help="default %(default)s")
    made.add_argument("--score-threshold", type=float, default=Selection.threshold, help="default %(default)s")
    made.add_argument("--nms", type=float, default=Selection.iou, metavar="IOU", help="default %(default)s")
    made.add_argument("--batch-size", type=int, default=4, help="default %(default)s")
    made.add_argument("--workers", type=int, default=0, help="processes that read pictures, default %(default)s")
    made.add_argument("--dtype", choices=("float16", "float32"), default="float16", help="default %(default)s")
    made.add_argument("--device", help="default: cuda where there is one, else cpu")
    made.add_argument("--seed", type=int, default=0, help="of random weights, default %(default)s")
    made.add_argument("--overwrite", action="store_true", help="replace OUT")
    made.add_argument("--restart", action="store_true", help="forget what an interrupted run has done")
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        return 1 if extract(options) else 0
    except (ValueError, ModuleNotFoundError) as error:
        print(f"extract_regions: {error}", file=sys.stderr)
        return 2
    except torch.cuda.OutOfMemoryError as error:
        print(f"extract_regions: {error}; a smaller --batch-size needs less; --restart with it", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
