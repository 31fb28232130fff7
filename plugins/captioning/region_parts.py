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

from .caption_files import ImageId
from .files import complete_lines
from .region_formats import save_npz

INDEX = "images.jsonl"


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
        """Write the file to ``path``, image by image; the output is deterministic.

        Raises:
            ValueError: There is no image.
        """
        D = self.feature_dim
        if not D:
            raise ValueError(f"{path}: there is no image to write")
        ids, rows = self.image_ids, [slice(*self._parts[p][1].offsets[i : i + 2]) for p, i in self._places]
        text = any(isinstance(x, str) for x in ids)
        regions = {}
        own = np.dtype(self._parts[0][1].dtype)
        for name, dtype, shape in (("features", own, (D,)), ("boxes", np.float32, (4,)), ("scores", np.float32, ())):
            mapped = [_mapped(folder / name, np.dtype(dtype), (x.offsets[-1], *shape)) for folder, x in self._parts]
            regions[name] = [mapped[p][own_rows] for (p, _), own_rows in zip(self._places, rows)]
        save_npz(
            path,
            np.array([str(x).encode() for x in ids]) if text else np.array(ids, np.int64),
            np.cumsum([0, *map(len, regions["scores"])], dtype=np.int64),
            regions,
            None if recipe is None else json.dumps(recipe),
        )


def _mapped(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    if not shape[0]:
        return np.empty(shape, dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if path.stat().st_size < size:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, not {size}: delete {path.parent} and start again")
    return np.asarray(np.memmap(path, dtype, "r", shape=shape))
