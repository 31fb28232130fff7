"""File formats of :mod:`attn_plugins.captioning.region_features`: npz, and two that are only read.

A reader has ``image_ids``, ``feature_dim``, ``recipe`` (JSON text or None), ``forkable`` (whether a forked process may
use it), ``count`` and ``read``. Every error names the file.
"""

from __future__ import annotations

import base64
import importlib
import mmap
import os
import shutil
import struct
import zipfile
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from .caption_files import ImageId

ARRAYS = ("image_ids", "offsets", "features", "boxes", "scores")
RECIPE = "recipe"
COLUMNS = ("image_id", "image_w", "image_h", "num_boxes", "boxes", "features")
HEAD = 256  # bytes that hold the first four columns of a row


def reader_of(path: Path) -> Any:
    """Return the class that reads files with the suffix of ``path``.

    Raises:
        ModuleNotFoundError: The format needs a package that is not installed.
        ValueError: The suffix is unknown.
    """
    readers = {".npz": NpzRegions, ".tsv": TsvRegions, ".hdf5": Hdf5Regions, ".h5": Hdf5Regions}
    if path.suffix not in readers:
        raise ValueError(f"region features {path}: the suffix must be one of {', '.join(readers)}")
    if readers[path.suffix] is Hdf5Regions:
        try:
            importlib.import_module("h5py")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"region features {path}: a {path.suffix} file needs the package h5py") from error
    return readers[path.suffix]


class NpzRegions:
    """Uncompressed members ``ARRAYS`` of ``numpy.savez``, mapped into memory."""

    forkable = True

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive, path.open("rb") as file:
                members = {Path(info.filename).stem: info for info in archive.infolist()}
                _check_names(path, members)
                arrays = {name: _mapped(path, file, members[name]) for name in ARRAYS}
                self.recipe = None
                if RECIPE in members:
                    with archive.open(members[RECIPE]) as member:
                        self.recipe = str(npy.read_array(member, allow_pickle=False))
        except zipfile.BadZipFile as error:
            raise ValueError(f"{path} is not an npz file or is truncated: {error}") from error
        ids = np.array(arrays.pop("image_ids")).tolist()
        self.image_ids: list[ImageId] = [x.decode() if isinstance(x, bytes) else x for x in ids]
        self._offsets, self._arrays = np.array(arrays.pop("offsets")), arrays
        self._check()
        self._index = {str(x): i for i, x in enumerate(self.image_ids)}
        self.feature_dim = arrays["features"].shape[1]

    def _check(self) -> None:
        N, offsets, features = len(self.image_ids), self._offsets, self._arrays["features"]
        if offsets.shape != (N + 1,) or offsets.dtype.kind not in "iu":
            raise ValueError(
                f"{self.path}: offsets must be {N + 1} integers, one more than images, got shape {offsets.shape} of "
                f"{offsets.dtype}"
            )
        falls = np.flatnonzero(np.diff(offsets.astype(np.int64)) < 0)
        if offsets[0] != 0 or falls.size:
            where = f"they decrease after image {self.image_ids[falls[0]]}" if falls.size else f"got {offsets[0]} first"
            raise ValueError(f"{self.path}: offsets must start at 0 and increase; {where}")
        if features.ndim != 2 or features.dtype not in (np.float16, np.float32):
            raise ValueError(
                f"{self.path}: features must be (regions, channels) in float16 or float32, got {features.shape} "
                f"{features.dtype}"
            )
        rows = int(offsets[-1])
        for name, shape in (("features", (rows, features.shape[1])), ("boxes", (rows, 4)), ("scores", (rows,))):
            if self._arrays[name].shape != shape:
                raise ValueError(f"{self.path}: {name} must have shape {shape}, got {self._arrays[name].shape}")

    def count(self, image_id: str) -> int | None:
        """Return the number of regions of an image, or None if it is not in the file."""
        i = self._index.get(image_id)
        return None if i is None else int(self._offsets[i + 1] - self._offsets[i])

    def read(self, image_id: str) -> dict[str, np.ndarray]:
        """Return copies of the arrays of an image."""
        i = self._index[image_id]
        first, last = self._offsets[i : i + 2]
        return {name: np.array(array[first:last]) for name, array in self._arrays.items()}


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
        # Where the boxes of each image start, its width and height, and its number of boxes.
        self._rows: dict[str, tuple[int, float, float, int]] = {}
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
            width, height = float(head[1]), float(head[2])
            if n < 0 or not (width > 0 and height > 0):
                raise ValueError
        except (IndexError, ValueError):
            columns = ", ".join(COLUMNS)
            raise ValueError(f"{self.path}: row {number} must have {columns}, separated by tabs") from None
        boxes = at + sum(len(field) + 1 for field in head[:4])
        features = boxes + _encoded(16 * n) + 1
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
        self.image_ids.append(_image_id(image_id))
        self._rows[image_id] = boxes, width, height, n
        return end + 2 if after[:1] == b"\r" else end + 1

    def count(self, image_id: str) -> int | None:
        """Return the number of regions of an image, or None if it is not in the file."""
        row = self._rows.get(image_id)
        return None if row is None else row[3]

    def read(self, image_id: str) -> dict[str, np.ndarray]:
        """Return features and boxes of an image, which has no scores."""
        at, width, height, n = self._rows[image_id]
        arrays = {}
        for name, columns in (("boxes", 4), ("features", self.feature_dim)):
            end = at + _encoded(4 * n * columns)
            decoded = base64.b64decode(self._map[at:end], validate=True)
            arrays[name] = np.frombuffer(decoded, "<f4").reshape(n, columns).copy()
            at = end + 1
        arrays["boxes"] /= np.array([width, height, width, height], np.float32)
        return arrays


