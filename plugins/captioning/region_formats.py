"""File formats of :mod:`attn_plugins.captioning.region_features`.

A reader has ``image_ids``, ``feature_dim``, ``recipe`` (JSON text or None), ``forkable`` (whether a forked process may
use it), ``count`` and ``read``. Every error names the file.
"""

from __future__ import annotations

import base64
import importlib
import mmap
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .caption_files import ImageId

COLUMNS = ("image_id", "image_w", "image_h", "num_boxes", "boxes", "features")
HEAD = 256  # bytes that hold the first four columns of a row
FEATURES, BOXES, RECIPE = "_features", "_boxes", "recipe"  # suffixes and a name of HDF5 data sets


def reader_of(path: Path) -> Any:
    """Return the class that reads files with the suffix of ``path``.

    Raises:
        ModuleNotFoundError: The format needs a package that is not installed.
        ValueError: The suffix is unknown.
    """
    readers = {".hdf5": Hdf5Regions, ".h5": Hdf5Regions, ".tsv": TsvRegions}
    if path.suffix not in readers:
        old = "; .npz, which version 0.2 wrote, is no longer read: extract again" if path.suffix == ".npz" else ""
        raise ValueError(f"region features {path}: the suffix must be one of {', '.join(readers)}{old}")
    if readers[path.suffix] is Hdf5Regions:
        hdf5_library(path)
    return readers[path.suffix]


def hdf5_library(path: Path) -> Any:
    """Return h5py; if it is not installed, raise a ModuleNotFoundError that names ``path``."""
    try:
        return importlib.import_module("h5py")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"region features {path}: a {path.suffix} file needs the package h5py") from error


class Hdf5Regions:
    """HDF5 file of Meshed-Memory Transformer (Cornia et al. 2020), with ``{image id}_features`` (n, D)."""

    forkable = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._counts: dict[str, int | None] = {}
        try:
            self._file = hdf5_library(path).File(path, "r")
        except OSError as error:
            raise ValueError(f"{path} is not an HDF5 file or is truncated: {error}") from error

    @property
    def recipe(self) -> str | None:
        """JSON text of a recipe, which only our files have."""
        return self._file[RECIPE].asstr()[()] if RECIPE in self._file else None

    @cached_property
    def image_ids(self) -> list[ImageId]:
        """All image ids, which takes seconds for a large file."""
        names = [name.removesuffix(FEATURES) for name in self._file if name.endswith(FEATURES)]
        if not names:
            found = ", ".join(sorted(self._file)[:5]) or "nothing"
            raise ValueError(f"{self.path} must have a dataset IMAGE_features for each image; it has {found}")
        return [_image_id(name) for name in names]

    @cached_property
    def feature_dim(self) -> int:
        """Number of channels D."""
        return self._features(str(self.image_ids[0])).shape[1]

    def _features(self, image_id: str) -> Any:
        dataset = self._file[image_id + FEATURES]
        if dataset.ndim != 2:
            raise ValueError(f"{self.path}: {dataset.name[1:]} must have shape (n, D), got {dataset.shape}")
        return dataset

    def count(self, image_id: str) -> int | None:
        """Return the number of regions of an image, or None if it is not in the file."""
        if image_id not in self._counts:  # opening a data set takes 50 µs
            there = image_id + FEATURES in self._file
            self._counts[image_id] = len(self._features(image_id)) if there else None
        return self._counts[image_id]

    def read(self, image_id: str) -> np.ndarray:
        """Return the features of an image."""
        features = self._features(image_id)[()]
        return features if features.dtype == np.float16 else features.astype(np.float32, copy=False)


class TsvRegions:
    """Rows of bottom-up-attention (Anderson et al. 2018), ``COLUMNS``, where the last two are float32 in base64.

    The index is built by skipping from row to row, which the number of boxes allows, and is kept when pickled.
    """

    forkable = True
    recipe = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self.image_ids: list[ImageId] = []
        self.feature_dim = 0
        self._rows: dict[str, tuple[int, int]] = {}  # where the features of each image start, and its number of boxes
        if path.stat().st_size == 0:
            raise ValueError(f"{path} is empty")
        at = len(self._map.readline()) if self._map[:HEAD].startswith(COLUMNS[0].encode()) else 0
        while at < len(self._map):
            at = self._index_row(at)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_map"}

    @cached_property
    def _map(self) -> mmap.mmap:
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def _index_row(self, at: int) -> int:
        """Add the row at byte ``at`` to the index; return where the next one starts."""
        number = len(self.image_ids) + 1
        head = self._map[at : at + HEAD].split(b"\t", 4)
        try:
            image_id, n = head[0].decode(), int(head[3])
            if n < 0:
                raise ValueError
        except (IndexError, ValueError):
            columns = ", ".join(COLUMNS)
            raise ValueError(f"{self.path}: row {number} must have {columns}, separated by tabs") from None
        features = at + sum(len(field) + 1 for field in head[:4]) + _encoded(16 * n) + 1
        if not self.feature_dim and n:
            end = self._map.find(b"\n", features)
            field = self._map[features : len(self._map) if end < 0 else end].rstrip(b"\r")
            self.feature_dim = (len(field) // 4 * 3 - field.count(b"=")) // (4 * n)
        end = features + _encoded(4 * n * self.feature_dim)
        if end > len(self._map) or (n and not self.feature_dim):
            raise ValueError(f"{self.path} is truncated in row {number}, image {image_id}")
        tab, after = self._map[features - 1 : features], self._map[end : end + 2]
        if tab != b"\t" or after.lstrip(b"\r")[:1] not in (b"", b"\n"):
            raise ValueError(
                f"{self.path}: row {number}, image {image_id}, must have {n} boxes and {n} x {self.feature_dim} "
                "features, float32 in base64; or it is truncated"
            )
        if image_id in self._rows:
            raise ValueError(f"{self.path}: image {image_id} appears twice")
        self.image_ids.append(_image_id(image_id))
        self._rows[image_id] = features, n
        return end + 2 if after[:1] == b"\r" else end + 1

    def count(self, image_id: str) -> int | None:
        """Return the number of regions of an image, or None if it is not in the file."""
        row = self._rows.get(image_id)
        return None if row is None else row[1]

    def read(self, image_id: str) -> np.ndarray:
        """Return the features of an image."""
        at, n = self._rows[image_id]
        decoded = base64.b64decode(self._map[at : at + _encoded(4 * n * self.feature_dim)], validate=True)
        return np.frombuffer(decoded, "<f4").reshape(n, self.feature_dim).copy()


def _image_id(text: str) -> ImageId:
    """Return the number that ``text`` is; text such as ``007``, which its number would not find again, stays text."""
    return int(text) if text.isdecimal() and str(int(text)) == text else text


def _encoded(size: int) -> int:
    """Return the length in base64 of ``size`` bytes."""
    return (size + 2) // 3 * 4
