r"""Region features of a folder of pictures, for the captioner.

::

    python -m tools.captioning.extract_regions data/scenes/images data/scenes/regions.npz \
        --splits data/scenes/splits.json --grid resnet10t --checkpoint work_dirs/attributes/best.safetensors

OUT is ``.npz``, ``.h5`` (h5py) or ``.lmdb`` (lmdb); ``attn_plugins.captioning.region_features`` documents its content.
Three ways:

``--mmdet CONFIG [CHECKPOINT]``  any two-stage config of mmdet, including ours with attention
``--torchvision NAME``           one of torchvision's R-CNNs, such as fasterrcnn_resnet50_fpn
``--grid NAME``                  the last map of a timm backbone, pooled to a grid of cells

A detector keeps the regions above ``--score-threshold`` after non-maximum suppression within each class, but at least
the 10 best and at most 100 (as Anderson et al., 2018). Their boxes are refined, and their features are the inputs of
the classifier (``--feature map``: the mean of the RoI-aligned map).

Image ids are those of ``--splits`` (Karpathy's file) or ``--captions`` (COCO's format), and only the pictures listed
there are read; without both, all pictures of the folder are read, and the ids are the file names without suffix. With
both, ``--captions`` provides file names that are missing in ``--splits``.

Partial results are kept in a folder next to OUT: the same command resumes an interrupted run and produces the same
file. Pictures that are missing or broken, or that fail in the network, are listed with the reason and left out.

Several processes share the pictures, each on its own GPU (``--device cuda``) or all on the CPU::

    torchrun --nproc-per-node 8 -m tools.captioning.extract_regions data/coco/images data/coco/regions.h5 ...

OUT has the same bytes as from one process with as many threads. The same command resumes an interrupted run, with any
number of processes; a second run on the same OUT raises an error. Process 0 prints the overall progress and returns
the exit code below (torchrun returns 1 for any code but 0). Processes on several machines need a shared file system
with file locks for OUT.

OUT also holds the recipe by which ``tools.caption`` computes the regions of new pictures: the options, and the paths
of the weights.

Exit code: 0, all pictures are in OUT; 1, OUT lacks some pictures, which are listed; 2, nothing was written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from attn_plugins.captioning.region_features import RegionFeaturesWriter
from attn_plugins.captioning.region_formats import PACKAGES, package_of
from attn_plugins.captioning.region_parts import RegionParts, read_index
from tools import need
from tools.captioning.image_list import ListedImage, listed_images
from tools.captioning.json_files import BadFile
from tools.captioning.processes import Process, device_of, this_process
from tools.captioning.progress import Progress
from tools.captioning.region_recipe import make_extractor, recipe_of
from tools.captioning.regions import BadExtractor, Extractor, Regions, Selection
from tools.captioning.shared_run import SharedRun, produced
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
    """Extraction of this process's share of the pictures, batch by batch.

    A padded batch changes its members slightly. Therefore batches do not depend on the number of processes, and a
    resumed run computes some pictures again.
    """

    def __init__(self, images: Sequence[ListedImage], batch_size: int, extractor: Extractor) -> None:
        self.images, self.extractor = images, extractor
        self.batches = [range(i, min(i + batch_size, len(images))) for i in range(0, len(images), batch_size)]
        self.numbers = {str(image.id): i for i, image in enumerate(images)}

    def left(self, parts: list[Path]) -> list[int]:
        """Return the numbers of the unfinished batches."""
        done = _done(parts)
        if done:
            print(f"resuming after {len(done)} of {len(self.images)} images", flush=True)
        return [n for n, batch in enumerate(self.batches) if any(str(self.images[i].id) not in done for i in batch)]

    def run(self, run: SharedRun, dtype: str, workers: int, progress: Callable[[], None]) -> None:
        """Append the regions of this process's remaining pictures."""
        done = _done(run.parts)
        loader: Any = DataLoader(
            Prepared(self.images, self.extractor),
            batch_sampler=[list(self.batches[n]) for n in run.left],
            num_workers=workers,
            collate_fn=list,
        )
        with RegionFeaturesWriter(run.part, dtype) as writer:
            for batch in loader:
                run.check()
                for image, _, reason in batch:
                    if reason is not None:
                        self.skip(run, image, reason)
                good = [(image, prepared) for image, prepared, reason in batch if reason is None]
                for image, regions in self.extract(run, good):
                    if str(image.id) in done:
                        continue
                    try:
                        writer.append(image.id, regions)
                    except ValueError as error:
                        self.skip(run, image, str(error))
                progress()

    def skip(self, run: SharedRun, image: ListedImage, reason: str) -> None:
        """Report a picture that is left out."""
        run.skip(self.numbers[str(image.id)], reason)
        start = "\n" if sys.stdout.isatty() else ""  # not on the progress line
        sys.stderr.write(f"{start}skipped {image.path} (image {image.id}): {reason}\n")
        sys.stderr.flush()

    def extract(self, run: SharedRun, batch: list[tuple[ListedImage, Any]]) -> Iterator[tuple[ListedImage, Regions]]:
        """Yield the regions of a batch; if it fails, of its pictures one by one."""
        if not batch:
            return
        try:
            found = self.extractor([prepared for _, prepared in batch])
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            if len(batch) > 1:
                for one in batch:
                    yield from self.extract(run, [one])
            elif not self.works():
                raise
            else:
                self.skip(run, batch[0][0], f"{type(error).__name__}: {error}")
            return
        yield from zip((image for image, _ in batch), found)

    def works(self) -> bool:
        """Return whether the network finds regions in a plain picture; if not, the pictures are not at fault."""
        try:
            return len(self.extractor([self.extractor.prepare(Image.new("RGB", (64, 64), "grey"))])) == 1
        except Exception:
            return False


