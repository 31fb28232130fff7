"""Trainings by tools.train: classifiers of images and of clips."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

from tools.study.commands import ROOT, StudyError, make, run
from tools.study.settings import Run, Study
from tools.train.config import Config, ConfigError, load
from tools.train.model import create_model


class Classifier:
    """Trainings by tools.train.

    A setting's options are those of ``--set``, after the name of a family where the study's recipe has one.
    """

    needs = ("timm", "sklearn", "skimage", "matplotlib")
    facts = ("timm",)

    def __init__(self, study: Study, output: Path, options: Namespace) -> None:
        self.study, self.output = study, output
        self.data, self.more = (options.data or ROOT / "data").resolve(), options.train

    def prepare(self, runs: list[Run]) -> None:
        """Check all settings, and make missing data sets."""
        for one in runs:
            self.options(one)
        for part in dict.fromkeys(one.part for one in runs):
            content = self.study.parts[part]
            make(self.data / content["data"], content["make"], self.output / f"{content['data']}.log")

    def recipe(self, one: Run) -> tuple[Path, list[str]]:
        """Return the recipe of a run and the changes to it."""
        words, name = self.study.options(one.setting), self.study.data["recipe"]
        family = words.pop(0) if "{family}" in name and words else ""
        path = ROOT / name.format(set=one.part, family=family)
        if not path.is_file():
            raise StudyError(f"setting {one.setting} begins with a family of {name}, such as vit or swin: no {path}")
        common = f"{self.study.data.get('train', '')} {self.study.parts[one.part].get('train', '')}"
        return path, [*shlex.split(common), *words, *shlex.split(self.more), f"seed={one.seed}"]

    def config(self, one: Run) -> Config:
        """Return the configuration of a run."""
        path, changes = self.recipe(one)
        try:
            return load(path, changes)
        except ConfigError as error:
            raise StudyError(f"setting {one.setting}: {error}") from error

    def options(self, one: Run) -> dict[str, Any]:
        """Return the fields of the configuration that differ from their defaults, as read back from JSON."""
        default = dataclasses.asdict(Config(""))
        options = dataclasses.asdict(self.config(one)).items()
        return json.loads(json.dumps({key: value for key, value in options if value != default[key]}))

    def train(self, one: Run, folder: Path) -> dict[str, Any]:
        """Train; return the size of data and model, accuracy and losses by epoch, and the CPU time."""
        path, changes = self.recipe(one)
        name = self.study.parts[one.part]["data"]
        words = ["--device", "cpu", *(word for change in changes for word in ("--set", change))]
        seconds = run(
            "tools.train", [path, "--data", self.data / name, *words, "--output", folder], folder / "train.log"
        )
        log = (folder / "train.log").read_text(encoding="utf-8")
        size = re.search(r"(\d+) classes, .*; (\d+) \+ (\d+) (?:images|clips)", log)
        if size is None:
            raise StudyError(f"{folder / 'train.log'} has no line with classes and images")
        with (folder / "log.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        images = dict(zip(("classes", "train", "val"), map(int, size.groups())))
        model = create_model(self.config(one), images["classes"])
        command = ["python", "-m", "tools.train", path.relative_to(ROOT), "--data", f"data/{name}", *words]
        family = self.study.options(one.setting)[:1] if "{family}" in self.study.data["recipe"] else [""]
        return {
            "family": family[0],
            "command": shlex.join(map(str, command)),
            "images": images,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            **{name: [float(row[name]) for row in rows] for name in ("top1", "train_loss", "val_loss")},
            "train_cpu_seconds": round(seconds, 1),
        }

    def about(self) -> dict[str, str]:
        """Return what the page says beside the machine."""
        return {}
