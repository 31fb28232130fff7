"""Configuration of a training: a flat YAML file whose keys are the fields defined here."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tools.clips import SAMPLINGS

SCHEDULES = ("cosine", "multistep", "exponential")
CROPS = ("random_resized", "pad", "none")
PRECISIONS = ("float32", "bfloat16", "float16")


class ConfigError(ValueError):
    """An invalid configuration."""


@dataclass(frozen=True)
class Config:
    """Complete configuration of a training."""

    model: str  # timm's name
    model_args: dict[str, Any] = field(default_factory=dict)  # keyword arguments: kappa, nu, num_heads, img_size, ...
    # Parameter names with the standard deviation of the normal distribution from which they are drawn, instead of the
    # model's own initialisation. TimeSformer's time_embed starts at 0, for pretrained weights; trained from scratch,
    # time_embed and pos_embed need more.
    init_std: dict[str, Any] = field(default_factory=dict)
    # Weights (safetensors) of a training of this or of another model, from which the parameters of equal names and
    # shapes start; None: from nothing, or as model_args says.
    init: str | None = None
    # 'folder' (train/CLASS/*.png and val/CLASS/*.png), 'clips' (train/CLASS/*.mp4, or folders of frames
    # train/CLASS/CLIP/*.png, and val likewise), or one of timm's datasets, such as 'torch/cifar100'.
    dataset: str = "folder"
    frames: int = 8  # of a clip; validation spreads them over the whole clip
    # Frames of a training clip: 'uniform' (as in validation), 'segments' (a random one from each of ``frames`` equal
    # parts) or 'stride' (a random stride from a random start).
    frame_sampling: str = "uniform"
    input_size: tuple[int, int] | None = None  # (H, W) in pixels; None: the model's own
    epochs: int = 100  # passes over the training images
    batch_size: int = 256  # images of one optimizer step, over all processes and accumulated parts
    accumulate: int = 1  # parts in which a process computes its share of a step
    optimizer: str = "momentum"  # timm's name; 'momentum' is SGD without Nesterov's correction
    optimizer_args: dict[str, Any] = field(default_factory=dict)  # further arguments of the optimizer
    momentum: float = 0.9
    weight_decay: float = 1e-4  # of all parameters except biases, normalisations and position tables
    lr: float = 0.1  # for a step of ``lr_batch_size`` images, scaled in proportion for other batch sizes
    lr_batch_size: int | None = 256  # None: ``lr`` is not scaled
    offset_lr_scale: float = 0.1  # factor of the learning rate of sampling offsets
    schedule: str = "cosine"  # to 0, 'multistep' at ``milestones``, or 'exponential' in steps of ``decay_epochs``
    warmup: float = 0.05  # share of all epochs with a linear warm-up of the learning rate from 0
    milestones: tuple[int, ...] = ()  # epochs at which 'multistep' multiplies by ``decay_rate``
    decay_epochs: float = 1.0  # between two steps of 'exponential'
    decay_rate: float = 0.1  # factor of one step
    clip_grad: float | None = None  # maximum norm of the gradient; None for no limit
    # Crop in training: 'random_resized', 'pad' (an eighth of the size on each side, then a random crop), or 'none'.
    crop: str = "random_resized"
    scale: tuple[float, float] = (0.08, 1.0)  # range of the relative area of random resized crops
    hflip: float = 0.5  # probability of mirroring a training image or clip; 0 if left and right are classes
    color_jitter: float = 0.0  # strength of random changes of brightness, contrast and saturation
    auto_augment: str | None = None  # timm's notation, such as 'rand-m9-mstd0.5'
    erasing: float = 0.0  # probability of erasing a rectangle
    mixup: float = 0.0  # alpha of timm's Mixup
    cutmix: float = 0.0  # its alpha of CutMix
    label_smoothing: float = 0.0  # share of the target that is spread over all classes
    precision: str = "float32"  # or 'bfloat16' or 'float16' by autocast
    channels_last: bool = False  # memory format of images and weights
    ema: float | None = None  # decay of averaged weights, which are then evaluated and saved; None for no average
    # Loading processes of each training process; None: the machine's cores, divided among the training processes. The
    # random augmentation of an image depends on it.
    workers: int | None = None
    seed: int = 0  # of weights, order and augmentation

    def __post_init__(self) -> None:
        for name in ("input_size", "milestones", "scale"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        for name in ("input_size", "scale"):
            if getattr(self, name) is not None and len(getattr(self, name)) != 2:
                raise ConfigError(f"{name} must be two numbers, got {getattr(self, name)!r}")
        for name, choices in (
            ("schedule", SCHEDULES), ("crop", CROPS), ("precision", PRECISIONS), ("frame_sampling", tuple(SAMPLINGS)),
        ):  # fmt: skip
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name, least in dict(frames=1, epochs=1, batch_size=1, accumulate=1, workers=0).items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value!r}")
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
                    raise ConfigError(f"dataset 'clips' does not support {name}, got {getattr(self, name)!r}")
        if self.schedule == "multistep" and not self.milestones:
            raise ConfigError("schedule 'multistep' needs milestones, such as [30, 60, 80, 90]")

    def share(self, processes: int) -> int:
        """Return the number of images that one process computes at once."""
        parts = processes * self.accumulate
        if self.batch_size % parts:
            raise ConfigError(
                f"batch_size {self.batch_size} must be a multiple of processes × accumulate = {processes} × "
                f"{self.accumulate}"
            )
        return self.batch_size // parts

    def fitting(self, images: int, processes: int) -> Config:
        """Return this configuration with a batch size that ``images`` can fill.

        A batch size that is too large is replaced by the power of two (for each part) that leaves at least four steps
        per epoch, as normalisation and averaging need; ``accumulate`` is kept if every part has two images.

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
        """Return the learning rate for a step of ``batch_size`` images."""
        return self.lr * (self.batch_size / self.lr_batch_size if self.lr_batch_size else 1.0)


