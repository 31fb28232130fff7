r"""DETR and Deformable DETR on digits on photographs, trained by mmdet's own tool and compared epoch by epoch.

::

    python -m tools.detection_study                                       # all settings, three seeds each
    python -m tools.detection_study OUT --settings detr deformable-detr --seeds 0
    python -m tools.detection_study OUT --train 'train_cfg.max_epochs=80'   # mmdet's --cfg-options, for every setting
    python -m tools.detection_study OUT --add 'fast=detr_narrow-r18_digits optim_wrapper.optimizer.lr=1e-3' \
        --settings detr fast

    OUT/backbone/                the detector that trains the backbone from which every setting starts
    OUT/SETTING-SEED/            the last checkpoint, mmengine's logs, train.log, result.json
    OUT/detection.{md,json,png}  table and curves of all finished trainings, rewritten after each one

OUT is ``work_dirs/detection_study`` by default, and the data, created if missing, are in ``data/digits``. Each training
runs on one CPU thread; a second process with other ``--settings`` or ``--seeds`` may work in the same OUT. Trainings
with a ``result.json`` are not repeated. An interrupted training restarts, so that every figure is of one whole run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools import need
from tools.datasets.digits_on_photographs import Recipe, build
from tools.demo import CONFIGS, DATA, ROOT, training_tool
from tools.detection_study_curves import draw, markdown, read_curves
from tools.files import write_text
from tools.study import StudyError, add_arguments, added, choose, facts, kept, run

BACKBONE = "atss_narrow-r18_fpn_digits"


def schedule_options(epochs: int, interval: int) -> str:
    """Return mmdet's options for another schedule: rate × 0.1 after 5/6 of it, an evaluation every ``interval``."""
    return (
        f"train_cfg.max_epochs={epochs} train_cfg.val_interval={interval} param_scheduler.1.end={epochs} "
        f"param_scheduler.1.milestones=[{5 * epochs // 6}] default_hooks.checkpoint.interval={epochs}"
    )


SETTINGS = {  # name to a config of configs/mmdet/digits, then options of its own
    "detr": "detr_narrow-r18_digits",
    "deformable-detr": "deformable-detr_narrow-r18_digits",
    "deformable-detr-1level": "deformable-detr_narrow-r18-1level_digits",
    "detr-120e": f"detr_narrow-r18_digits {schedule_options(120, 5)}",
    "mask2former-20e": f"mask2former_narrow-r18_digits {schedule_options(20, 2)}",
}
SEEDS = (0, 1, 2)


def one_class(source: Path, target: Path) -> None:
    """Write the COCO annotations of ``source`` to ``target``, all with the one class ``digit``."""
    content = json.loads(source.read_text(encoding="utf-8"))
    for annotation in content["annotations"]:
        annotation["category_id"] = 1
    content["categories"] = [{"id": 1, "name": "digit"}]
    write_text(target, json.dumps(content))


def prepare(data: Path) -> dict[str, Any]:
    """Create the set in ``data`` and its annotations of one class if missing; return its recipe.

    Raises:
        StudyError: ``data`` holds other files.
    """
    if not (data / "recipe.json").is_file():
        print(f"making {data}", flush=True)
        try:
            build(data, Recipe())
        except ValueError as error:
            raise StudyError(f"--data: {error}") from error
    for part in ("train", "val"):
        target = data / f"annotations/one_class_{part}.json"
        if not target.is_file():
            one_class(data / f"annotations/{part}.json", target)
    return json.loads((data / "recipe.json").read_text(encoding="utf-8"))


def data_options(data: Path, classes: str = "") -> list[str]:
    """Return mmdet's options that make a config read ``data``; ``classes`` is ``one_class_``, or empty for all ten."""
    file = data / f"annotations/{classes}val.json"
    folders = [f"{part}_dataloader.dataset.data_root={data}/" for part in ("train", "val", "test")]
    return [*folders, *(f"{part}_evaluator.ann_file={file}" for part in ("val", "test"))]


def config_file(name: str) -> Path:
    """Return the file of a config: a name in ``configs/mmdet/digits``, or a path.

    Raises:
        StudyError: the config does not exist.
    """
    file = CONFIGS / f"{name}.py"
    if not file.is_file():
        file = Path(name).resolve()
    if file.suffix != ".py" or not file.is_file():
        raise StudyError(f"a setting begins with a config, a name of {CONFIGS} or a path, got {name!r}")
    return file


def count_parameters(config: Path) -> int:
    """Build the model of ``config`` without memory and count its parameters."""
    import torch
    from mmdet.registry import MODELS
    from mmengine.config import Config
    from mmengine.registry import init_default_scope

    init_default_scope("mmdet")
    model = Config.fromfile(config).model
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in MODELS.build(model).parameters())


