"""Recipes of regions: the options and files of ``extract``, recorded in its output.

A recipe makes it possible to compute the regions of another picture in the same way. Its files are searched first at
their path relative to the features' file, then at the absolute path, then at the path as given; their content must be
unchanged.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from attn_plugins.captioning.region_features import RegionFeatures
from tools.caption.regions import Extractor, Regions, Selection

TOOL = "tools.caption extract"
TOOLS = (TOOL, "tools.captioning.extract_regions")  # the latter in older files
# Options that change the features.
OPTIONS = (
    "mmdet", "torchvision", "grid", "grid_size", "checkpoint", "no_weights", "feature", "min_regions", "max_regions",
    "score_threshold", "nms", "size", "seed", "batch_size", "dtype",
)  # fmt: skip


def make_extractor(options: argparse.Namespace, device: str) -> Extractor:
    """Return the requested one of the three extractors; only its own toolkit is imported."""
    weights: Any = Path(options.checkpoint) if options.checkpoint else "none" if options.no_weights else "default"
    size = options.size
    if options.grid:
        from tools.caption.grid_regions import GridRegions

        size = size and (size[0], size[-1])
        return GridRegions(options.grid, options.grid_size, weights, device, options.seed, size)
    selection = Selection(options.min_regions, options.max_regions, options.score_threshold, options.nms)
    if options.torchvision:
        from tools.caption.torchvision_regions import TorchvisionRegions

        size = size and (size[0], size[-1] if len(size) > 1 else 1333)
        return TorchvisionRegions(options.torchvision, selection, weights, options.feature, device, options.seed, size)
    if size:
        raise ValueError("--size goes without --mmdet: the config's test pipeline sets the size")
    config, checkpoint = mmdet_files(options)
    if checkpoint is None and not options.no_weights:
        raise ValueError("--mmdet CONFIG needs a CHECKPOINT, or --no-weights for random ones")
    from tools.caption.mmdet_regions import MmdetRegions

    return MmdetRegions(config, selection, checkpoint, options.feature, device, options.seed)


def mmdet_files(options: argparse.Namespace) -> tuple[str, str | None]:
    """Return config and checkpoint; the latter follows the config or ``--checkpoint``."""
    config, *checkpoint = options.mmdet
    if len(checkpoint) > 1 or (checkpoint and options.checkpoint):
        raise ValueError(f"--mmdet takes a config and at most one checkpoint, got {' '.join(options.mmdet)}")
    return config, checkpoint[0] if checkpoint else options.checkpoint


def recipe_of(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Return the recipe recorded in ``out``: options, and the paths and content hash of each file."""
    chosen: dict[str, Any] = {name: getattr(options, name) for name in OPTIONS}
    named: dict[str, str | None] = {"checkpoint": options.checkpoint}
    if options.mmdet:
        named["config"], named["checkpoint"] = mmdet_files(options)
        chosen.update(mmdet=[named["config"]], checkpoint=named["checkpoint"])
    files = {name: _located(Path(path), out) for name, path in named.items() if path and Path(path).is_file()}
    return dict(tool=TOOL, options=chosen, files=files)


def _located(path: Path, out: Path) -> dict[str, Any]:
    absolute, folder = path.resolve(), out.resolve().parent
    return dict(
        given=str(path), absolute=str(absolute), relative=os.path.relpath(absolute, folder), sha256=sha256_of(absolute)
    )


def digest(values: Any) -> str:
    """Return the hash of JSON values."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """Return the hash of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


class RecordedExtractor:
    """Extractor that repeats the recipe of a features file for any picture.

    A detector's regions may differ in the last digits from the file's, which were computed in batches. ``checkpoint``
    and ``config`` (of mmdet) take the place of the recipe's; their content is not checked.

    Raises:
        ValueError: the file has no recipe, one of its files is missing or changed, or no extractor can be built by it.
    """

    def __init__(
        self, features: RegionFeatures, device: str = "cpu", checkpoint: Path | None = None, config: Path | None = None
    ) -> None:
        self.features = features
        recipe = features.recipe or {}
        options = recipe.get("options") if recipe.get("tool") in TOOLS else None
        missing = [name for name in OPTIONS if name not in options] if isinstance(options, dict) else []
        if not isinstance(options, dict) or missing:
            lacks = f"a recipe without {', '.join(missing)}" if missing else "no recipe of tools.caption extract"
            raise ValueError(
                f"{features.path} has {lacks}, which the regions of a new picture need: "
                "python -m tools.caption extract --overwrite writes it"
            )
        chosen = argparse.Namespace(**options)
        chosen.checkpoint = self._file("checkpoint", recipe, checkpoint) or chosen.checkpoint
        if chosen.mmdet:
            chosen.mmdet = [self._file("config", recipe, config) or chosen.mmdet[0]]
        self.dtype = np.dtype(chosen.dtype)
        self.extractor = make_extractor(chosen, device)

    def _file(self, name: str, recipe: Mapping[str, Any], given: Path | None) -> str | None:
        """Return the path of a file of the recipe, or None if the recipe has no such file."""
        if given is not None:
            if not given.is_file():
                raise ValueError(f"--region-{name}: {given} does not exist")
            return str(given)
        file = recipe.get("files", {}).get(name)
        if file is None:
            return None
        path = self.features.path
        places = [path.resolve().parent / file["relative"], Path(file["absolute"]), Path(file["given"])]
        present = [place for place in places if place.is_file()]
        for place in present:
            if sha256_of(place) == file["sha256"]:
                return str(place)
        what = f"but {present[0]} has changed" if present else f"which is neither {places[1]} nor {places[0]}"
        raise ValueError(f"the regions in {path} are of the {name} {file['given']}, {what}: pass --region-{name}")

    def __call__(self, picture: Image.Image) -> Regions:
        """Compute the regions of a picture in RGB, with features in the file's precision.

        Raises:
            ValueError: the width of the features differs from the file's.
        """
        [regions] = self.extractor([self.extractor.prepare(picture)])
        with np.errstate(over="ignore"):
            regions["features"] = regions["features"].astype(self.dtype)
        if not np.isfinite(regions["features"]).all():
            raise ValueError(f"features are NaN, infinite or beyond {self.dtype}")
        width, expected = regions["features"].shape[1], self.features.feature_dim
        if width != expected:
            raise ValueError(f"the regions have {width} channels, but those of {self.features.path} {expected}")
        return regions
