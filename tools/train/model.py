"""Creation of the configured timm model."""

from __future__ import annotations

import difflib

import timm
from torch import nn

from attn_plugins.timm import TimeSformer
from tools.model_names import check_model_name, is_built_for_a_size

from .config import Config, ConfigError


def create_model(config: Config, num_classes: int) -> nn.Module:
    """Create the configured model, with the parameters of ``init_std`` drawn again."""
    if (wrong := check_model_name(config.model)) is not None:
        raise ConfigError(f"model must be a model of timm, got {wrong}")
    options = dict(config.model_args)
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
    parameters = dict(model.named_parameters())
    for name, std in config.init_std.items():
        if name not in parameters:
            near = ", ".join(difflib.get_close_matches(name, parameters, 3, 0.3))
            raise ConfigError(f"init_std must name parameters of the model, such as {near}, got {name!r}")
        nn.init.normal_(parameters[name], std=std)
    return model
