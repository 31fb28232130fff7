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
import tempfile
from collections.abc import Iterable, Mapping
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from . import files
from .caption_files import ImageId
from .region_formats import TsvRegions, reader_of, save_npz

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

    @cached_property
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
            ValueError: The image is not in the file, has no regions, has NaN or infinite features, or features of
                another width than D.
        """
        if self.count(image_id) == 0:
            raise ValueError(f"{self.path}: image {image_id} has no regions")
        try:
            arrays = self._reader.read(str(image_id))
        except Exception as error:  # HDF5 has its own exception types
            raise ValueError(f"{self.path}: image {image_id} cannot be read: {error}") from error
        if not np.isfinite(arrays["features"]).all():
            raise ValueError(f"{self.path}: image {image_id} has features that are NaN or infinite")
        own, D = arrays["features"].shape[1], self.feature_dim
        if own != D:  # HDF5 has a data set per image
            raise ValueError(f"{self.path}: image {image_id} has features of {own} channels, others of {D}")
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

    A temporary file beside ``path`` holds the features until the end, so twice the file's size is needed on disk.

    Args:
        path: ``.npz``.
        images: Pairs of an id and ``features`` (n, D), ``boxes`` (n, 4) and ``scores`` (n,), one per image; n may be
            0, D must be constant.
        dtype: Type of the stored features: ``float16`` or ``float32``.
        recipe: How the regions were computed, as values that JSON can hold.

    Raises:
        ValueError: The suffix or type is another one, there is no image, or the arrays of an image are invalid.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"region features are written to .npz, got {path}")
    if dtype not in ("float16", "float32"):
        raise ValueError(f"dtype must be 'float16' or 'float32', got {dtype!r}")
    ids, D = dict[str, ImageId](), None
    counts, boxes, scores = [0], list[np.ndarray](), list[np.ndarray]()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent) as features:
        for image_id, regions in images:
            if isinstance(image_id, bool) or not isinstance(image_id, (Integral, str)):
                raise ValueError(f"an image id must be an int or a str, got {image_id!r}")
            if str(image_id) in ids:
                raise ValueError(f"image {image_id} was already added")
            own = _checked(image_id, regions, np.dtype(dtype), D)
            ids[str(image_id)], D = image_id, own["features"].shape[1]
            features.write(own["features"].tobytes())
            counts.append(len(own["features"]))
            boxes.append(own["boxes"])
            scores.append(own["scores"])
        if not ids:
            raise ValueError(f"{path}: there is no image to write")
        named = any(isinstance(x, str) for x in ids.values())
        arrays = dict(image_ids=np.array([x.encode() for x in ids]) if named else np.array([*ids.values()], np.int64))
        arrays.update(offsets=np.cumsum(counts), boxes=np.concatenate(boxes), scores=np.concatenate(scores))
        text = None if recipe is None else json.dumps(recipe)
        shape = sum(counts), D
        files.write(path, lambda partial: save_npz(partial, arrays, features, shape, np.dtype(dtype), text))


def _checked(image_id: ImageId, regions: Mapping[str, Any], dtype: np.dtype, D: int | None) -> dict[str, np.ndarray]:
    """Return the arrays of an image as they are stored, with features of D channels, or of any number for None."""
    missing = [name for name in ("features", "boxes", "scores") if name not in regions]
    if missing:
        raise ValueError(f"image {image_id} has no {', '.join(missing)}")
    features = np.asarray(regions["features"])
    D = D if D is not None else features.shape[-1] if features.ndim else 0
    if features.ndim != 2 or features.shape[1] != D or D == 0:
        raise ValueError(f"image {image_id}: features must have shape (n, {D or 'D'}), got {features.shape}")
    arrays = {}
    for name, shape in (("features", features.shape), ("boxes", (len(features), 4)), ("scores", (len(features),))):
        array = np.asarray(regions[name])
        if array.shape != shape:
            raise ValueError(f"image {image_id}: {name} must have shape {shape}, got {array.shape}")
        with np.errstate(over="ignore"):
            arrays[name] = array.astype(dtype if name == "features" else np.float32)
        if not np.isfinite(arrays[name]).all():
            raise ValueError(f"image {image_id}: {name} are NaN, infinite or outside the range of {arrays[name].dtype}")
    boxes = arrays["boxes"]
    if (boxes < -BORDER).any() or (boxes > 1 + BORDER).any() or (boxes[:, :2] > boxes[:, 2:] + BORDER).any():
        raise ValueError(f"image {image_id}: boxes must be x0 <= x1, y0 <= y1 relative to the image, 0 to 1")
    np.clip(boxes, 0, 1, out=boxes)
    np.maximum(boxes[:, 2:], boxes[:, :2], out=boxes[:, 2:])
    return arrays