FIELDS = {f.name: f for f in dataclasses.fields(Config)}


def load(file: Path | None, overrides: Sequence[str] = (), **more: Any) -> Config:
    """Read a YAML file, then ``'key=value'`` overrides (values in YAML), then keywords that are not None.

    Raises:
        ConfigError: the file is missing or not YAML, a key is unknown, or a value has the wrong type.
    """
    return build({} if file is None else read_yaml(file), overrides, **more)


def read_yaml(file: Path) -> dict[str, Any]:
    """Read the keys and values of a YAML file without checking them.

    Raises:
        ConfigError: the file is missing, or does not hold keys and values.
    """
    try:
        values = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"CONFIG {file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"CONFIG {file} is not YAML: {error}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"CONFIG {file} must hold keys and values, got {type(values).__name__}")
    return dict(values)


def build(values: Mapping[str, Any], overrides: Sequence[str] = (), **more: Any) -> Config:
    """Build the configuration from ``values``, ``'key=value'`` overrides and keywords that are not None, in this order.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type.
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
        raise ConfigError("no model is given: name one in CONFIG or by --model NAME")
    if isinstance(side := values.get("input_size"), int):
        values["input_size"] = (side, side)
    config = OmegaConf.structured(Config)
    OmegaConf.set_readonly(config, False)  # the dataclass is frozen
    for key, value in values.items():
        if key not in FIELDS:
            near = difflib.get_close_matches(str(key), FIELDS, 1)
            raise ConfigError(f"unknown key {key!r}" + (f": did you mean {near[0]!r}?" if near else ""))
        kind = FIELDS[key].type
        try:
            OmegaConf.update(config, key, value, merge=False)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key} must be {kind}, got {value!r}") from error
        if isinstance(value, float) and config[key] != value:  # OmegaConf truncates
            raise ConfigError(f"{key} must be {kind}, got {value!r}")
    return OmegaConf.to_object(config)  # type: ignore[return-value]
