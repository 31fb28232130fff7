"""Weights of a training on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from tools import files
from tools.model_names import is_built_for_a_size

from .config import Config, ConfigError


def save_weights(file: Path, model: nn.Module, config: Config, classes: list[str], **facts: Any) -> None:
    """Save weights as safetensors; ``timm.create_model(name, checkpoint_path=file, num_classes=…)`` loads them.

    The file's metadata describe the model, for :func:`read_weights`.
    """
    own = {name: getattr(config, name) for name in ("model", "model_args", "input_size")}
    frames = dict(frames=config.frames) if config.dataset == "clips" else {}
    files.write_weights(file, model, {**own, **frames, "classes": classes, **facts})


def read_weights(file: Path, argument: str = "file") -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read weights and metadata of a file that :func:`save_weights` wrote.

    Raises:
        ConfigError: The file, which the user passed as ``argument``, is not in safetensors format.
    """
    try:
        return files.read_weights(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{argument} must be weights in safetensors, got {file}: {error}") from error


def model_options(metadata: dict[str, str]) -> dict[str, Any]:
    """Return the keyword arguments of ``timm.create_model`` in the metadata of weights, if any."""
    if "model_args" not in metadata:
        return {}
    options = dict(json.loads(metadata["model_args"]), num_classes=len(json.loads(metadata["classes"])))
    if "frames" in metadata:
        options.setdefault("num_frames", json.loads(metadata["frames"]))
    size = json.loads(metadata["input_size"])
    if size is not None and is_built_for_a_size(metadata["model"]):
        options.setdefault("img_size", tuple(size))
    return options


def trained_size(metadata: dict[str, str]) -> tuple[int, int] | None:
    """Return the (H, W) of the images that weights were trained on, or None if their metadata hold no size."""
    size = json.loads(metadata.get("input_size", "null"))
    return None if size is None else (size[0], size[1])
