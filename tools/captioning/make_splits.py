"""Divide a captioned set of images into parts: write a ``splits.json`` like Karpathy's file for COCO.

::

    python -m tools.captioning.make_splits data/own --shares 80 10 10

DATA holds ``captions.json`` in COCO's format: ``images`` have ``id`` and ``file_name``, ``annotations`` have
``image_id`` and ``caption``. Every image with a caption is assigned at random to ``train``, ``val`` or ``test`` by the
given shares, with at least one image each; the same ids and seed give the same parts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools import files
from tools.captioning.json_files import BadFile, items, read_json, some

PARTS = ("train", "val", "test")


def captioned(path: Path) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return the images of a COCO caption file that have captions, and the ids of those without.

    Raises:
        BadFile: the file is invalid, an image is repeated, or a caption is of an unknown image.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise BadFile(f"{path} must hold 'images' and 'annotations', got {type(content).__name__}")
    images = items(path, content.get("images"), "'images'", {"id": (int, str), "file_name": str})
    rows = items(path, content.get("annotations"), "'annotations'", {"image_id": (int, str), "caption": str})
    names: dict[str, str] = {}
    for image in images:
        if str(image["id"]) in names:
            raise BadFile(f"{path}: image {image['id']} is repeated")
        names[str(image["id"])] = image["file_name"]
    described = {str(row["image_id"]): row for row in rows if row["caption"].strip()}
    for image_id, row in described.items():
        if image_id not in names:
            raise BadFile(f"{path}: caption {row.get('id')} is of image {image_id}, which is not among its images")
    bare = [image["id"] for image in images if str(image["id"]) not in described]
    return [image for image in images if str(image["id"]) in described], bare


def divided(number: int, shares: Sequence[float]) -> list[int]:
    """Return the size of each part of ``number`` images: rounded shares, at least 1 unless the share is 0.

    Raises:
        ValueError: there are too few images.
    """
    counts = [max(1, round(number * share / sum(shares))) if share else 0 for share in shares]
    counts[0] = number - sum(counts[1:])
    if counts[0] < 1:
        raise ValueError(f"{number} images are too few for {' '.join(PARTS)} of shares {' '.join(map(str, shares))}")
    return counts


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.captioning.make_splits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("--captions", type=Path, metavar="JSON", help="default: DATA/captions.json")
    parser.add_argument(
        "--shares", type=float, nargs=3, metavar=tuple(map(str.upper, PARTS)), default=(80.0, 10.0, 10.0),
        help="shares of the images, in any unit; that of TEST may be 0 (default: 80 10 10)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing splits.json")
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    out = options.data / "splits.json"
    try:
        if min(options.shares) < 0 or not all(options.shares[:2]) or not np.isfinite(options.shares).all():
            shares = " ".join(map(str, options.shares))
            raise ValueError(f"--shares must be positive, that of TEST may be 0, got {shares}")
        if options.seed < 0:
            raise ValueError(f"--seed must be 0 or more, got {options.seed}")
        if out.exists() and not options.overwrite:
            raise ValueError(f"{out} already exists: --overwrite replaces it")
        images, bare = captioned(options.captions or options.data / "captions.json")
        images.sort(key=lambda image: str(image["id"]))  # the order of the file does not matter
        counts = divided(len(images), options.shares)
    except ValueError as error:
        print(f"make_splits: {error}", file=sys.stderr)
        return 2
    if bare:
        print(f"skipped: no caption for {some(bare)}", file=sys.stderr)
    parts = np.random.default_rng(options.seed).permutation(np.repeat(PARTS, counts)).tolist()
    rows = [dict(cocoid=i["id"], filename=i["file_name"], split=part) for i, part in zip(images, parts)]
    files.write_text(out, json.dumps(dict(images=rows)) + "\n")
    print(f"{out}: " + ", ".join(f"{count} {part}" for part, count in zip(PARTS, counts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