class Hdf5Regions:
    """HDF5 file of Meshed-Memory Transformer (Cornia et al. 2020).

    ``{image id}_features`` is (n, D). Optional: ``{image id}_boxes`` (n, 4) in pixels, and ``{image id}_cls_prob``
    (n, classes), whose maximum is the score.
    """

    forkable = False
    recipe = None
    SUFFIX = "_features"

    def __init__(self, path: Path) -> None:
        import h5py

        self.path = path
        self._counts: dict[str, int | None] = {}
        try:
            self._file = h5py.File(path, "r")
        except OSError as error:
            raise ValueError(f"{path} is not an HDF5 file or is truncated: {error}") from error

    @cached_property
    def image_ids(self) -> list[ImageId]:
        """All image ids, which takes seconds for a large file."""
        names = [name.removesuffix(self.SUFFIX) for name in self._file if name.endswith(self.SUFFIX)]
        if not names:
            found = ", ".join(sorted(self._file)[:5]) or "nothing"
            raise ValueError(f"{self.path} must have a dataset IMAGE_features for each image; it has {found}")
        return [_image_id(name) for name in names]

    @cached_property
    def feature_dim(self) -> int:
        """Number of channels D."""
        return self._features(str(self.image_ids[0])).shape[1]

    def _features(self, image_id: str) -> Any:
        dataset = self._file[image_id + self.SUFFIX]
        if dataset.ndim != 2:
            raise ValueError(f"{self.path}: {dataset.name[1:]} must have shape (n, D), got {dataset.shape}")
        return dataset

    def count(self, image_id: str) -> int | None:
        """Return the number of regions of an image, or None if it is not in the file."""
        if image_id not in self._counts:  # opening a data set takes 50 µs
            there = image_id + self.SUFFIX in self._file
            self._counts[image_id] = len(self._features(image_id)) if there else None
        return self._counts[image_id]

    def read(self, image_id: str) -> dict[str, np.ndarray]:
        """Return features, and scores and ``pixel_boxes`` if the file has them."""
        features = self._features(image_id)[()]
        arrays = {"features": features if features.dtype == np.float16 else features.astype(np.float32, copy=False)}
        if f"{image_id}_cls_prob" in self._file:
            arrays["scores"] = self._file[f"{image_id}_cls_prob"][()].max(1).astype(np.float32)
        if f"{image_id}_boxes" in self._file:  # the file does not have the sizes of the pictures
            arrays["pixel_boxes"] = self._file[f"{image_id}_boxes"][()].astype(np.float32)
        return arrays


def _image_id(text: str) -> ImageId:
    """Return the number that ``text`` is; text such as ``007``, which its number would not find again, stays text."""
    return int(text) if text.isdecimal() and str(int(text)) == text else text


def _encoded(size: int) -> int:
    """Return the length in base64 of ``size`` bytes."""
    return (size + 2) // 3 * 4


def _check_names(path: Path, names: Iterable[str]) -> None:
    names = set(names)
    missing = [name for name in ARRAYS if name not in names]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; it has {', '.join(sorted(names)) or 'nothing'}")


def _mapped(path: Path, file: Any, info: zipfile.ZipInfo) -> np.ndarray:
    """Map an uncompressed member of a zip file into memory."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{path}: {info.filename} is compressed and cannot be mapped: write it with numpy.savez")
    file.seek(info.header_offset)
    name, extra = struct.unpack("<HH", file.read(30)[26:])  # lengths that only the local header stores
    file.seek(name + extra, os.SEEK_CUR)
    read = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError(f"{path}: {info.filename} must hold numbers or text, got {dtype}")
    start = file.tell()
    if start + int(np.prod(shape)) * dtype.itemsize > path.stat().st_size:
        raise ValueError(f"{path}: {info.filename} is truncated")
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", start, shape, "F" if fortran else "C")


def save_npz(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    features: IO[bytes],
    shape: tuple[int, int | None],
    dtype: np.dtype,
    recipe: str | None = None,
) -> None:
    """Write the arrays, ``features`` (``shape``) from a file of their bytes, and the recipe, always the same bytes."""
    features.seek(0)
    small = dict(arrays) if recipe is None else {**arrays, RECIPE: np.array(recipe)}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, array in small.items():
            with archive.open(_member(name), "w", force_zip64=True) as member:
                npy.write_array(member, array, allow_pickle=False)
        with archive.open(_member("features"), "w", force_zip64=True) as member:
            header = dict(descr=npy.dtype_to_descr(dtype), fortran_order=False, shape=shape)
            npy.write_array_header_1_0(member, header)
            shutil.copyfileobj(features, member, 1 << 20)


def _member(name: str) -> zipfile.ZipInfo:
    """Return a member entry with a fixed time stamp."""
    return zipfile.ZipInfo(f"{name}.npy")
