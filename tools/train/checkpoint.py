"""Weights of a training on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
        ConfigError: the file, which the user passed as ``argument``, is not in safetensors format.
    """
    try:
        return files.read_weights(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{argument} must be weights in safetensors, got {file}: {error}") from error


def model_options(file: Path) -> dict[str, Any]:
    """Return the keyword arguments of ``timm.create_model`` stored with the weights of a file, if any."""
    metadata = read_weights(file)[1]
    if "model_args" not in metadata:
        return {}
    options = dict(json.loads(metadata["model_args"]), num_classes=len(json.loads(metadata["classes"])))
    if "frames" in metadata:
        options.setdefault("num_frames", json.loads(metadata["frames"]))
    size = json.loads(metadata["input_size"])
    if size is not None and is_built_for_a_size(metadata["model"]):
        options.setdefault("img_size", tuple(size))
    return options


def trained_size(file: Path, argument: str = "file") -> tuple[int, int] | None:
    """Return the (H, W) of the images that the weights of a file were trained on, or None if it stores no size."""
    size = json.loads(read_weights(file, argument)[1].get("input_size", "null"))
    return None if size is None else (size[0], size[1])


def load_weights(model: nn.Module, file: Path, config: Config, classes: Sequence[str]) -> None:
    """Load the weights of ``--evaluate`` into the same model.

    Raises:
        ConfigError: the file cannot be read, or its weights belong to another model or other classes.
    """
    tensors, metadata = read_weights(file, "--evaluate")
    named, saved = metadata.get("model", config.model), json.loads(metadata.get("classes", "null"))
    if named != config.model:
        raise ConfigError(f"--evaluate must be weights of {config.model}, but {file} holds those of {named}")
    if saved is not None and saved != list(classes):
        raise ConfigError(
            f"--evaluate must be weights for the classes of --data: {classes_apart(saved, classes, file)}"
        )
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        trained = f" (trained with model_args {metadata['model_args']})" if "model_args" in metadata else ""
        reason = f"{error}"[:300] + trained
        raise ConfigError(f"--evaluate {file} does not fit {config.model} {config.model_args}: {reason}") from error


def start_from(model: nn.Module, file: Path) -> str:
    """Load the parameters of a file whose names and shapes the model has; return how many, in words.

    Raises:
        ConfigError: the file cannot be read, or shares no parameter with the model.
    """
    tensors, own = read_weights(file, "init")[0], model.state_dict()
    shared = {name: tensor for name, tensor in tensors.items() if name in own and own[name].shape == tensor.shape}
    if not shared:
        raise ConfigError(f"init {file} has no parameter of a name and shape of the model")
    model.load_state_dict(shared, strict=False)
    return f"{len(shared)} of {len(own)} tensors of the model start from {file}"


def classes_apart(before: Sequence[str], now: Sequence[str], file: Path) -> str:
    """Describe how the classes of a checkpoint and those of ``--data`` differ."""
    for names, others, where in ((before, now, str(file)), (now, before, "--data")):
        odd = [name for name in names if name not in others]
        if odd:
            more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
            return f"only {where} has {', '.join(odd[:3])}{more}"
    return "they are in another order"
