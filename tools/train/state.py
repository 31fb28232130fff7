"""Saving and resuming of interrupted trainings."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tools.files import write

from .checkpoint import classes_apart
from .config import Config, ConfigError, build, read_yaml

# Settings that a resumed training must not change: they affect the weights, the learning rate or the optimizer.
FIXED = (
    "model", "model_args", "init_std", "init", "dataset", "frames", "input_size", "epochs", "batch_size", "optimizer",
    "optimizer_args", "momentum", "weight_decay", "lr", "lr_batch_size", "offset_lr_scale", "schedule", "warmup",
    "milestones", "decay_epochs", "decay_rate", "precision", "ema", "seed",
)  # fmt: skip


@dataclass
class Settings:
    """Settings of a training from beginning to end."""

    config: Config  # in use
    asked: Config  # as requested; its batch size may exceed the number of images
    file: dict[str, Any] | None = None  # CONFIG's own keys and values when the training began; None without CONFIG
    classes: list[str] | None = None
    images: int | None = None  # number of training images
    left_out: list[str] | None = None  # the broken images that --skip-broken found; None if it was not given


@dataclass
class State:
    """A training after a whole epoch."""

    settings: Settings
    epoch: int  # number of finished epochs
    best: float  # accuracy so far
    rows: list[dict]  # of the log
    parts: dict[str, Any] = field(default_factory=dict)  # states of model, averaged model, optimizer and scaler

    def restore(self, parts: Mapping[str, Any], file: Path) -> None:
        """Restore the states of ``parts``; raise a ConfigError if a state does not fit."""
        for name, part in parts.items():
            if part is not None:
                try:
                    part.load_state_dict(self.parts[name])
                except (KeyError, RuntimeError, ValueError) as error:
                    reason = " ".join(str(error).split())[:300]
                    raise ConfigError(f"--resume: the {name} of {file} does not fit: {reason}") from error


def save_state(file: Path, state: State, parts: Mapping[str, Any]) -> None:
    """Write everything that the next epoch needs."""
    content = dict(
        settings=json.dumps(dataclasses.asdict(state.settings), default=str),  # YAML values may be dates
        epoch=state.epoch,
        best=state.best,
        rows=state.rows,
        parts={name: part.state_dict() for name, part in parts.items() if part is not None},
    )
    write(file, lambda partial: torch.save(content, partial))


def read_state(file: Path) -> State:
    """Read the state of the training to ``--resume``.

    Raises:
        ConfigError: there is no state, or it cannot be read.
    """
    if not file.is_file():
        raise ConfigError(
            f"--resume needs the state of a training, and there is no {file}: name its folder by --output, or start "
            "one without --resume"
        )
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
        settings = json.loads(content["settings"])
        for key in ("config", "asked"):
            settings[key] = build(settings[key])
        return State(Settings(**settings), content["epoch"], content["best"], content["rows"], content["parts"])
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"--resume needs the state of a training, and {file} cannot be read as one: {reason}"
        ) from error


def resumed(
    settings: Settings, folder: Path, file: Path | None, overrides: Sequence[str] = (), **more: Any
) -> tuple[Config, list[str]]:
    """Return the configuration of the training in ``folder`` as the command line resumes it, and notes to print.

    ``file`` is the current CONFIG, if any; ``overrides`` and ``more`` are those of :func:`tools.train.config.build`.

    Raises:
        ConfigError: the command line describes another training.
    """
    asked, notes = _plain(settings.asked), list[str]()
    now = _plain(build(asked, overrides, **more))
    running = _plain(settings.config)
    changed = {key: now[key] for key in now if now[key] not in (asked[key], running[key])}
    for key, value in changed.items():
        if key in FIXED:
            raise ConfigError(
                f"--resume: {folder} was trained with {key} = {running[key]!r}, but now it is {value!r}; leave "
                "that out to resume it, or train elsewhere with another --output"
            )
        notes.append(f"resuming with {key} = {value!r}, which was {running[key]!r}")
    if file is not None:
        notes += _file_notes(settings, folder, file)
    return build({**running, **changed}), notes


def _file_notes(settings: Settings, folder: Path, file: Path) -> list[str]:
    before, now = settings.file, json.loads(json.dumps(read_yaml(file), default=str))
    model = settings.config.model
    if now.get("model") != model and (before is None or before.get("model") != now.get("model")):
        raise ConfigError(f"--resume: {folder} holds a training of {model}, but CONFIG {file} names {now.get('model')}")
    if before is None:
        return []
    odd = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    changes = ", ".join(f"{key} {before.get(key)!r} → {now.get(key)!r}" for key in odd)
    return [f"CONFIG {file} has changed since ({changes}): the training keeps its own settings"] if odd else []


def check_data(settings: Settings, state_file: Path, classes: Sequence[str], images: int) -> list[str]:
    """Compare ``--data`` with the data at the start of the training; return notes to print.

    Raises:
        ConfigError: the classes differ.
    """
    if settings.classes is not None and settings.classes != list(classes):
        apart = classes_apart(settings.classes, classes, state_file)
        raise ConfigError(f"--resume needs --data of the same classes: {apart}")
    if settings.images not in (None, images):
        return [f"--data holds {images} images to train on, {settings.images} when the training began"]
    return []


def _plain(config: Config) -> dict[str, Any]:
    """Return keys and values as JSON stores them, for comparison."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))
