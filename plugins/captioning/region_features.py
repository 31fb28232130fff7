"""Region features of a whole image set in one file, read image by image without loading the file into memory.

Every format holds the same five arrays, for N images with Σn regions of D channels:

    image_ids (N,)   integers or text
    offsets (N + 1,) rows offsets[i] to offsets[i + 1] of the other arrays are the regions of image i
    features (Σn, D) float16 or float32
    boxes (Σn, 4)    x0, y0, x1, y1, relative to the image's width and height, 0 to 1
    scores (Σn,)     detector score of each box

``.npz`` (``numpy.savez``): uncompressed members of these names, mapped into memory. ``.h5``, ``.hdf5`` (h5py): datasets
of these names. ``.lmdb`` (lmdb): one record per image, whose key is the id in UTF-8 and whose value is the
concatenation of boxes, scores (both float32) and features; ``__image_ids__``, ``__offsets__`` and ``__features__`` (no
rows) are stored in npy format.

A file may also hold a ``recipe``, JSON text that describes how to compute the regions of another image.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from . import files
from .caption_files import ImageId
from .region_formats import ARRAYS, open_arrays, package_of
from .region_parts import INDEX, RegionParts, read_index


class RegionFeatures:
    """Reader of a region feature file. Each process opens the file at its first use, so readers can be pickled.

    Args:
        path: The file; its suffix selects the format.

    Raises:
        FileNotFoundError: The file does not exist.
        ModuleNotFoundError: The format needs a package that is not installed.
        ValueError: The suffix is unknown. At the first use: the file is truncated, lacks an array, or the arrays'
            shapes are inconsistent.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        package_of(self.path)
        if not self.path.is_file():
            raise FileNotFoundError(f"region features {self.path}: no such file")
        self._process: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_process": None}

    def __len__(self) -> int:
        """Return the number of images N."""
        self._open()
        return len(self._ids)

    @property
    def image_ids(self) -> list[ImageId]:
        """All N image ids, in the order of the file."""
        self._open()
        return list(self._ids)

    @property
    def feature_dim(self) -> int:
        """Number of channels D."""
        self._open()
        return self._shape[1]

    @property
    def recipe(self) -> dict[str, Any] | None:
        """Description of how the regions were computed, or None if the file has none.

        Raises:
            ValueError: The recipe is not a JSON object.
        """
        self._open()
        if self._recipe is None:
            return None
        try:
            recipe = json.loads(self._recipe)
        except ValueError as error:
            raise ValueError(f"{self.path}: its recipe is not JSON: {error}") from error
        if not isinstance(recipe, dict):
            raise ValueError(f"{self.path}: its recipe must be a JSON object, got {self._recipe:.80}")
        return recipe

    def __contains__(self, image_id: object) -> bool:
        self._open()
        return str(image_id) in self._index

    def count(self, image_id: ImageId) -> int:
        """Return the number of regions of an image, which may be 0.

        Raises:
            ValueError: The image is not in the file.
        """
        first, last = self._rows(image_id)
        return last - first

    def regions(self, image_id: ImageId) -> dict[str, np.ndarray]:
        """Return copies of ``features`` (n, D), ``boxes`` (n, 4) and ``scores`` (n,) of one image.

        Raises:
            ValueError: The image is not in the file, has no regions, or has NaN or infinite features.
        """
        first, last = self._rows(image_id)
        if first == last:
            raise ValueError(f"{self.path}: image {image_id} has no regions")
        try:
            arrays = self._read(str(image_id), first, last)
        except Exception as error:  # LMDB and HDF5 have their own exception types
            raise ValueError(f"{self.path}: image {image_id} cannot be read: {error}") from error
        if not np.isfinite(arrays["features"]).all():
            raise ValueError(f"{self.path}: image {image_id} has features that are NaN or infinite")
        return arrays

    def _rows(self, image_id: ImageId) -> tuple[int, int]:
        self._open()
        i = self._index.get(str(image_id))
        if i is None:
            raise ValueError(f"{self.path} has no image {image_id}; it has {len(self)} others")
        return int(self._offsets[i]), int(self._offsets[i + 1])

    def _open(self) -> None:
        """Open the file, and reopen it after a fork, because the two processes would share a handle."""
        if self._process == os.getpid():
            return
        opened = open_arrays(self.path)
        ids, offsets = opened.pop("image_ids"), opened.pop("offsets")
        self._lmdb, self._recipe = opened.pop("environment", None), opened.pop("recipe")
        self._arrays = opened
        self._ids: list[ImageId] = [x.decode() if isinstance(x, bytes) else x for x in ids.tolist()]
        self._offsets = offsets
        self._shape, self._dtype = opened["features"].shape, opened["features"].dtype
        self._check()
        self._index = {str(x): i for i, x in enumerate(self._ids)}
        if len(self._index) != len(self._ids):
            twice = next(x for i, x in enumerate(self._ids) if self._index[str(x)] != i)
            raise ValueError(f"{self.path}: image {twice} appears twice")
        self._process = os.getpid()

    def _check(self) -> None:
        N, offsets = len(self._ids), self._offsets
        if offsets.shape != (N + 1,) or offsets.dtype.kind not in "iu":
            raise ValueError(
                f"{self.path}: offsets must be {N + 1} integers, one more than images, got shape {offsets.shape} of "
                f"{offsets.dtype}"
            )
        falls = np.flatnonzero(np.diff(offsets.astype(np.int64)) < 0)
        if offsets[0] != 0 or falls.size:
            where = f"they decrease after image {self._ids[falls[0]]}" if falls.size else f"got {offsets[0]} first"
            raise ValueError(f"{self.path}: offsets must start at 0 and increase; {where}")
        if len(self._shape) != 2 or self._dtype not in (np.float16, np.float32):
            raise ValueError(
                f"{self.path}: features must be (regions, channels) in float16 or float32, got {self._shape} "
                f"{self._dtype}"
            )
        rows = int(offsets[-1])
        for name, shape in (("features", (rows, self._shape[1])), ("boxes", (rows, 4)), ("scores", (rows,))):
            if name in self._arrays and self._lmdb is None and self._arrays[name].shape != shape:
                raise ValueError(f"{self.path}: {name} must have shape {shape}, got {self._arrays[name].shape}")

    def _read(self, image_id: str, first: int, last: int) -> dict[str, np.ndarray]:
        if self._lmdb is None:
            return {name: np.array(self._arrays[name][first:last]) for name in ("features", "boxes", "scores")}
        with self._lmdb.begin() as transaction:
            record = transaction.get(image_id.encode())
        n, D = last - first, self._shape[1]
        size = n * (20 + D * self._dtype.itemsize)
        if record is None or len(record) != size:
            raise ValueError(f"the record has {0 if record is None else len(record)} bytes, not {size}")
        boxes, scores = (
            np.frombuffer(record, np.float32, length, start).copy() for length, start in ((4 * n, 0), (n, 16 * n))
        )
        features = np.frombuffer(record, self._dtype, n * D, 20 * n).reshape(n, D).copy()
        return dict(features=features, boxes=boxes.reshape(n, 4), scores=scores)


