"""Broken images in a folder of images: finding, reporting and skipping them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.datasets import ImageFolder

from tools.files import write_text
from tools.pictures import BadPicture

from .config import Config, ConfigError
from .data import loaders
from .place import Place

NAMED = 10  # names printed on the terminal; the file lists all


class _Reasons(Dataset):
    """Reason why each file cannot be read; empty for readable files."""

    def __init__(self, halves: Sequence[ImageFolder]) -> None:
        self.files = [(file, getattr(half, "check", half.loader)) for half in halves for file, _ in half.samples]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> str:
        file, read = self.files[index]
        try:
            read(file)
        except BadPicture as error:
            if Path(file).is_file() and not Path(file).stat().st_size:
                return "the file is empty"
            return " ".join(str(error.__cause__ or error).split())
        return ""


def folders(halves: Sequence[Any]) -> list[ImageFolder]:
    """Return ``halves``, which must be folders of images; raise a ConfigError if the data set is of another kind."""
    if not all(isinstance(half, ImageFolder) for half in halves):
        raise ConfigError("--check and --skip-broken need dataset 'folder' or 'clips', which consist of files")
    return list(halves)


def find_broken(
    halves: Sequence[ImageFolder], root: Path, config: Config, place: Place | None = None
) -> dict[str, str]:
    """Read every image, each process its share; return the broken ones by their path below ``root``, with reasons."""
    reasons = _Reasons(halves)
    rank, processes = (place.rank, place.processes) if place else (0, 1)
    own = range(rank, len(reasons), processes)
    loader = DataLoader(Subset(reasons, own), batch_size=32, num_workers=loaders(config), collate_fn=list)
    parts: list[Any] = [dict(zip(own, (reason for batch in loader for reason in batch)))]
    if processes > 1:
        parts *= processes
        torch.distributed.all_gather_object(parts, parts[rank])
    files = {Path(reasons.files[i][0]): reason for part in parts for i, reason in part.items() if reason}
    return dict(sorted((file.relative_to(root).as_posix(), reason) for file, reason in files.items()))


def leave_out(halves: Sequence[ImageFolder], root: Path, broken: Collection[str]) -> None:
    """Remove the files ``broken`` (under ``root``) from ``halves``.

    Raises:
        ConfigError: a class has no training images left, or there are no validation images left.
    """
    for half in halves:
        half.samples = [
            (file, label) for file, label in half.samples if Path(file).relative_to(root).as_posix() not in broken
        ]
        half.imgs, half.targets = half.samples, [label for _, label in half.samples]
    train, val = halves
    trained = set(train.targets)
    for label, name in enumerate(train.classes):
        if label not in trained:
            raise ConfigError(f"--data must hold a readable image of every class, and {root}/train/{name} has none")
    if not val.samples:
        raise ConfigError(f"--data must hold a readable image to validate with, and {root}/val has none")


def report(broken: Mapping[str, str], images: int, file: Path, write: bool) -> str:
    """Return a line that says which images are left out; ``write`` a file with a line for each: name, tab, reason."""
    if write:
        write_text(file, "".join(f"{name}\t{reason}\n" for name, reason in broken.items()))
    more = f" and {len(broken) - NAMED} more" if len(broken) > NAMED else ""
    names = ", ".join(list(broken)[:NAMED])
    return f"left out {len(broken)} of {images} images, which cannot be read: {names}{more} (reasons in {file})"
