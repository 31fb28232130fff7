"""Divide a captioned set of images into parts: write a ``splits.json`` like Karpathy's file for COCO.

::

    python -m tools.caption splits data/own --shares 80 10 10

DATA holds ``captions.json`` in COCO's format: ``images`` have ``id`` and ``file_name``, ``annotations`` have
``image_id`` and ``caption``. Every image with a caption is assigned at random to ``train``, ``val`` or ``test`` by the
given shares, with at least one image each; the same ids and seed give the same parts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from attn_plugins.captioning.caption_files import read_items
from tools import files
from tools.caption.lists import read_captions, some

PARTS = ("train", "val", "test")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument(
        "--shares", type=float, nargs=3, metavar=tuple(map(str.upper, PARTS)), default=(80.0, 10.0, 10.0),
        help="shares of the images, in any unit; that of TEST may be 0 (default: 80 10 10)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing splits.json")


def run(options: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    shares, out = options.shares, options.data / "splits.json"
    if min(shares) < 0 or not all(shares[:2]) or not np.isfinite(shares).all():
        raise ValueError(f"--shares must be positive, that of TEST may be 0, got {' '.join(map(str, shares))}")
    if options.seed < 0:
        raise ValueError(f"--seed must be 0 or more, got {options.seed}")
    if out.exists() and not options.overwrite:
        raise ValueError(f"{out} already exists: --overwrite replaces it")
    path = options.data / "captions.json"
    rows = read_items(path, "images", id=(int, str), file_name=str)
    if twice := [image for image, number in Counter(str(row["id"]) for row in rows).items() if number > 1]:
        raise ValueError(f"{path}: image {twice[0]} is repeated")
    names, captions = {row["id"]: row["file_name"] for row in rows}, read_captions(path)
    described = {image for image, own in captions.items() if any(map(str.strip, own))}
    images = sorted(described, key=str)  # the order of the file does not matter
    counts = [max(1, round(len(images) * share / sum(shares))) if share else 0 for share in shares]
    counts[0] = len(images) - sum(counts[1:])
    if counts[0] < 1:
        raise ValueError(f"{len(images)} images are too few for the parts {' '.join(PARTS)}")
    if bare := [image for image in captions if image not in described]:
        print(f"skipped: no caption for {some(bare)}", file=sys.stderr)
    parts = np.random.default_rng(options.seed).permutation(np.repeat(PARTS, counts)).tolist()
    rows = [dict(cocoid=image, filename=names[image], split=part) for image, part in zip(images, parts)]
    files.write_text(out, json.dumps(dict(images=rows)) + "\n")
    print(f"{out}: " + ", ".join(f"{count} {part}" for part, count in zip(PARTS, counts)))
    return 0
