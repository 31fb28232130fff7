"""Positions and the share of attention in a small attention-augmented network: the same trainings, settings × seeds.

::

    python -m tools.augmented_study                                      # all of it, on crops of photographs
    python -m tools.augmented_study OUT --settings none relative --seeds 0 1 2 3 4
    python -m tools.augmented_study OUT --train 'epochs=10'              # train_classifier's --set, for every setting
    python -m tools.augmented_study OUT --add 'two-heads=model_args.num_heads=2' --settings relative two-heads

    OUT/crops/SETTING-SEED/      files of tools.train_classifier, train.log, result.json
    OUT/augmented.{md,json}      the table of all finished trainings, rewritten after each one

A setting is a list of changes to ``configs/timm/crops.yaml``, a Wide-ResNet with relative attention in a quarter of its
channels: another position encoding (Bello et al. 2019, Table 7) or another share of attention (Table 6 and Fig. 4). OUT
is ``work_dirs/augmented_study`` by default. Missing crops are created in ``--data``. Each training runs on one CPU
thread and reports the accuracy after its last epoch. Trainings with a ``result.json`` are not repeated; an interrupted
training restarts from the beginning.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools import need
from tools.classification.config import ConfigError
from tools.files import write_text
from tools.study import ROOT, StudyError, add_arguments, added, choose, facts
from tools.vit_study import HOUSEKEEPING, RECIPES, SEEDS, Training, finished, prepare

DATA_SET = "crops"
EPOCHS = "epochs=6"


class Augmented(Training):
    """A training that uses the recipe of its data set."""

    @property
    def recipe(self) -> Path:
        """YAML file of the recipe."""
        return RECIPES / f"{self.data_set}.yaml"


def _share(ratio: float) -> str:
    """Return the settings that make κ = υ = ``ratio``."""
    return f"model_args.kappa={ratio} model_args.nu={ratio}"


SETTINGS = {  # name to train_classifier's --set
    "plain": "model_args.nu=0.0",
    "none": "model_args.position=none",
    "relative": "model_args.position=relative",
    "sine": "model_args.position=sine",
    "coordconv": "model_args.position=coordconv",
    "share-0.75": _share(0.75),
    "share-1.0": _share(1.0),
    "none-share-1.0": f"model_args.position=none {_share(1.0)}",
}


def training(name: str, changes: Sequence[str], seed: int) -> Augmented:
    """Return one training of the study."""
    return Augmented(DATA_SET, name, "", tuple(changes), seed)


def spread(values: Sequence[float]) -> str:
    """Return mean ± standard deviation."""
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{deviation}"


def report(settings: Mapping[str, Sequence[str]], output: Path) -> str:
    """Write the table of every finished training in ``output`` whose options are current, and return the table."""
    results: list[dict[str, Any]] = []
    for name, changes in settings.items():
        for path in sorted((output / DATA_SET).glob(f"{name}-*/result.json")):
            result = json.loads(path.read_text(encoding="utf-8"))
            one = training(name, changes, result["seed"])
            if result["setting"] == name and result["options"] == one.options:
                results.append(result)
    where = facts("timm")
    images = results[0]["images"]
    lines = [
        "# Positions and the share of attention in a small augmented network", "",
        ", ".join(f"{k} {v}" for k, v in where.items()), "",
        f"{images['train']:,} training and {images['val']:,} validation crops of {images['classes']} photographs; "
        "top-1 after the last epoch.", "",
        "| setting | changes | parameters | seeds | top-1, % | validation loss | CPU min |",
        "|---|---|---:|---|---:|---:|---:|",
    ]  # fmt: skip
    for name in dict.fromkeys(result["setting"] for result in results):
        rows = [result for result in results if result["setting"] == name]
        cells = [
            f"`{name}`", f"`{' '.join(settings[name])}`", f"{rows[0]['parameters']:,}",
            " ".join(str(row["seed"]) for row in rows), spread([row["top1"][-1] for row in rows]),
            f"{statistics.fmean(row['val_loss'][-1] for row in rows):.3f}",
            spread([row["train_cpu_seconds"] / 60 for row in rows]),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    table = "\n".join(lines) + "\n"
    write_text(output / "augmented.md", table)
    write_text(output / "augmented.json", json.dumps({"facts": where, "results": results}, indent=1) + "\n")
    return table


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, dict[str, list[str]]]:
    """Parse the options; return them and all settings, each a list of train_classifier's --set."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.augmented_study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = ROOT / "work_dirs/augmented_study"
    parser.add_argument("output", type=Path, nargs="?", default=default, metavar="OUT")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of the data set; default: data")
    add_arguments(parser, "train_classifier's --set, key=value")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="default: 0 1 2")
    parser.add_argument("--train", default="", metavar="KEY=VALUE ...", help="train_classifier's --set for all")
    options = parser.parse_args(arguments)
    settings = dict(SETTINGS)
    settings.update(added(parser, options, settings))
    choose(parser, options, settings)
    more = [EPOCHS, *HOUSEKEEPING, *shlex.split(options.train)]
    return options, {name: [*shlex.split(own), *more] for name, own in settings.items()}


def main(arguments: list[str] | None = None) -> int:
    options, settings = parse(arguments)
    need("skimage", "matplotlib")
    output, data = options.output.resolve(), options.data.resolve()
    trainings = [training(name, settings[name], seed) for seed in options.seeds for name in options.settings]
    try:
        for one in trainings:
            _ = one.config
        images, table = prepare(data, DATA_SET), ""
        for one in trainings:
            finished(one, data, images, output)
            table = report(settings, output)
        print(f"\n{table}\nwritten: {output / 'augmented'}.md and .json")
    except (StudyError, ConfigError) as error:
        print(f"augmented_study: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
