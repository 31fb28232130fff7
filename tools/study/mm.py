"""Trainings by mmdet's and mmsegmentation's own tools, on digits on photographs, from a common backbone."""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

from tools.datasets.digits_on_photographs import Recipe, build
from tools.files import write, write_text
from tools.study.commands import ROOT, StudyError, kept, run
from tools.study.settings import Run, Study


def read_log(folder: Path, epochs: bool, curves: dict[str, str]) -> dict[str, Any]:
    """Read mmengine's log in a work directory.

    Args:
        folder: Work directory.
        epochs: Whether evaluations are counted in epochs, or else in steps; with epochs, losses are read as well.
        curves: Name of each curve and of its metric in the log; all but the first may be missing.

    Raises:
        StudyError: no evaluation ended.
    """
    evaluations: dict[int, dict[str, float]] = {}
    losses: dict[int, float] = {}
    first = next(iter(curves.values()))
    for file in sorted(folder.glob("*/vis_data/scalars.json")):
        for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            if first in row:
                evaluations[row["step"]] = row
            elif "loss" in row and epochs:
                losses[row["epoch"]] = row["loss"]
    if not evaluations:
        raise StudyError(f"{folder} has no */vis_data/scalars.json with {first}: no evaluation ended")
    steps = sorted(evaluations)
    known = {name: metric for name, metric in curves.items() if metric in evaluations[steps[-1]]}
    values = {name: [evaluations[step][metric] for step in steps] for name, metric in known.items()}
    return {
        "epochs" if epochs else "steps": steps,
        **values,
        **({"loss": [losses[epoch] for epoch in sorted(losses)]} if losses else {}),
    }


def keep_weights(folder: Path, prefix: str) -> None:
    """Write those weights of a finished training whose names begin with ``prefix`` to ``backbone.pth``."""
    import torch

    last = folder / Path((folder / "last_checkpoint").read_text(encoding="utf-8").strip()).name
    weights = torch.load(last, map_location="cpu", weights_only=False)["state_dict"]
    chosen = {key: value for key, value in weights.items() if key.startswith(prefix)}
    write(folder / "backbone.pth", lambda partial: torch.save({"state_dict": chosen}, partial))


def save_mask(labels: Path, target: Path) -> None:
    """Write a label image with all labels but 0 as 1."""
    import numpy as np
    from PIL import Image

    Image.fromarray((np.asarray(Image.open(labels)) > 0).astype(np.uint8)).save(target, "png")


def one_class(data: Path) -> None:
    """Write the COCO annotations and label images of a set with the one class ``digit`` beside those of ten, once."""
    for part in ("train", "val"):
        masks = data / f"one_class/{part}"
        masks.mkdir(parents=True, exist_ok=True)
        for file in (data / f"semantic/{part}").glob("*.png"):
            if not (masks / file.name).is_file():
                write(masks / file.name, lambda partial, file=file: save_mask(file, partial))
        target = data / f"annotations/one_class_{part}.json"
        if not target.is_file():
            content = json.loads((data / f"annotations/{part}.json").read_text(encoding="utf-8"))
            for annotation in content["annotations"]:
                annotation["category_id"] = 1
            content["categories"] = [{"id": 1, "name": "digit"}]
            write_text(target, json.dumps(content))


