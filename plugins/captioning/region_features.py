"""Region features of a whole image set in one file, read image by image without loading the file into memory.

``.hdf5`` or ``.h5`` (h5py) is the format of Meshed-Memory Transformer (Cornia et al. 2020), for an image with n regions
of D channels:

    {image id}_features (n, D)
    {image id}_boxes (n, 4)     x0, y0, x1, y1 in pixels; written, not read

Files written here also have a ``recipe``, JSON text that describes how to compute the regions of another image.
``.tsv`` of bottom-up-attention (Anderson et al. 2018; several files may be joined with ``cat``) is only read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from . import files
from .caption_files import ImageId
from .region_formats import BOXES, FEATURES, RECIPE, TsvRegions, hdf5_library, reader_of


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

    def features(self, image_id: ImageId) -> np.ndarray:
        """Return a copy of the features of one image, (n, D) in float16 or float32.

        Raises:
            ValueError: The image is not in the file, has no regions, has NaN or infinite features, or features of
                another width than D.
        """
        if self.count(image_id) == 0:
            raise ValueError(f"{self.path}: image {image_id} has no regions")
        try:
            features = self._reader.read(str(image_id))
        except Exception as error:  # HDF5 has its own exception types
            raise ValueError(f"{self.path}: image {image_id} cannot be read: {error}") from error
        if not np.isfinite(features).all():
            raise ValueError(f"{self.path}: image {image_id} has features that are NaN or infinite")
        if features.shape[1] != self.feature_dim:  # HDF5 has a data set per image
            own, others = features.shape[1], self.feature_dim
            raise ValueError(f"{self.path}: image {image_id} has features of {own} channels, others of {others}")
        return features

    @property
    def _reader(self) -> Any:
        """The open file, opened again after a fork if the two processes would share a handle."""
        if self._opened is None or not (self._type.forkable or self._process == os.getpid()):
            self._opened, self._process = self._type(self.path), os.getpid()
        return self._opened


def write_region_features(
    path: str | os.PathLike[str],
    images: Iterable[tuple[ImageId, Mapping[str, Any]]],
    dtype: str = "float16",
    recipe: Mapping[str, Any] | None = None,
) -> None:
    """Write the regions of many images to one file atomically.

    Args:
        path: ``.hdf5`` or ``.h5``.
        images: Pairs of an id and ``features`` (n, D) and, if there are, ``boxes`` (n, 4) in pixels, one per image;
            n may be 0, D must be constant.
        dtype: Type of the stored features: ``float16`` or ``float32``.
        recipe: How the regions were computed, as values that JSON can hold.

    Raises:
        ModuleNotFoundError: h5py is not installed.
        ValueError: The suffix or type is another one, there is no image, or the arrays of an image are invalid.
    """
    path = Path(path)
    if path.suffix not in (".hdf5", ".h5"):
        raise ValueError(f"region features are written to .hdf5 or .h5, got {path}")
    if dtype not in ("float16", "float32"):
        raise ValueError(f"dtype must be 'float16' or 'float32', got {dtype!r}")
    h5py = hdf5_library(path)

    def save(partial: Path) -> None:
        D = None
        with h5py.File(partial, "w") as file:
            for image_id, regions in images:
                if isinstance(image_id, bool) or not isinstance(image_id, (Integral, str)) or "/" in str(image_id):
                    raise ValueError(f"an image id must be an int or a str without /, got {image_id!r}")
                if f"{image_id}{FEATURES}" in file:
                    raise ValueError(f"image {image_id} was already added")
                features, boxes = _checked(image_id, regions, np.dtype(dtype), D)
                D = features.shape[1]
                file[f"{image_id}{FEATURES}"] = features
                if boxes is not None:
                    file[f"{image_id}{BOXES}"] = boxes
            if D is None:
                raise ValueError(f"{path}: there is no image to write")
            if recipe is not None:
                file[RECIPE] = json.dumps(recipe)

    files.write(path, save)


def _checked(
    image_id: ImageId, regions: Mapping[str, Any], dtype: np.dtype, D: int | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return features and boxes of an image as they are stored, with D channels, or any number of them for None."""
    if "features" not in regions:
        raise ValueError(f"image {image_id} has no features")
    features = np.asarray(regions["features"])
    D = D if D is not None else features.shape[-1] if features.ndim else 0
    if features.ndim != 2 or features.shape[1] != D or D == 0:
        raise ValueError(f"image {image_id}: features must have shape (n, {D or 'D'}), got {features.shape}")
    with np.errstate(over="ignore"):
        features = features.astype(dtype)
    boxes = None if regions.get("boxes") is None else np.asarray(regions["boxes"]).astype(np.float32)
    if boxes is not None and boxes.shape != (len(features), 4):
        raise ValueError(f"image {image_id}: boxes must have shape {(len(features), 4)}, got {boxes.shape}")
    for name, array in (("features", features), ("boxes", boxes)):
        if array is not None and not np.isfinite(array).all():
            raise ValueError(f"image {image_id}: {name} are NaN, infinite or outside the range of {array.dtype}")
    return features, boxes
