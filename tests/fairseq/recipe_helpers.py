"""Helpers of the recipe tests: fairseq-hydra-train in this process, and the recipes' documentation."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import hydra
import pytest
from fairseq import options, utils
from fairseq.checkpoint_utils import save_checkpoint
from fairseq.dataclass import initialize
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import hydra_train
from hydra.core.hydra_config import HydraConfig
from omegaconf import flag_override

from tests.fairseq.fairseq_helpers import ROOT


def hydra_main(folder: Path, recipe: str, *overrides: Any) -> None:
    """Run fairseq-hydra-train with these overrides in this process."""
    vars(save_checkpoint).pop("best", None)  # of another training in this process, which this one may never beat
    initialize.hydra_init(recipe)
    with hydra.initialize_config_dir(str(folder), version_base="1.1"):
        cfg = hydra.compose(recipe, ["hydra/job_logging=none", *map(str, overrides)], return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    with flag_override(cfg, ["struct", "readonly"], False):
        del cfg["hydra"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        hydra_train._hydra_main(cfg)


def composed(folder: Path, recipe: str, *overrides: Any) -> Any:
    """Return the configuration that fairseq trains with, defaults included."""
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hydra_train, "pre_main", seen.append)
        hydra_main(folder, recipe, *overrides)
    [cfg] = seen
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        utils.import_user_module(cfg.common)
    initialize.add_defaults(cfg)
    return cfg


def check_keys(cfg: Any) -> None:
    """Check the keys of our configuration, because Hydra accepts misspelt ones."""
    for part in fields(FairseqConfig):
        known = part.default if isinstance(part.default, type) else type(part.default)
        if hasattr(known, "__dataclass_fields__"):
            assert cfg[part.name].keys() <= known.__dataclass_fields__.keys()
    assert cfg.keys() <= FairseqConfig.__dataclass_fields__.keys() | {"job_logging_cfg"}


def one_line_commands(readme: str) -> list[str]:
    """Return the complete fairseq-train commands of a README."""
    commands = re.findall(r"^fairseq-train (?!\.\.\.)(?:.*\\\n)*.*$", readme, flags=re.M)
    return [command.replace("\\\n", " ") for command in commands]


def by_command_line(words: list[str]) -> Any:
    """Return the configuration that fairseq-train builds from its arguments."""
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), words))


def table_overrides(section: str) -> list[str]:
    """Return the entries of the second column of a section's tables that are overrides."""
    return re.findall(r"^\|[^|]*\| `(['+\w.]+=[^`]*)` \|", section, flags=re.M)


def check_overrides(cfg: Any, overrides: str) -> None:
    """Check that the configuration contains the overrides."""
    for override in shlex.split(overrides):
        name, value = override.lstrip("+").split("=", 1)
        if name != "attention":
            node, _, key = name.rpartition(".")
            assert str(cfg[node][key]).lower() == value.strip("\"'").lower()
