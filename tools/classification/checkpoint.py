"""What a training leaves on disk, and how it is taken up again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import nn

from tools.files import write

from .config import Config, ConfigError

# What a resumed training may not change: other weights, or another course of the learning rate.
FIXED = (
    "model", "model_args", "dataset", "input_size", "epochs", "batch_size", "optimizer", "lr", "lr_batch_size",
    "schedule", "warmup", "milestones", "decay_epochs", "decay_rate", "ema", "seed",
)  # fmt: skip


def save_weights(file: Path, model: nn.Module, config: Config, classes: list[str], **facts: Any) -> None:
    """Weights as safetensors; ``timm.create_model(name, checkpoint_path=file, num_classes=…)`` loads them.

    The file's metadata say which model they belong to, as :func:`read_weights` wants it.
    """
    metadata = {
        "format": "pt",
        "model": config.model,
        "model_args": json.dumps(config.model_args),
        "input_size": json.dumps(config.input_size),
        "classes": json.dumps(classes),
        **{key: json.dumps(value) for key, value in facts.items()},
    }
    tensors = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    content = serialize(tensors, metadata)
    write(file, lambda partial: partial.write_bytes(content))


def read_weights(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Weights and metadata of a file that :func:`save_weights` wrote."""
    try:
        with safe_open(str(file), "pt") as opened:
            return {key: opened.get_tensor(key) for key in opened.keys()}, opened.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} is not a checkpoint in safetensors: {error}") from error


def model_options(file: Path) -> dict[str, Any]:
    """The keyword arguments of ``timm.create_model`` that fit the weights of a file; none where it tells nothing."""
    metadata = read_weights(file)[1]
    if "model_args" not in metadata:
        return {}
    options = dict(json.loads(metadata["model_args"]), num_classes=len(json.loads(metadata["classes"])))
    size = json.loads(metadata["input_size"])
    if size is not None and metadata["model"].startswith("aa_"):
        options.setdefault("img_size", tuple(size))
    return options


def load_weights(model: nn.Module, file: Path, config: Config) -> None:
    """Load what :func:`save_weights` wrote, into the same model."""
    tensors, metadata = read_weights(file)
    if metadata.get("model") not in (None, config.model):
        raise ConfigError(f"{file} holds a {metadata['model']}, but the model is a {config.model}")
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ConfigError(f"{file} does not fit {config.model} {config.model_args}: {error}") from error


def save_state(file: Path, config: Config, epoch: int, best: float, parts: dict[str, Any], rows: list[dict]) -> None:
    """Everything that the next epoch needs."""
    state = dict(config=json.dumps(dataclasses.asdict(config)), epoch=epoch, best=best, rows=rows)
    state["parts"] = {name: part.state_dict() for name, part in parts.items() if part is not None}
    write(file, lambda partial: torch.save(state, partial))


def load_state(file: Path, config: Config, parts: dict[str, Any]) -> tuple[int, float, list[dict]]:
    """Take a training up: epochs done, best accuracy and the log's rows so far.

    Raises:
        ConfigError: the file cannot be read, or the training it belongs to was another.
    """
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        before = json.loads(state["config"])
    except Exception as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    now = json.loads(json.dumps(dataclasses.asdict(config)))
    for key in FIXED:
        if before.get(key) != now[key]:
            raise ConfigError(f"{file} was trained with {key} = {before.get(key)!r}, but now it is {now[key]!r}")
    for name, part in parts.items():
        if part is not None:
            part.load_state_dict(state["parts"][name])
    return state["epoch"], state["best"], state["rows"]