def write_region_features(
    path: str | os.PathLike[str],
    images: Iterable[tuple[ImageId, Mapping[str, Any]]],
    dtype: str = "float16",
    recipe: Mapping[str, Any] | None = None,
) -> None:
    """Write the regions of many images to one file atomically.

    A temporary folder next to ``path`` holds the regions until the end, so twice the file's size is needed on disk.

    Args:
        path: ``.npz``, ``.h5``, ``.hdf5`` or ``.lmdb``.
        images: Pairs of an id and ``features`` (n, D), ``boxes`` (n, 4) and ``scores`` (n,), one per image; n may be
            0, D must be constant.
        dtype: Type of the stored features: ``float16`` or ``float32``.
        recipe: How the regions were computed, as values that JSON can hold.

    Raises:
        ModuleNotFoundError: The format needs a package that is not installed.
        ValueError: The suffix is unknown, or the arrays of an image are invalid.
    """
    path = Path(path)
    package_of(path)
    folder = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with RegionFeaturesWriter(folder, dtype) as writer:
            for image_id, regions in images:
                writer.append(image_id, regions)
        writer.assemble(path, recipe)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class RegionFeaturesWriter:
    """Writer that appends images to flat files in a folder and assembles them into one file.

    It resumes an interrupted run after the last complete image in ``folder``.

    Args:
        folder: Created if it does not exist.
        dtype: Type of the stored features: ``float16`` or ``float32``.
    """

    def __init__(self, folder: str | os.PathLike[str], dtype: str = "float16") -> None:
        if dtype not in ("float16", "float32"):
            raise ValueError(f"dtype must be 'float16' or 'float32', got {dtype!r}")
        self.folder, self.dtype = Path(folder), np.dtype(dtype)
        self.folder.mkdir(parents=True, exist_ok=True)
        index = read_index(self.folder)
        if index.dtype not in (None, dtype):
            raise ValueError(f"{self.folder} was started with {index.dtype}, not {dtype}")
        self.image_ids, self.offsets, self.feature_dim = index.image_ids, index.offsets, index.feature_dim
        self._known = set(map(str, self.image_ids))
        self._index = _appended(self.folder / INDEX, index.size)
        rows, D = self.offsets[-1], self.feature_dim or 0
        sizes = {"features": D * self.dtype.itemsize, "boxes": 16, "scores": 4}
        self._files = {name: _appended(self.folder / name, rows * size) for name, size in sizes.items()}

    def append(self, image_id: ImageId, regions: Mapping[str, Any]) -> None:
        """Append the ``features`` (n, D), ``boxes`` (n, 4) and ``scores`` (n,) of an image.

        Raises:
            ValueError: A shape is wrong, a value is not finite, or the image was already appended.
        """
        arrays = self._checked(image_id, regions)
        for name, array in arrays.items():
            self._files[name].write(array.tobytes())
            self._files[name].flush()  # data must be on disk before its index line
        n, self.feature_dim = arrays["features"].shape
        self._index.write((json.dumps([image_id, n, self.feature_dim, self.dtype.name]) + "\n").encode())
        self._index.flush()
        self.image_ids.append(image_id)
        self._known.add(str(image_id))
        self.offsets.append(self.offsets[-1] + n)

    def _checked(self, image_id: ImageId, regions: Mapping[str, Any]) -> dict[str, np.ndarray]:
        if isinstance(image_id, bool) or not isinstance(image_id, (int, str)):
            raise ValueError(f"an image id must be an int or a str, got {image_id!r}")
        if str(image_id) in self._known:
            raise ValueError(f"image {image_id} was already added")
        missing = [name for name in ARRAYS[2:] if name not in regions]
        if missing:
            raise ValueError(f"image {image_id} has no {', '.join(missing)}")
        features = np.asarray(regions["features"])
        D = self.feature_dim if self.feature_dim is not None else features.shape[-1] if features.ndim else 0
        if features.ndim != 2 or features.shape[1] != D or D == 0:
            raise ValueError(f"image {image_id}: features must have shape (n, {D or 'D'}), got {features.shape}")
        arrays = {}
        for name, shape in (("features", features.shape), ("boxes", (len(features), 4)), ("scores", (len(features),))):
            array = np.asarray(regions[name])
            if array.shape != shape:
                raise ValueError(f"image {image_id}: {name} must have shape {shape}, got {array.shape}")
            with np.errstate(over="ignore"):
                arrays[name] = array.astype(self.dtype if name == "features" else np.float32)
            if not np.isfinite(arrays[name]).all():
                raise ValueError(
                    f"image {image_id}: {name} are NaN, infinite or outside the range of {arrays[name].dtype}"
                )
        boxes = arrays["boxes"]
        if ((boxes < 0) | (boxes > 1)).any() or (boxes[:, :2] > boxes[:, 2:]).any():
            raise ValueError(f"image {image_id}: boxes must be x0 <= x1, y0 <= y1 relative to the image, 0 to 1")
        return arrays

    def assemble(self, path: str | os.PathLike[str], recipe: Mapping[str, Any] | None = None) -> None:
        """Write all images so far and the ``recipe`` to one file; the folder remains."""
        path = Path(path)
        package_of(path)
        self.close()
        parts = RegionParts([self.folder])
        if not parts.image_ids:
            raise ValueError(f"{path}: there is no image to write")
        files.write(path, lambda partial: parts.save(partial, recipe))

    def close(self) -> None:
        """Close the files."""
        for file in (self._index, *self._files.values()):
            file.close()

    def __enter__(self) -> RegionFeaturesWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _appended(path: Path, size: int) -> Any:
    """Truncate a file to ``size`` bytes and open it for appending."""
    path.touch()
    if path.stat().st_size < size:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, not {size}: delete {path.parent} and start again")
    os.truncate(path, size)
    return path.open("ab")
