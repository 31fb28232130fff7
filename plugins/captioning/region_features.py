"""Region features of a whole image set in one file, read image by image without loading the file into memory.

``.npz`` (``numpy.savez``) holds five arrays, uncompressed, for N images with Σn regions of D channels:

    image_ids (N,)   integers or text
    offsets (N + 1,) rows offsets[i] to offsets[i + 1] of the other arrays are the regions of image i
    features (Σn, D) float16 or float32
    boxes (Σn, 4)    x0, y0, x1, y1, relative to the image's width and height, 0 to 1
    scores (Σn,)     detector score of each box

and maybe a ``recipe``, JSON text that describes how to compute the regions of another image. Two other formats are only
read: ``.tsv`` of bottom-up-attention (Anderson et al. 2018; several files may be joined with ``cat``), and ``.hdf5`` or
``.h5`` (h5py) of Meshed-Memory Transformer (Cornia et al. 2020).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from . import files
from .caption_files import ImageId
from .region_formats import ARRAYS, TsvRegions, reader_of
from .region_parts import INDEX, RegionParts, read_index

BORDER = 1e-5  # by which rounding may move a box beyond the border


class RegionFeatures:
    """Reader of a region feature file. Each process opens the file at its first use, so readers can be pickled.

    Args:
        path: The file; its suffix selects the format.

    Raises:
        FileNotFoundError: The file does not exist.
        ModuleNotFoundError: The format needs a package that is not installed.
        ValueError: The suffix is unknown. At the first use: the file is truncated, or has another content.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._type = reader_of(self.path)
        if not self.path.is_file():
            raise FileNotFoundError(f"region features {self.path}: no such file")
        self._opened: Any = None
        self._process: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        kept = self._opened if self._type is TsvRegions else None  # its index
        return {**vars(self), "_opened": kept, "_process": None}

    def __len__(self) -> int:
        """Return the number of images N."""
        return len(self._reader.image_ids)

    @property
    def image_ids(self) -> list[ImageId]:
        """All N image ids, in the order of the file."""
        return list(self._reader.image_ids)

    @property
    def feature_dim(self) -> int:
        """Number of channels D."""
        return self._reader.feature_dim

    @property
    def recipe(self) -> dict[str, Any] | None:
        """Description of how the regions were computed, or None if the file has none.

        Raises:
            ValueError: The recipe is not a JSON object.
        """
        text = self._reader.recipe
        if text is None:
            return None
        try:
            recipe = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{self.path}: its recipe is not JSON: {error}") from error
        if not isinstance(recipe, dict):
            raise ValueError(f"{self.path}: its recipe must be a JSON object, got {text:.80}")
        return recipe

    def __contains__(self, image_id: object) -> bool:
        return self._reader.count(str(image_id)) is not None

    def count(self, image_id: ImageId) -> int:
        """Return the number of regions of an image, which may be 0.

        Raises:
            ValueError: The image is not in the file.
        """
        count = self._reader.count(str(image_id))
        if count is None:
            raise ValueError(f"{self.path} has no image {image_id}; it has {len(self)} others")
        return count

    def regions(self, image_id: ImageId) -> dict[str, np.ndarray]:
        """Return copies of ``features`` (n, D), ``boxes`` (n, 4) and ``scores`` (n,) of one image.

        ``.tsv`` has no scores; ``.hdf5`` may have scores, and boxes only in pixels (``pixel_boxes``).

        Raises:
            ValueError: The image is not in the file, has no regions, or has NaN or infinite features.
        """
        if self.count(image_id) == 0:
            raise ValueError(f"{self.path}: image {image_id} has no regions")
        try:
            arrays = self._reader.read(str(image_id))
        except Exception as error:  # HDF5 has its own exception types
            raise ValueError(f"{self.path}: image {image_id} cannot be read: {error}") from error
        if not np.isfinite(arrays["features"]).all():
            raise ValueError(f"{self.path}: image {image_id} has features that are NaN or infinite")
        return arrays

    @property
    def _reader(self) -> Any:
        """The open file, opened again after a fork if the two processes would share a handle."""
        if self._opened is None or not (self._type.forkable or self._process == os.getpid()):
            opened = self._type(self.path)
            seen: set[str] = set()
            for image_id in opened.image_ids if self._process is None else ():
                if str(image_id) in seen:
                    raise ValueError(f"{self.path}: image {image_id} appears twice")
                seen.add(str(image_id))
            self._opened, self._process = opened, os.getpid()
        return self._opened


def write_region_features(
    path: str | os.PathLike[str],
    images: Iterable[tuple[ImageId, Mapping[str, Any]]],
    dtype: str = "float16",
    recipe: Mapping[str, Any] | None = None,
) -> None:
    """Write the regions of many images to one file atomically.

    A temporary folder next to ``path`` holds the regions until the end, so twice the file's size is needed on disk.

    Args:
        path: ``.npz``.
        images: Pairs of an id and ``features`` (n, D), ``boxes`` (n, 4) and ``scores`` (n,), one per image; n may be
            0, D must be constant.
        dtype: Type of the stored features: ``float16`` or ``float32``.
        recipe: How the regions were computed, as values that JSON can hold.

    Raises:
        ValueError: The suffix is another one, or the arrays of an image are invalid.
    """
    path = check_npz(path)
    folder = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with RegionFeaturesWriter(folder, dtype) as writer:
            for image_id, regions in images:
                writer.append(image_id, regions)
        writer.assemble(path, recipe)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_npz(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file to write.

    Raises:
        ValueError: Its suffix is not ``.npz``.
    """
    if Path(path).suffix != ".npz":
        raise ValueError(f"region features are written to .npz, got {path}")
    return Path(path)


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
        image_id = image_id if isinstance(image_id, str) else int(image_id)  # also numpy's
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
        if isinstance(image_id, bool) or not isinstance(image_id, (Integral, str)):
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
        if (boxes < -BORDER).any() or (boxes > 1 + BORDER).any() or (boxes[:, :2] > boxes[:, 2:] + BORDER).any():
            raise ValueError(f"image {image_id}: boxes must be x0 <= x1, y0 <= y1 relative to the image, 0 to 1")
        np.clip(boxes, 0, 1, out=boxes)
        np.maximum(boxes[:, 2:], boxes[:, :2], out=boxes[:, 2:])
        return arrays

    def assemble(self, path: str | os.PathLike[str], recipe: Mapping[str, Any] | None = None) -> None:
        """Write all images so far and the ``recipe`` to one file; the folder remains."""
        path = check_npz(path)
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