class MM:
    """Trainings of mmdet or mmsegmentation.

    A setting's options are a config, a name of ``configs/TOOLKIT/digits`` or a path, and ``--cfg-options``. All start
    with weights of ``pretrained``, a config that is trained on ``pretraining``: a folder ``data`` and its ``recipe``,
    by default ``digits``, and the prefix of the weights to ``keep``, by default those of the backbone.
    """

    needs = ("mmcv", "mmengine", "sklearn", "skimage", "pycocotools", "matplotlib")

    def __init__(self, study: Study, output: Path, options: Namespace) -> None:
        self.study, self.output, self.toolkit = study, output, study.data["toolkit"]
        self.facts = (self.toolkit, "mmcv", "mmengine")
        self.folder, self.more = (options.data or ROOT / "data").resolve(), options.train
        self.data, self.recipe = self.folder / study.data["data"], Recipe(**study.data.get("recipe", {}))
        first = {"data": "digits", "recipe": {}, "keep": "backbone.", **study.data.get("pretraining", {})}
        self.first, self.first_recipe, self.keep = self.folder / first["data"], Recipe(**first["recipe"]), first["keep"]

    def prepare(self, runs: list[Run]) -> None:
        """Check the configs, make missing data sets and train the weights with which every setting starts."""
        for one in runs:
            self.config_file(self.options(one)[0])
        for folder, recipe in {self.first: self.first_recipe, self.data: self.recipe}.items():
            if not (folder / "recipe.json").is_file():
                print(f"making {folder}", flush=True)
            try:
                build(folder, recipe)
            except ValueError as error:
                raise StudyError(f"--data: {error}") from error
        if self.study.data.get("classes") == "one":
            one_class(self.data)
        folder = self.output / "pretrained"
        options = [self.study.data["pretrained"], *shlex.split(self.more)]
        if not kept(folder / "result.json", options):
            print(f"training the weights to start with, see {folder / 'train.log'}", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            self.call([options[0], *self.data_options(self.first), *options[1:]], 0, folder)
            keep_weights(folder, self.keep)
            write_text(folder / "result.json", json.dumps({"setting": "pretrained", "options": options}))

    def config_file(self, name: str) -> Path:
        """Return the file of a config."""
        folder = ROOT / "configs" / self.toolkit / "digits"
        file = folder / f"{name}.py"
        if not file.is_file():
            file = Path(name).resolve()
        if file.suffix != ".py" or not file.is_file():
            raise StudyError(f"a setting begins with a config, a name of {folder} or a path, got {name!r}")
        return file

    def data_options(self, data: Path, classes: str = "") -> list[str]:
        """Return the ``--cfg-options`` that make a config read ``data``."""
        options = [f"{part}_dataloader.dataset.data_root={data}/" for part in ("train", "val", "test")]
        if self.toolkit == "mmdet":
            file = data / f"annotations/{classes}val.json"
            options += [f"{part}_evaluator.ann_file={file}" for part in ("val", "test")]
        return options

    def options(self, one: Run) -> list[str]:
        """Return the config and the ``--cfg-options`` of a run."""
        more = f"{self.study.data.get('train', '')} {self.more}"
        return [*(self.study.options(one.setting) or [""]), *shlex.split(more)]

    def call(self, words: list[str], seed: int | None, folder: Path) -> float:
        """Train a config; return the CPU seconds."""
        options = [f"randomness.seed={seed}", *words[1:]]
        arguments = [self.config_file(words[0]), f"--work-dir={folder}", "--cfg-options", *options]
        return run(self.toolkit, arguments, folder / "train.log")

    def size(self, words: list[str]) -> dict[str, int]:
        """Count a network's parameters and, if the study names an image size, its multiply-adds, on shapes alone."""
        import torch
        from mmengine.config import Config, DictAction
        from mmengine.registry import init_default_scope
        from torch.utils.flop_counter import FlopCounterMode

        registry = importlib.import_module(f"{self.toolkit}.registry")
        config = Config.fromfile(self.config_file(words[0]))
        parser = argparse.ArgumentParser()
        parser.add_argument("--options", nargs="*", action=DictAction)
        config.merge_from_dict(parser.parse_args(["--options", *words[1:]]).options or {})
        init_default_scope(self.toolkit)
        with torch.device("meta"):
            model = registry.MODELS.build(config.model).eval()
        counts = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
        if sides := self.study.data.get("operations"):
            head = model.bbox_head if self.toolkit == "mmdet" else model.decode_head
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                head(model.extract_feat(torch.empty(1, 3, *sides, device="meta")))
            counts["multiply_adds"] = counter.get_total_flops() // 2
        return counts

    def train(self, one: Run, folder: Path) -> dict[str, Any]:
        """Train; return the size, the curves and the CPU time."""
        words, study = self.options(one), self.study.data
        size = self.size(words)
        classes = "one_class_" if study.get("classes") == "one" else ""
        start = f"{study['start']}={self.output / 'pretrained/backbone.pth'}"
        seconds = self.call([words[0], *self.data_options(self.data, classes), start, *words[1:]], one.seed, folder)
        ((unit, names),) = study["curves"].items()
        curves = read_log(folder, unit == "epochs", names)
        if factor := study.get("factor"):
            curves.update({name: [round(factor * value, 2) for value in curves[name]] for name in names})
        return {**size, **curves, "train_cpu_seconds": round(seconds, 1)}

    def about(self) -> dict[str, str]:
        """Return the number of images."""
        recipe = json.loads((self.data / "recipe.json").read_text(encoding="utf-8"))
        return {"images": f"{recipe['train']} for training, {recipe['val']} for validation"}
