"""Merge of folders written by :class:`~attn_plugins.captioning.region_features.RegionFeaturesWriter` into one file.

A folder holds flat files of ``features``, ``boxes`` and ``scores``, and ``images.jsonl`` with one line
``[id, regions, channels, dtype]`` per complete image.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .files import complete_lines
from .region_formats import save_arrays

INDEX = "images.jsonl"

ImageId = int | str


@dataclass
class PartIndex:
    """Content of a folder's ``images.jsonl``.

    Attributes:
        image_ids: Ids in the order in which they were appended.
        offsets: Rows offsets[i] to offsets[i + 1] are the regions of image i.
        feature_dim: Number of channels D, or None without images.
        dtype: Type of the features, or None without images.
        size: Number of bytes of the complete lines.
    """

    image_ids: list[ImageId] = field(default_factory=list)
    offsets: list[int] = field(default_factory=lambda: [0])
    feature_dim: int | None = None
    dtype: str | None = None
    size: int = 0


def read_index(folder: Path) -> PartIndex:
    """Read ``images.jsonl`` up to its last complete line; a missing file is empty."""
    index = PartIndex()
    for line in complete_lines(folder / INDEX):
        image_id, n, index.feature_dim, index.dtype = json.loads(line)
        index.image_ids.append(image_id)
        index.offsets.append(index.offsets[-1] + n)
        index.size += len(line)
    return index


class RegionParts:
    """View of several folders as the one file that they are merged into.

    Args:
        folders: Folders of closed writers; folders without images are ignored.
        order: Ids of all images that may be in the folders, in the order of the output; None keeps the folders' order.

    Raises:
        ValueError: An image is in two folders or not in ``order``, the folders' feature widths or types differ, or a
            file is truncated.
    """

    def __init__(self, folders: Iterable[str | os.PathLike[str]], order: Sequence[ImageId] | None = None) -> None:
        parts = [(Path(folder), read_index(Path(folder))) for folder in folders]
        self._parts = [(folder, index) for folder, index in parts if index.image_ids]
        for folder, index in self._parts[1:]:
            first = self._parts[0][1]
            if (index.feature_dim, index.dtype) != (first.feature_dim, first.dtype):
                raise ValueError(
                    f"{folder} has features of {index.feature_dim} channels in {index.dtype}, but "
                    f"{self._parts[0][0]} of {first.feature_dim} in {first.dtype}"
                )
        places: dict[str, tuple[int, int]] = {}
        for p, (folder, index) in enumerate(self._parts):
            for i, image_id in enumerate(index.image_ids):
                if str(image_id) in places:
                    other = self._parts[places[str(image_id)][0]][0]
                    raise ValueError(f"image {image_id} is in {other} and in {folder}")
                places[str(image_id)] = p, i
        known = places if order is None else {str(x): places[str(x)] for x in order if str(x) in places}
        if len(known) < len(places):
            image_id = next(x for x in places if x not in known)
            raise ValueError(f"{self._parts[places[image_id][0]][0]} has image {image_id}, which is not in the list")
        self._places = list(known.values())

    @property
    def image_ids(self) -> list[ImageId]:
        """All N image ids, in the order of the output."""
        return [self._parts[p][1].image_ids[i] for p, i in self._places]

    @property
    def rows(self) -> int:
        """Total number of regions Σn."""
        return sum(index.offsets[-1] for _, index in self._parts)

    @property
    def feature_dim(self) -> int | None:
        """Number of channels D, or None without images."""
        return self._parts[0][1].feature_dim if self._parts else None

    def save(self, path: Path, recipe: Mapping[str, Any] | None = None) -> None:
        """Write the file to ``path`` in blocks; the output is deterministic.

        Raises:
            ValueError: There is no image.
        """
        D = self.feature_dim
        if not D:
            raise ValueError(f"{path}: there is no image to write")
        offsets, ids = [0], self.image_ids
        pieces: list[tuple[int, int, int]] = []  # folder, first and last row
        for p, i in self._places:
            start, stop = self._parts[p][1].offsets[i : i + 2]
            offsets.append(offsets[-1] + stop - start)
            if pieces and pieces[-1][0] == p and pieces[-1][2] == start:
                start = pieces.pop()[1]
            pieces.append((p, start, stop))
        text = any(isinstance(x, str) for x in ids)
        arrays: dict[str, Any] = {
            "image_ids": np.array([str(x).encode() for x in ids]) if text else np.array(ids, np.int64),
            "offsets": np.array(offsets, np.int64),
        }
        own = np.dtype(self._parts[0][1].dtype)
        for name, dtype, shape in (("features", own, (D,)), ("boxes", np.float32, (4,)), ("scores", np.float32, ())):
            mapped = [_mapped(folder / name, np.dtype(dtype), (x.offsets[-1], *shape)) for folder, x in self._parts]
            arrays[name] = GatheredRows([(mapped[p], start, stop) for p, start, stop in pieces])
        save_arrays(path, arrays, None if recipe is None else json.dumps(recipe))


class GatheredRows:
    """Concatenation of row ranges of several arrays, read slice by slice.

    Args:
        pieces: Non-empty list of (array, first row, last row); the arrays have the same type and width.
    """

    def __init__(self, pieces: Sequence[tuple[np.ndarray, int, int]]) -> None:
        self.pieces, first = list(pieces), pieces[0][0]
        self.ends = np.cumsum([stop - start for _, start, stop in pieces])
        self.dtype, self.shape = first.dtype, (int(self.ends[-1]), *first.shape[1:])
        self.nbytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise ValueError(f"rows must be consecutive, got the step {step}")
        parts = []
        piece = int(np.searchsorted(self.ends, start, "right"))
        while start < stop:
            array, first, last = self.pieces[piece]
            skipped = start - (int(self.ends[piece]) - (last - first))
            number = min(stop - start, last - first - skipped)
            parts.append(array[first + skipped : first + skipped + number])
            start, piece = start + number, piece + 1
        return np.concatenate(parts) if parts else np.empty((0, *self.shape[1:]), self.dtype)


def _mapped(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    if not shape[0]:
        return np.empty(shape, dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if path.stat().st_size < size:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, not {size}: delete {path.parent} and start again")
    return np.memmap(path, dtype, "r", shape=shape)
