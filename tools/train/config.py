"""Configuration of a training: a flat YAML file whose keys are the fields defined here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from tools.clips import SAMPLINGS

CROPS = ("random_resized", "pad", "none")


class ConfigError(ValueError):
    """An invalid configuration."""


@dataclass(frozen=True)
class Config:
    """Complete configuration of a training."""

    model: str  # timm's name
    model_args: dict[str, Any] = field(default_factory=dict)  # keyword arguments: kappa, nu, num_heads, img_size, ...
    # Parameter names with the standard deviation of the normal distribution from which they are drawn, instead of the
    # model's own initialization. TimeSformer's time_embed starts at 0, for pretrained weights; trained from scratch,
    # time_embed and pos_embed need more.
    init_std: dict[str, float] = field(default_factory=dict)
    # 'folder' (train/CLASS/*.png and val/CLASS/*.png), 'clips' (train/CLASS/*.mp4, or folders of frames
    # train/CLASS/CLIP/*.png, and val likewise), or one of timm's datasets, such as 'torch/cifar100'.
    dataset: str = "folder"
    frames: int = 8  # of a clip; validation spreads them over the whole clip
    # Frames of a training clip: 'uniform' (as in validation), 'segments' (a random one from each of ``frames`` equal
    # parts) or 'stride' (a random stride from a random start).
    frame_sampling: str = "uniform"
    input_size: tuple[int, int] | None = None  # (H, W) in pixels; None: the model's own
    epochs: int = 15
    batch_size: int = 64  # at most the number of training images
    optimizer: str = "momentum"  # timm's name; 'momentum' is SGD without Nesterov's correction
    momentum: float = 0.9
    weight_decay: float = 1e-4  # of all parameters except biases, normalizations and position tables
    lr: float = 0.05  # a tenth of it for sampling offsets; cosine decay to 0
    warmup: float = 0.05  # share of all epochs with a linear warm-up of the learning rate from 0
    clip_grad: float | None = None  # maximum norm of the gradient; None for no limit
    # Crop in training: 'random_resized', 'pad' (an eighth of the size on each side, then a random crop), or 'none'.
    crop: str = "none"
    hflip: float = 0.0  # probability of mirroring a training image or clip
    workers: int = 0  # loading processes
    seed: int = 0  # of weights, order and augmentation

    def __post_init__(self) -> None:
        if isinstance(self.input_size, list):
            object.__setattr__(self, "input_size", tuple(self.input_size))
        for name, choices in dict(crop=CROPS, frame_sampling=tuple(SAMPLINGS)).items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name, least in dict(frames=1, epochs=1, batch_size=1, workers=0, lr=0, weight_decay=0).items():
            if not getattr(self, name) >= least:  # nor NaN
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)!r}")
        if not 0 <= self.hflip <= 1:
            raise ConfigError(f"hflip must be from 0 to 1, got {self.hflip!r}")
        for name in ("warmup", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be from 0 to below 1, got {getattr(self, name)!r}")
        if self.clip_grad is not None and not self.clip_grad > 0:
            raise ConfigError(f"clip_grad must be above 0, or null for no limit, got {self.clip_grad!r}")


def load(file: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, then ``'key=value'`` overrides with values in YAML.

    Raises:
        ConfigError: The file is missing or not YAML, a key is unknown, or a value is invalid.
    """
    try:
        config = OmegaConf.structured(Config)
        OmegaConf.set_readonly(config, False)  # the dataclass is frozen
        config = OmegaConf.merge(config, OmegaConf.load(file), OmegaConf.from_dotlist(list(overrides)))
        return OmegaConf.to_object(config)  # type: ignore[return-value]
    except (OSError, TypeError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"CONFIG {file}: {str(error).strip().splitlines()[0]}") from error
