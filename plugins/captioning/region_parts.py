"""One file of the folders that :class:`~attn_plugins.captioning.region_features.RegionFeaturesWriter` has filled.

Such a folder holds flat files of ``features``, ``boxes`` and ``scores``, and ``images.jsonl``: a line for every image
that is there whole, ``[id, regions, channels, dtype]``.
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
    """What ``images.jsonl`` of a folder lists.

    Attributes:
        image_ids: In the order in which they were appended.
        offsets: The regions of image i are the rows offsets[i] to offsets[i + 1].
        feature_dim: D; None: there is no image yet.
        dtype: Of the features; likewise.
        size: Bytes of the complete lines.
    """

    image_ids: list[ImageId] = field(default_factory=list)
    offsets: list[int] = field(default_factory=lambda: [0])
    feature_dim: int | None = None
    dtype: str | None = None
    size: int = 0


def read_index(folder: Path) -> PartIndex:
    """Read ``images.jsonl`` up to its last complete line; a missing file has none."""
    found = PartIndex()
    for line in complete_lines(folder / INDEX):
        image_id, n, found.feature_dim, found.dtype = json.loads(line)
        found.image_ids.append(image_id)
        found.offsets.append(found.offsets[-1] + n)
        found.size += len(line)
    return found


class RegionParts:
    """Reads folders together, as the one file that is made of them.

    Args:
        folders: Of writers that are closed; those without an image do not count.
        order: Ids of all images that may be in the folders, in the order of the file; None: the folders' own.

    Raises:
        ValueError: an image is in two folders or not in ``order``, the folders' widths or types of features differ, or
            one of their files is cut off.
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
            raise ValueError(f"{self._parts[places[image_id][0]][0]} has image {image_id}, which is none of the list's")
        self._places = list(known.values())

    @property
    def image_ids(self) -> list[ImageId]:
        """All N, in the file's order."""
        return [self._parts[p][1].image_ids[i] for p, i in self._places]

    @property
    def rows(self) -> int:
        """Σn."""
        return sum(index.offsets[-1] for _, index in self._parts)

    @property
    def feature_dim(self) -> int | None:
        """D; None: there is no image."""
        return self._parts[0][1].feature_dim if self._parts else None

    def save(self, path: Path, recipe: Mapping[str, Any] | None = None) -> None:
        """Write the file to ``path``, block by block; of the same images always the same bytes.

        Raises:
            ValueError: there is no image.
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
    """Rows of several arrays, one piece after the other, read slice by slice.

    Args:
        pieces: Array, first and last row; the arrays have one type and one width. At least one piece.
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
            raise ValueError(f"rows must follow each other, got the step {step}")
        found = []
        piece = int(np.searchsorted(self.ends, start, "right"))
        while start < stop:
            array, first, last = self.pieces[piece]
            skipped = start - (int(self.ends[piece]) - (last - first))
            number = min(stop - start, last - first - skipped)
            found.append(array[first + skipped : first + skipped + number])
            start, piece = start + number, piece + 1
        return np.concatenate(found) if found else np.empty((0, *self.shape[1:]), self.dtype)


def _mapped(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    if not shape[0]:
        return np.empty(shape, dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if path.stat().st_size < size:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, not {size}: begin anew without {path.parent}")
    return np.memmap(path, dtype, "r", shape=shape)
