"""How regions were made: the options and files of ``extract_regions``, recorded in what it writes.

By it the regions of another picture are computed in the same way. A file that the recipe names is looked for where it
lay, seen from the features' file, then by its absolute path, then by the path as it was given; its content must be the
same.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from attn_plugins.captioning.region_features import RegionFeatures
from tools.captioning.regions import BadExtractor, Extractor, Regions, Selection
from tools.requires import extras

TOOL = "tools.captioning.extract_regions"
# What changes the features.
OPTIONS = (
    "mmdet", "torchvision", "grid", "grid_size", "checkpoint", "no_weights", "feature", "min_regions", "max_regions",
    "score_threshold", "nms", "size", "seed", "batch_size", "dtype",
)  # fmt: skip


class BadRecipe(ValueError):
    """A recipe by which no regions can be computed here."""


def make_extractor(options: argparse.Namespace, device: str) -> Extractor:
    """The one of the three that is asked for; only its own toolkit is imported."""
    weights: Any = Path(options.checkpoint) if options.checkpoint else "none" if options.no_weights else "default"
    if options.grid:
        with extras("timm", "tools"):
            from tools.captioning.grid_regions import GridRegions

        size = tuple(options.size) * (2 if len(options.size) == 1 else 1) if options.size else None
        return GridRegions(options.grid, options.grid_size, weights, device, options.seed, size)
    selection = Selection(options.min_regions, options.max_regions, options.score_threshold, options.nms)
    if options.torchvision:
        with extras("timm", "tools"):
            from tools.captioning.torchvision_regions import TorchvisionRegions

        size = (options.size[0], options.size[-1] if len(options.size) > 1 else 1333) if options.size else None
        return TorchvisionRegions(options.torchvision, selection, weights, options.feature, device, options.seed, size)
    if options.size:
        raise BadExtractor("--size goes without --mmdet: the config's test pipeline tells the size")
    config, checkpoint = mmdet_files(options)
    if checkpoint is None and not options.no_weights:
        raise BadExtractor("--mmdet CONFIG needs a CHECKPOINT, or --no-weights for random ones")
    with extras("tools"):
        from tools.captioning.mmdet_regions import MmdetRegions

    return MmdetRegions(config, selection, checkpoint, options.feature, device, options.seed)


def mmdet_files(options: argparse.Namespace) -> tuple[str, str | None]:
    """Config and checkpoint, which is the second argument of ``--mmdet`` or that of ``--checkpoint``."""
    config, *checkpoint = options.mmdet
    if len(checkpoint) > 1 or (checkpoint and options.checkpoint):
        raise BadExtractor(f"--mmdet takes a config and at most one checkpoint, got {' '.join(options.mmdet)}")
    return config, checkpoint[0] if checkpoint else options.checkpoint


def recipe_of(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """What is recorded in ``out``: options, and of each file where it lies and a hash of its content."""
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


def sha256_of(path: Path) -> str:
    """The hash of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


class RecordedExtractor:
    """Computes the regions of any picture as those of a file of features were.

    A detector's regions may differ in the last digits from those of a file, for which pictures were in one batch.

    Args:
        features: A file that ``extract_regions`` wrote.
        device: Where the network runs.
        checkpoint: The weights, instead of those that the recipe names; whatever their content.
        config: The same of mmdet's config.

    Raises:
        BadRecipe: the file has no recipe, or a file that it names is missing or changed.
        BadExtractor: an extractor cannot be made by it.
    """

    def __init__(
        self, features: RegionFeatures, device: str = "cpu", checkpoint: Path | None = None, config: Path | None = None
    ) -> None:
        self.features = features
        recipe = features.recipe
        again = "python -m tools.captioning.extract_regions --overwrite makes it anew, with one"
        if recipe is None:
            raise BadRecipe(
                f"{features.path} has no recipe, which tells how to compute a new picture's regions: {again}"
            )
        if recipe.get("tool") != TOOL or not isinstance(recipe.get("options"), dict):
            raise BadRecipe(f"{features.path} has a recipe of {recipe.get('tool')!r}, not of {TOOL!r}: {again}")
        options = recipe["options"]
        missing = [name for name in OPTIONS if name not in options]
        if missing:
            raise BadRecipe(f"{features.path} has a recipe without {', '.join(missing)}: {again}")
        options = argparse.Namespace(**options)
        files = recipe.get("files", {})
        options.checkpoint = self._file("checkpoint", files, checkpoint) or options.checkpoint
        if options.mmdet:
            options.mmdet = [self._file("config", files, config) or options.mmdet[0]]
        self.dtype = np.dtype(options.dtype)
        self.extractor = make_extractor(options, device)

    def _file(self, name: str, files: Mapping[str, Mapping[str, str]], given: Path | None) -> str | None:
        """Where the file lies; None: the recipe has no such file."""
        if given is not None:
            if not given.is_file():
                raise BadRecipe(f"--region-{name}: {given} does not exist")
            return str(given)
        if name not in files:
            return None
        file, features = files[name], self.features.path
        places = [features.resolve().parent / file["relative"], Path(file["absolute"]), Path(file["given"])]
        found = [path for path in places if path.is_file()]
        for path in found:
            if sha256_of(path) == file["sha256"]:
                return str(path)
        if found:
            what = f"but {found[0]} has another content now"
        else:
            what = f"which is neither {file['absolute']} nor {places[0]}"
        raise BadRecipe(
            f"the regions in {features} were made with the {name} {file['given']}, {what}: give it by --region-{name}"
        )

    def __call__(self, picture: Image.Image) -> Regions:
        """The regions of a picture in RGB, features in the file's precision.

        Raises:
            ValueError: their width is not the file's.
        """
        [found] = self.extractor([self.extractor.prepare(picture)])
        with np.errstate(over="ignore"):
            found["features"] = found["features"].astype(self.dtype)
        if not np.isfinite(found["features"]).all():
            raise ValueError(f"features are NaN, infinite or beyond {self.dtype}")
        width = found["features"].shape[1]
        if width != self.features.feature_dim:
            raise ValueError(
                f"the regions have {width} channels, but those of {self.features.path} {self.features.feature_dim}"
            )
        return found
