"""Small vision transformers with our attention and with timm's own, trained alike: settings × seeds × data sets.

::

    python -m tools.vit_study                                        # all of it: 40 CPU minutes
    python -m tools.vit_study OUT --sets crops --settings vit-stock vit-1111 --seeds 0 1 2 3 4
    python -m tools.vit_study OUT --train 'epochs=40 lr=5e-4'        # train_classifier's --set, for every setting
    python -m tools.vit_study OUT --add 'range7=vit model_args.attn_layer=attn_range7' --settings vit-stock range7

    OUT/SET/SETTING-SEED/    log.csv, last.safetensors and more of tools.train_classifier, train.log, result.json
    OUT/vit.{md,json,png}    tables and curves of all finished trainings, rewritten after each one

A setting is a family, ``vit`` or ``swin``, with recipes ``configs/timm/{crops,digits}_FAMILY.yaml``, and its changes to
them. OUT is ``work_dirs/vit_study`` by default. Missing data sets are created in ``--data``: ``photograph_crops`` and
``digit_folders`` of tools.datasets.image_folders. Each training runs on one CPU thread and reports the accuracy after
its last epoch, not the best. Trainings with a ``result.json`` are not repeated. An interrupted training restarts, so
that its CPU time is of one whole run.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools import need
from tools.classification.config import Config, ConfigError, load
from tools.classification.model import create_model
from tools.datasets import image_folders
from tools.files import write_text
from tools.study import ROOT, StudyError, add_arguments, added, choose, facts, kept, run
from tools.vit_study_report import draw, markdown

RECIPES = ROOT / "configs/timm"
FOLDERS = {"crops": "photograph_crops", "digits": "digit_folders"}
SETTINGS = {  # name to a family, then train_classifier's --set
    "vit-stock": "vit model_args.attn_layer=attn",
    "vit-1111": "vit model_args.attn_layer=attn1111",
    "vit-0110": "vit model_args.attn_layer=attn0110",
    "vit-bilateral": "vit model_args.attn_layer=attn_bilateral",
    "swin": "swin",
    "swin-unshifted": "swin model_args.shift=false",
}
SEEDS = (0, 1, 2)
HOUSEKEEPING = ("workers=0",)  # images are loaded on the thread that computes


@dataclasses.dataclass(frozen=True)
class Training:
    """One training of the study.

    Attributes:
        data_set: ``'crops'`` or ``'digits'``.
        setting: Its name.
        family: ``'vit'`` or ``'swin'``.
        changes: ``'key=value'`` changes to the family's recipe.
        seed: Seed of all random numbers.
    """

    data_set: str
    setting: str
    family: str
    changes: tuple[str, ...]
    seed: int

    @property
    def recipe(self) -> Path:
        """YAML file of the recipe."""
        return RECIPES / f"{self.data_set}_{self.family}.yaml"

    @property
    def config(self) -> Config:
        """Return the recipe with the changes applied.

        Raises:
            StudyError: the recipe does not exist, or a change is invalid.
        """
        if not self.recipe.is_file():
            raise StudyError(
                f"a setting begins with a family of which {RECIPES} has {self.data_set}_FAMILY.yaml, such as vit or "
                f"swin, got {self.family!r}"
            )
        try:
            return load(self.recipe, [*self.changes, f"seed={self.seed}"])
        except ConfigError as error:
            raise StudyError(f"setting {self.setting}: {error}") from error

    @property
    def options(self) -> dict[str, Any]:
        """Return the fields of the config that differ from their defaults, as read back from JSON."""
        default = dataclasses.asdict(Config(""))
        options = {key: value for key, value in dataclasses.asdict(self.config).items() if value != default[key]}
        return json.loads(json.dumps(options))

    def folder(self, output: Path) -> Path:
        """Return the folder of the training."""
        return output / self.data_set / f"{self.setting}-{self.seed}"

    def words(self, data: Path) -> list[str]:
        """Return the arguments of ``tools.train_classifier`` between recipe and --output; ``data`` holds both sets."""
        sets = [part for change in (*self.changes, f"seed={self.seed}") for part in ("--set", change)]
        return ["--data", f"{data / FOLDERS[self.data_set]}", "--device", "cpu", *sets]


def prepare(data: Path, data_set: str) -> dict[str, int]:
    """Create a data set if it is missing.

    Returns:
        The number of its ``classes``, and of its ``train`` and ``val`` images.

    Raises:
        StudyError: the folder holds other files.
    """
    folder = data / FOLDERS[data_set]
    if not folder.exists():
        print(f"making {folder}", flush=True)
        image_folders.main([data_set, str(folder)])
    count = {part: sum(1 for _ in (folder / part).glob("*/*.png")) for part in ("train", "val")}
    if 0 in count.values():
        raise StudyError(
            f"--data: {folder} must hold train/CLASS/*.png and val/CLASS/*.png: name another, or remove it"
        )
    return {"classes": sum(1 for path in (folder / "train").iterdir() if path.is_dir()), **count}


def read_log(folder: Path) -> dict[str, list[float]]:
    """Read accuracy in percent and both losses, per epoch, from ``log.csv``."""
    with open(folder / "log.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in ("top1", "train_loss", "val_loss")}


def finished(training: Training, data: Path, images: Mapping[str, int], output: Path) -> dict[str, Any]:
    """Train in the training's folder, or read the stored result.

    Args:
        training: What to train.
        data: Folder of both data sets.
        images: Result of :func:`prepare` for the training's data set.
        output: Folder of the study.

    Raises:
        StudyError: the training failed, or was run with other options.
    """
    folder = training.folder(output)
    name, path = f"{training.data_set}/{folder.name}", folder / "result.json"
    if result := kept(path, training.options):
        print(f"{name}: already done", flush=True)
        return result
    print(f"{name}: training, see {folder / 'train.log'}", flush=True)
    parameters = sum(parameter.numel() for parameter in create_model(training.config, images["classes"]).parameters())
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    words = [training.recipe, *training.words(data), "--output", folder]
    seconds = run("tools.train_classifier", words, folder / "train.log")
    command = ["python", "-m", "tools.train_classifier", f"configs/timm/{training.recipe.name}"]
    result = {
        "set": training.data_set,
        "setting": training.setting,
        "family": training.family,
        "seed": training.seed,
        "command": shlex.join([*command, *training.words(Path("data"))]),
        "options": training.options,
        "images": dict(images),
        "parameters": parameters,
        **read_log(folder),
        "train_cpu_seconds": round(seconds, 1),
        "train_wall_seconds": round(time.monotonic() - began, 1),
    }
    write_text(path, json.dumps(result, indent=1) + "\n")
    print(f"{name}: top-1 {result['top1'][-1]:.2f} % after {seconds / 60:.1f} CPU minutes", flush=True)
    return result


def report(settings: Mapping[str, Sequence[str]], output: Path) -> str:
    """Write tables and figure of every finished training in ``output`` with current options; return the tables."""
    results = []
    for data_set in FOLDERS:
        for name, (family, *changes) in settings.items():
            for path in sorted((output / data_set).glob(f"{name}-*/result.json")):
                result = json.loads(path.read_text(encoding="utf-8"))
                training = Training(data_set, name, family, tuple(changes), result["seed"])
                if result["setting"] == name and result["options"] == training.options:
                    results.append(result)
    where = facts("timm")
    tables = markdown(results, where)
    write_text(output / "vit.md", tables)
    write_text(output / "vit.json", json.dumps({"facts": where, "results": results}, indent=1) + "\n")
    draw(results, output / "vit.png")
    return tables


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, dict[str, list[str]]]:
    """Parse the options; return them and all settings, each a family and train_classifier's --set."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.vit_study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, nargs="?", default=ROOT / "work_dirs/vit_study", metavar="OUT")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of both data sets; default: data")
    parser.add_argument("--sets", nargs="+", choices=tuple(FOLDERS), default=list(FOLDERS), help="default: both")
    add_arguments(parser, "a family and train_classifier's --set, key=value")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="default: 0 1 2")
    parser.add_argument("--train", default="", metavar="KEY=VALUE ...", help="train_classifier's --set for all")
    options = parser.parse_args(arguments)
    settings = dict(SETTINGS)
    settings.update(added(parser, options, settings))
    choose(parser, options, settings)
    more = [*HOUSEKEEPING, *shlex.split(options.train)]
    return options, {name: [*(shlex.split(own) or [""]), *more] for name, own in settings.items()}


def main(arguments: list[str] | None = None) -> int:
    options, settings = parse(arguments)
    need("sklearn", "skimage", "matplotlib")
    output, data = options.output.resolve(), options.data.resolve()
    trainings = [
        Training(data_set, name, settings[name][0], tuple(settings[name][1:]), seed)
        for data_set in options.sets
        for seed in options.seeds
        for name in options.settings
    ]
    try:
        for training in trainings:
            _ = training.config
        images = {data_set: prepare(data, data_set) for data_set in options.sets}
        tables = ""
        for training in trainings:
            finished(training, data, images[training.data_set], output)
            tables = report(settings, output)
        print(f"\n{tables}\nwritten: {output / 'vit'}.md, .json and .png")
    except (StudyError, ConfigError) as error:
        print(f"vit_study: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
