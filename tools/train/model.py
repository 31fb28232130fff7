"""Creation of the configured timm model."""

from __future__ import annotations

import difflib
from typing import Any

import timm
from timm.data import resolve_data_config
from torch import nn

from attn_plugins.timm import TimeSformer
from tools.model_names import check_model_name, is_built_for_a_size

from .config import Config, ConfigError


def create_model(config: Config, num_classes: int) -> nn.Module:
    """Create the configured model."""
    if (wrong := check_model_name(config.model)) is not None:
        raise ConfigError(f"model must be a model of timm, got {wrong}")
    options = dict(config.model_args)
    if options.get("in_chans", 3) != 3:
        raise ConfigError(f"model_args.in_chans must be 3, because images are read in RGB, got {options['in_chans']!r}")
    if config.dataset == "clips" and config.model.startswith("timesformer_"):
        options.setdefault("num_frames", config.frames)
    if config.input_size is not None and is_built_for_a_size(config.model):
        options.setdefault("img_size", config.input_size)
    try:
        model = timm.create_model(config.model, num_classes=num_classes, **options)
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        raise ConfigError(f"model {config.model} with {options}: {error}") from error
    if config.dataset == "clips" and not isinstance(model, TimeSformer):
        names = ", ".join(timm.list_models("timesformer_*"))
        raise ConfigError(f"dataset 'clips' needs a model of clips, {names}, got {config.model}")
    return model


def data_config(config: Config, model: nn.Module) -> dict[str, Any]:
    """Return timm's data configuration of the model, at the configured size."""
    size = {} if config.input_size is None else dict(input_size=(3, *config.input_size))
    return resolve_data_config(size, model=model)


def draw_parameters(model: nn.Module, init_std: dict[str, float]) -> None:
    """Draw the named parameters from normal distributions of mean 0 and the given standard deviations.

    Raises:
        ConfigError: the model has no such parameter.
    """
    parameters = dict(model.named_parameters())
    for name, std in init_std.items():
        if name not in parameters:
            near = ", ".join(difflib.get_close_matches(name, parameters, 3, 0.3))
            raise ConfigError(f"init_std must name parameters of the model, such as {near}, got {name!r}")
        nn.init.normal_(parameters[name], std=std)
