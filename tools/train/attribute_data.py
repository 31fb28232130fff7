"""Captioned pictures for the training of the attribute detector."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from attn_plugins.captioning.caption_files import SPLITS, Problems, read_splits
from tools.caption.backbones import TimmBackbone
from tools.caption.lists import ListedImage, listed_images
from tools.pictures import BadPicture, open_picture


class Pictures(Dataset):
    """Pictures prepared by ``backbone``, with their labels (N, K); None for a broken picture to ``skip``.

    ``shift`` is the maximum random shift, relative to the sides.
    """

    def __init__(
        self, images: Sequence[ListedImage], targets: Tensor, backbone: TimmBackbone, shift: float, skip: bool
    ) -> None:
        self.images, self.targets, self.backbone = images, targets, backbone
        self.shift, self.skip, self.epoch = shift, skip, (0, 0)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor] | None:
        image = self.images[index]
        try:
            picture = open_picture(image.path)
        except BadPicture as error:
            if self.skip:
                print(f"skipped image {image.id}: {error}", file=sys.stderr, flush=True)
                return None
            raise BadPicture(f"image {image.id}: {error} (--skip-invalid-samples skips it)") from error
        x, y = np.random.default_rng((*self.epoch, index)).uniform(-self.shift, self.shift, 2)
        return index, self.backbone.prepare(picture, (x, y)), self.targets[index]


def collate(batch: list[tuple[int, Tensor, Tensor] | None]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Collate a batch without skipped pictures; return None for an empty batch."""
    good = [one for one in batch if one is not None]
    if not good:
        return None
    indices, images, targets = zip(*good)
    return torch.tensor(indices), torch.stack(images), torch.stack(targets)


class Data:
    """Pictures and captions of all parts.

    Raises:
        ValueError: a file is missing or invalid, a part is empty, or a required picture is missing.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        folder = options.data
        if not folder.is_dir():
            raise ValueError(f"DATA {folder}: no such folder")
        splits = _found("splits", options.splits, folder / "splits.json")
        if splits is None:
            raise ValueError(f"--splits: {folder} has no splits.json; python -m tools.caption splits creates it")
        captions = _found("captions", options.captions, folder / "captions.json")
        pictures = options.images or (folder / "images" if (folder / "images").is_dir() else folder)
        self.splits = splits
        self.images = listed_images(pictures, splits)
        missing = [image for image in self.images if not image.path.is_file()]
        if missing and not options.skip_invalid_samples:
            raise ValueError(
                f"{splits}: {len(missing)} of {len(self.images)} images have no picture, such as image "
                f"{missing[0].id}: {missing[0].path} (--skip-invalid-samples skips them)"
            )
        for image in missing:
            print(f"skipped image {image.id}: {image.path} does not exist", file=sys.stderr)
        self.images = [image for image in self.images if image.path.is_file()]
        problems = Problems(options.skip_invalid_samples)
        parts = read_splits([] if captions is None else [captions], splits, problems, SPLITS["test"])
        self.captions = {image_id: own for part in parts.values() for image_id, own in part.items() if own}

    def part(self, names: tuple[str, ...]) -> tuple[list[ListedImage], list[list[list[str]]]]:
        """Return the captioned images of some parts, and the captions; raise a ValueError if there are none."""
        images = [image for image in self.images if image.part in names and image.id in self.captions]
        if not images:
            there = ", ".join(sorted({image.part for image in self.images}))
            raise ValueError(f"{self.splits} has no image with captions in {' or '.join(names)}; its parts: {there}")
        return images, [self.captions[image.id] for image in images]


def _found(option: str, given: Path | None, usual: Path) -> Path | None:
    """Return the option's file, or the usual file, or None if there is neither."""
    if given is not None and not given.is_file():
        raise ValueError(f"--{option}: {given} does not exist")
    return given or (usual if usual.is_file() else None)


def frequent_words(
    captions: Iterable[Sequence[Sequence[str]]], number: int, least: int = 1, skip: Iterable[str] = ()
) -> list[str]:
    """Return at most ``number`` words that occur ``least`` times in each image's captions, without ``skip``.

    They are sorted by falling frequency, then by the alphabet.
    """
    counts = Counter(word for own in captions for caption in own for word in caption)
    for word in skip:
        counts.pop(word, None)
    kept = [word for word in counts if counts[word] >= least]
    return sorted(kept, key=lambda word: (-counts[word], word))[:number]


def labels(captions: Iterable[Sequence[Sequence[str]]], words: Sequence[str]) -> Tensor:
    """Return labels (N, K): 1 if one of an image's captions has the word, else 0."""
    index = {word: k for k, word in enumerate(words)}
    rows = [{index[word] for caption in own for word in caption if word in index} for own in captions]
    targets = torch.zeros(len(rows), len(words), dtype=torch.uint8)
    for i, row in enumerate(rows):
        targets[i, list(row)] = 1
    return targets


def average_precision(scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return each word's average precision (K,), NaN for a word that describes no image; both arguments are (N, K)."""
    from sklearn.metrics import average_precision_score

    described = targets.any(0)
    return np.array([average_precision_score(t, s) if d else np.nan for t, s, d in zip(targets.T, scores.T, described)])