def train(config: Path, options: list[str], folder: Path) -> dict[str, Any]:
    """Train ``config`` in ``folder`` with mmdet's tool, from the beginning; return its curves and its cost.

    Raises:
        StudyError: the training failed, or logged no evaluation.
    """
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    words = [config, f"--work-dir={folder}", "--cfg-options", *options]
    seconds = run(training_tool(), words, folder / "train.log")
    try:
        curves = read_curves(folder)
    except ValueError as error:
        raise StudyError(f"{config.stem}: {error}") from error
    return {**curves, "train_cpu_seconds": round(seconds, 1), "train_wall_seconds": round(time.monotonic() - began, 1)}


def checkpoint(folder: Path) -> Path:
    """Return the last checkpoint of a finished training, even if ``folder`` was moved since."""
    return folder / Path((folder / "last_checkpoint").read_text(encoding="utf-8").strip()).name


def finished(name: str, seed: int, options: list[str], folder: Path, more: list[str]) -> dict[str, Any]:
    """Train a setting in ``folder``, or read the stored result.

    Args:
        name: Its name in the table.
        seed: Seed of all random numbers.
        options: Name of its config, then mmdet's options.
        folder: Its work directory.
        more: mmdet's options for every setting: the paths of data and backbone.

    Raises:
        StudyError: the training failed, or was run with other options.
    """
    path = folder / "result.json"
    if result := kept(path, options):
        print(f"{folder.name}: already done", flush=True)
        return result
    print(f"{folder.name}: training, see {folder / 'train.log'}", flush=True)
    config = config_file(options[0])
    found = train(config, [*more, f"randomness.seed={seed}", *options[1:]], folder)
    result = {"setting": name, "seed": seed, "options": options, "parameters": count_parameters(config), **found}
    write_text(path, json.dumps(result, indent=1) + "\n")
    minutes = result["train_wall_seconds"] / 60
    print(f"{folder.name}: mAP {result['mAP'][-1]:.3f} after {minutes:.1f} minutes", flush=True)
    return result


def report(settings: Mapping[str, list[str]], output: Path, recipe: Mapping[str, Any]) -> str:
    """Write table and figure of every finished training in ``output`` with current options; return the table."""
    results = []
    for name, options in settings.items():
        for path in sorted(output.glob(f"{name}-*/result.json")):
            result = json.loads(path.read_text(encoding="utf-8"))
            if result["setting"] == name and result["options"] == options:
                results.append(result)
    where = facts("mmdet", "mmcv", "mmengine")
    where["images"] = f"{recipe['train']} for training, {recipe['val']} for validation"
    table = markdown(results, where)
    write_text(output / "detection.md", table)
    write_text(output / "detection.json", json.dumps({"facts": where, "results": results}, indent=1) + "\n")
    draw(results, output / "detection.png")
    return table


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, dict[str, list[str]]]:
    """Parse the options; return them and all settings, each a config's name and mmdet's options."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.detection_study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = ROOT / "work_dirs/detection_study"
    parser.add_argument("output", type=Path, nargs="?", default=default, metavar="OUT")
    parser.add_argument("--data", type=Path, default=DATA, help="set of tools.datasets.digits_on_photographs")
    add_arguments(parser, "a config and mmdet's --cfg-options")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="default: 0 1 2")
    parser.add_argument("--train", default="", metavar="OPTIONS", help="mmdet's --cfg-options for every setting")
    options = parser.parse_args(arguments)
    settings = dict(SETTINGS)
    settings.update(added(parser, options, (*settings, "backbone")))
    choose(parser, options, settings)
    return options, {name: [*shlex.split(own), *shlex.split(options.train)] for name, own in settings.items()}


def main(arguments: list[str] | None = None) -> int:
    options, settings = parse(arguments)
    need("mmdet", "mmcv", "mmengine", "sklearn", "skimage", "pycocotools", "matplotlib")
    output, data = options.output.resolve(), options.data.resolve()
    try:
        for name in options.settings:
            config_file(settings[name][0])
        recipe = prepare(data)
        finished("backbone", 0, [BACKBONE], output / "backbone", data_options(data))
        start = f"model.backbone.init_cfg.checkpoint={checkpoint(output / 'backbone')}"
        more = [*data_options(data, "one_class_"), start]
        table = ""
        for seed in options.seeds:
            for name in options.settings:
                finished(name, seed, settings[name], output / f"{name}-{seed}", more)
                table = report(settings, output, recipe)
        print(f"\n{table}\nwritten: {output / 'detection'}.md, .json and .png")
    except StudyError as error:
        print(f"detection_study: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