def _done(parts: list[Path]) -> set[str]:
    return {str(image_id) for part in parts for image_id in read_index(part).image_ids}


def settings_of(recipe: dict[str, Any], images: Sequence[ListedImage]) -> dict[str, Any]:
    """Return the settings that two runs must share for one to resume the other."""
    names = json.dumps([[image.id, image.path.name] for image in images])
    settings = dict(recipe["options"], images=hashlib.sha256(names.encode()).hexdigest())
    settings.update({f"content of the {name}": found["sha256"] for name, found in recipe["files"].items()})
    return settings


def extract(options: argparse.Namespace, process: Process) -> int:
    """Extract the regions of the command line; return how many pictures were left out."""
    out: Path = options.out
    if (package := PACKAGES.get(out.suffix)) is not None:
        need(package)
    package_of(out)
    folder = out.with_name(f".{out.name}.partial")

    def check_out() -> None:
        if out.exists() and not options.overwrite and not produced(folder, out):
            raise BadFile(f"OUT {out} already exists: --overwrite replaces it")

    if process.rank == 0:  # other processes may start after the result exists
        check_out()
    if options.batch_size < 1:
        raise BadExtractor(f"--batch-size must be at least 1, got {options.batch_size}")
    images = listed_images(options.images, options.captions, options.splits)
    extractor = make_extractor(options, device_of(process, options.device))
    recipe = recipe_of(options, out)
    extraction = Extraction(images, options.batch_size, extractor)
    with SharedRun(folder, process, settings_of(recipe, images), options.restart) as run:
        run.begin(extraction.left, check_out)
        shown = None
        if process.rank == 0:
            shown = Progress(len(images), run.count, seconds=1 if process.number > 1 else 0)
        show = shown.show if shown else lambda: None
        extraction.run(run, options.dtype, options.workers, show)
        if not run.finish(show):
            return 0
        assert shown is not None
        shown.show(last=True)
        parts = RegionParts(run.parts, [image.id for image in images])
        if not parts.image_ids:
            raise BadFile(f"none of the {len(images)} pictures gave regions; the first: {images[0].path}")
        run.make(out, lambda partial: parts.save(partial, recipe))
        skipped = run.skipped()
        run.remove()
    print(f"{out}: {len(parts.image_ids)} images, {parts.rows} regions of {parts.feature_dim} channels")
    h, w = getattr(extractor, "map_size", None) or (options.grid_size,) * 2
    if min(h, w) < options.grid_size:
        print(
            f"note: the map of {options.grid} has {h} x {w} cells, so that of {options.grid_size} x "
            f"{options.grid_size} regions some are the same: a larger --size, or --grid-size {min(h, w)}",
            file=sys.stderr,
        )
    if skipped:
        lines = [f"  image {images[number].id}: {reason}" for number, reason in skipped]
        print("\n".join([f"{len(skipped)} pictures were skipped:", *lines]), file=sys.stderr)
    return len(skipped)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.captioning.extract_regions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("images", type=Path, metavar="IMAGES", help="folder of the pictures")
    parser.add_argument("out", type=Path, metavar="OUT", help=".npz, .h5, .hdf5 or .lmdb")
    parser.add_argument("--captions", type=Path, metavar="JSON", help="file in COCO's format with the images' ids")
    parser.add_argument("--splits", type=Path, metavar="JSON", help="Karpathy's file with the images' ids")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--mmdet", nargs="+", metavar=("CONFIG", "CHECKPOINT"))
    way.add_argument("--torchvision", metavar="NAME")
    way.add_argument("--grid", metavar="NAME")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument(
        "--checkpoint", metavar="FILE",
        help="weights instead of the library's own; --grid also takes those of train_attributes and train_classifier",
    )  # fmt: skip
    weights.add_argument("--no-weights", action="store_true", help="random weights, the same for the same --seed")
    parser.add_argument("--grid-size", type=int, default=7, metavar="N", help="cells of a side, default %(default)s")
    parser.add_argument(
        "--size", type=int, nargs="+", metavar="PIXELS",
        help="--grid: height and width; --torchvision: shorter and longer side; default: the model's own",
    )  # fmt: skip
    parser.add_argument("--feature", choices=("classifier", "map"), default="classifier")
    parser.add_argument("--min-regions", type=int, default=Selection.minimum, help="default %(default)s")
    parser.add_argument("--max-regions", type=int, default=Selection.maximum, help="default %(default)s")
    parser.add_argument("--score-threshold", type=float, default=Selection.threshold, help="default %(default)s")
    parser.add_argument("--nms", type=float, default=Selection.iou, metavar="IOU", help="default %(default)s")
    parser.add_argument("--batch-size", type=int, default=4, help="default %(default)s")
    parser.add_argument("--workers", type=int, default=0, help="processes that read pictures, default %(default)s")
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16", help="default %(default)s")
    parser.add_argument(
        "--device", help="default: cuda where there is one (of several processes each its own), else cpu"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of random weights, default %(default)s")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT")
    parser.add_argument("--restart", action="store_true", help="discard the results of an interrupted run")
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    process = Process()
    try:
        process = this_process()
        return 1 if extract(options, process) else 0
    except (ValueError, ModuleNotFoundError) as error:
        print(f"extract_regions{process.note}: {error}", file=sys.stderr)
        return 2
    except torch.cuda.OutOfMemoryError as error:
        print(
            f"extract_regions{process.note}: {error}; a smaller --batch-size needs less; --restart with it",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
