"""The configuration of a training: a flat YAML file, every key of which is a field here."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tools.clips import SAMPLINGS

SCHEDULES = ("cosine", "multistep", "exponential")
CROPS = ("random_resized", "pad", "none")
PRECISIONS = ("float32", "bfloat16", "float16")


class ConfigError(ValueError):
    """A configuration that cannot be meant."""


@dataclass(frozen=True)
class Config:
    """A training from beginning to end.

    Attributes:
        model: timm's name.
        model_args: Keyword arguments of the model: ``kappa``, ``nu``, ``num_heads``, ``img_size``, ...
        init_std: Of parameters, by name: the deviation of the normal distribution that they are drawn from, instead of
            by the model. TimeSformer's ``time_embed`` begins at 0, for pretrained weights; trained from nothing, it and
            ``pos_embed`` want more.
        dataset: ``'folder'`` (``train/CLASS/*.png`` and ``val/CLASS/*.png``), ``'clips'`` (``train/CLASS/*.mp4``, or
            folders of frames ``train/CLASS/CLIP/*.png``, and ``val`` likewise), or one of timm's datasets, such as
            ``'torch/cifar100'``.
        frames: Of a clip; validation spreads them over the whole of it.
        frame_sampling: Which frames of a training clip: ``'uniform'`` (as in validation), ``'segments'`` (a random one
            of each of ``frames`` equal parts) or ``'stride'`` (at a random distance, from a random one on).
        input_size: (H, W) in pixels; None: the model's own.
        epochs: Passes over the training images.
        batch_size: Images of one optimizer step, over all processes and accumulated parts.
        accumulate: Parts in which a process computes its share of a step.
        optimizer: timm's name; ``'momentum'`` is SGD without Nesterov's correction.
        optimizer_args: Further arguments of the optimizer.
        momentum: Of the optimizer.
        weight_decay: Of all parameters but biases, normalisations and position tables.
        lr: Learning rate for a step of ``lr_batch_size`` images, in proportion for another.
        lr_batch_size: None: ``lr`` as it is.
        offset_lr_scale: Factor of the learning rate of sampling offsets.
        schedule: ``'cosine'`` to 0, ``'multistep'`` at ``milestones``, or ``'exponential'`` in steps of
            ``decay_epochs``.
        warmup: Share of all epochs in which the learning rate rises linearly from 0.
        milestones: Epochs at which ``'multistep'`` multiplies by ``decay_rate``.
        decay_epochs: Distance of ``'exponential'``'s steps.
        decay_rate: Factor of one step.
        clip_grad: Greatest norm of the gradient; None for no limit.
        crop: Of training images: ``'random_resized'``, ``'pad'`` (an eighth of the size on each side, then a random
            crop), or ``'none'``.
        scale: Share of the area that random resized crops show.
        hflip: Probability of mirroring a training image, or all frames of a clip; 0 where left and right are classes.
        color_jitter: Strength of changes of brightness, contrast and saturation.
        auto_augment: timm's notation, such as ``'rand-m9-mstd0.5'``.
        erasing: Probability of erasing a rectangle.
        mixup: Of timm's ``Mixup``.
        cutmix: Of timm's ``Mixup``.
        label_smoothing: Share of the target that all classes share.
        precision: ``'float32'``, or ``'bfloat16'`` or ``'float16'`` by autocast.
        channels_last: Memory format of images and weights.
        ema: Decay of the averaged weights, which then are what is evaluated and kept; None for no average.
        workers: Processes that load images, for each training process; None: the machine's cores, shared by its
            training processes. Which random augmentation an image gets depends on it.
        seed: Of weights, order and augmentation.
    """

    model: str
    model_args: dict[str, Any] = field(default_factory=dict)
    init_std: dict[str, Any] = field(default_factory=dict)
    dataset: str = "folder"
    frames: int = 8
    frame_sampling: str = "uniform"
    input_size: tuple[int, int] | None = None
    epochs: int = 100
    batch_size: int = 256
    accumulate: int = 1
    optimizer: str = "momentum"
    optimizer_args: dict[str, Any] = field(default_factory=dict)
    momentum: float = 0.9
    weight_decay: float = 1e-4
    lr: float = 0.1
    lr_batch_size: int | None = 256
    offset_lr_scale: float = 0.1
    schedule: str = "cosine"
    warmup: float = 0.05
    milestones: tuple[int, ...] = ()
    decay_epochs: float = 1.0
    decay_rate: float = 0.1
    clip_grad: float | None = None
    crop: str = "random_resized"
    scale: tuple[float, float] = (0.08, 1.0)
    hflip: float = 0.5
    color_jitter: float = 0.0
    auto_augment: str | None = None
    erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    label_smoothing: float = 0.0
    precision: str = "float32"
    channels_last: bool = False
    ema: float | None = None
    workers: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, choices in (
            ("schedule", SCHEDULES), ("crop", CROPS), ("precision", PRECISIONS), ("frame_sampling", tuple(SAMPLINGS)),
        ):  # fmt: skip
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name in ("frames", "epochs", "batch_size", "accumulate"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        if self.workers is not None and self.workers < 0:
            raise ConfigError(f"workers must be at least 0, got {self.workers!r}")
        for name in ("warmup", "hflip", "erasing", "label_smoothing"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be from 0 to 1, got {getattr(self, name)!r}")
        for name in ("lr", "decay_epochs", "decay_rate"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0, got {getattr(self, name)!r}")
        for name, std in self.init_std.items():
            if isinstance(std, bool) or not isinstance(std, (int, float)) or std < 0:
                raise ConfigError(f"init_std.{name} must be a number of at least 0, got {std!r}")
        if self.dataset == "clips":
            for name in ("cutmix", "channels_last"):
                if getattr(self, name):
                    raise ConfigError(f"dataset 'clips' goes without {name}, got {getattr(self, name)!r}")
        if self.schedule == "multistep" and not self.milestones:
            raise ConfigError("schedule 'multistep' needs milestones, such as [30, 60, 80, 90]")

    def share(self, processes: int) -> int:
        """Images that one process computes at once."""
        parts = processes * self.accumulate
        if self.batch_size % parts:
            raise ConfigError(
                f"batch_size {self.batch_size} must be a multiple of processes × accumulate = {processes} × "
                f"{self.accumulate}"
            )
        return self.batch_size // parts

    def fitting(self, images: int, processes: int) -> Config:
        """This configuration with a batch size for which ``images`` are enough.

        A batch size that is too large becomes the power of two (for each part) of which an epoch has four steps or
        more, for normalisation and averaging both want some; ``accumulate`` stays where every part has two images.

        Raises:
            ConfigError: there are fewer images than processes.
        """
        own = images // processes
        if own == 0:
            raise ConfigError(f"--data must hold an image to train on for each of {processes} processes, got {images}")
        if self.batch_size <= own * processes:
            return self
        accumulate = self.accumulate if own >= 2 * self.accumulate else 1
        most = own // accumulate
        part = max(1 << max(most // 4, 1).bit_length() - 1, min(most, 2))
        return dataclasses.replace(self, batch_size=part * accumulate * processes, accumulate=accumulate)

    def scaled_lr(self) -> float:
        """The learning rate for a step of ``batch_size`` images."""
        return self.lr * (self.batch_size / self.lr_batch_size if self.lr_batch_size else 1.0)


FIELDS = {f.name: f for f in dataclasses.fields(Config)}


def load(file: Path | None, overrides: Sequence[str] = (), **more: Any) -> Config:
    """Read a YAML file, then ``'key=value'`` overrides (values in YAML), then keywords that are not None.

    Raises:
        ConfigError: the file is not there or not YAML, a key is not known, or a value is not of its key's kind.
    """
    return build({} if file is None else read_yaml(file), overrides, **more)


def read_yaml(file: Path) -> dict[str, Any]:
    """Keys and values of a YAML file, unchecked.

    Raises:
        ConfigError: the file is not there, or holds something else.
    """
    try:
        found = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"CONFIG {file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"CONFIG {file} is not YAML: {error}") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"CONFIG {file} must hold keys and values, got {type(found).__name__}")
    return dict(found)


def build(values: Mapping[str, Any], overrides: Sequence[str] = (), **more: Any) -> Config:
    """The configuration of ``values``, then of ``'key=value'`` overrides, then of keywords that are not None.

    Raises:
        ConfigError: a key is not known, or a value is not of its key's kind.
    """
    values = dict(values)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"--set must be KEY=VALUE, got {override!r}")
        key, dot, inner = key.partition(".")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {key} must be a value in YAML, got {text!r}") from error
        if not dot:
            values[key] = value
        elif isinstance(values.get(key) or {}, Mapping):
            values[key] = {**(values.get(key) or {}), inner: value}
        else:
            raise ConfigError(f"--set {key}.{inner}: {key} has no keys of its own")
    values.update({key: value for key, value in more.items() if value is not None})
    if "model" not in values:
        raise ConfigError("no model is named: give a CONFIG that does, or --model NAME")
    return Config(**{key: _value(key, value) for key, value in values.items()})


def _value(key: str, value: Any) -> Any:
    """``value`` as its field wants it."""
    if key not in FIELDS:
        near = difflib.get_close_matches(str(key), FIELDS, 1)
        raise ConfigError(f"unknown key {key!r}" + (f": did you mean {near[0]!r}?" if near else ""))
    kind = str(FIELDS[key].type)
    if value is None:
        if "None" not in kind:
            raise ConfigError(f"{key} must be {kind}, got nothing")
        return None
    kind = kind.removesuffix(" | None")
    if kind.startswith("tuple"):
        of = int if "int" in kind else float
        fixed = None if "..." in kind else 2
        if isinstance(value, int) and key == "input_size":
            value = (value, value)
        good = isinstance(value, (list, tuple)) and fixed in (None, len(value))
        if not good or not all(isinstance(v, (int, of)) and not isinstance(v, bool) for v in value):
            raise ConfigError(f"{key} must be {kind}, got {value!r}")
        return tuple(of(v) for v in value)
    if kind == "float" and isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML reads 5e-4 as a string
    kinds = {"str": str, "int": int, "float": (int, float), "bool": bool, "dict[str, Any]": dict}
    if not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise ConfigError(f"{key} must be {kind}, got {value!r}")
    return float(value) if kind == "float" else value
