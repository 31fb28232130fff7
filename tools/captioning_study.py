"""The thesis' captioning tables at a small scale: train and score every model on synthetic scenes by one command.

::

    python -m tools.captioning_study OUT                                      # all: ten minutes, then two a row
    python -m tools.captioning_study OUT --settings eta visual semantic --seeds 1 2 3
    python -m tools.captioning_study OUT --settings visual show-attend-tell lstm conv models-fused  # Table 2.4
    python -m tools.captioning_study OUT --add 'wide=--embed-dim 128' --settings wide
    python -m tools.captioning_study OUT --data DATA --train '--max-update 20000'
    python -m tools.captioning_study OUT --regions '--mmdet CONFIG CHECKPOINT'  # instead of grid cells

    OUT/scenes                    tools.datasets.captioned_scenes, with attributes.json and regions.npz
    OUT/detector                  the attribute detector; regions are the cells of its backbone
    OUT/SETTING/STAGE-SEED/       checkpoint_best.pt, logs, results.json, scores.json, result.json
    OUT/study.{md,json}           the table of all finished rows, rewritten after each one

Every setting is trained with cross-entropy, and some are then trained self-critically, all with the same options except
the setting's own, on one CPU thread. The checkpoint with the best validation loss (in the second stage: the best
validation CIDEr-D) is scored on the test images by ``tools.caption score``. Settings with a ``result.json`` are not
run again; an interrupted setting restarts from the beginning.

``--data`` names a data folder of the task ``captioning`` to use instead of the scenes: ``images``, ``captions.json``
and ``splits.json``. Missing attributes and regions are created in it by the same small detector.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import need
from tools.caption.lists import BadFile, read_json
from tools.caption.score import read_references, read_split
from tools.captioning.study_settings import BASELINES, SETTINGS, Setting
from tools.captioning.study_table import aggregated, markdown
from tools.files import write_text
from tools.study import USER_DIR, StudyError, add_arguments, added, choose, count_parameters, facts, kept, log_rows, run

SCENES = "--train 1500 --val 200 --test 500"
DETECTOR = "--backbone resnet10t --no-pretrained --size 96 --epochs 15"
REGIONS = "--grid resnet10t --grid-size 3"  # size of its last feature map at 96 pixels
TASK = "--task captioning --cpu --num-workers 0"
TRAINING = (
    "--arch eta_transformer_tiny --optimizer adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-9 "
    "--no-epoch-checkpoints --no-last-checkpoints --log-format json --log-interval 50"
)
STAGES = {
    "cross-entropy": (
        "--criterion label_smoothed_cross_entropy --label-smoothing 0.1 --batch-size 32 --lr 3e-3 "
        "--lr-scheduler inverse_sqrt --warmup-updates 100 --max-update 705"
    ),
    "self-critical": (
        "--criterion self_critical --samples 5 --baseline mean --one-caption-per-image --batch-size 25 --lr 5e-4 "
        "--max-update 180 --best-checkpoint-metric reward --maximize-best-checkpoint-metric"
    ),
}
FIRST, SECOND = STAGES
GENERATION = "--batch-size 50 --beam 5 --max-len-b 40 --required-batch-size-multiple 1"
BEST = {FIRST: ("loss", min), SECOND: ("reward", max)}  # criterion for the best checkpoint
PARTS = {"val": "valid", "test": "test"}


@dataclass(frozen=True)
class Study:
    """Settings shared by all rows.

    Attributes:
        data: Data folder of the task.
        output: The folder OUT.
        part: Images to score, ``test`` or ``val``.
        more: Options to append, by stage.
    """

    data: Path
    output: Path
    part: str
    more: Mapping[str, str]

    def score(self, folder: Path, captions: Path, *splits: str | Path) -> dict[str, Any]:
        """Return the report of ``tools.caption score`` for ``folder / "results.json"``."""
        scores = folder / "scores.json"
        arguments = ["score", folder / "results.json", captions, *splits, "--json", scores]
        run("tools.caption", arguments, folder / "score.log")
        return json.loads(scores.read_text(encoding="utf-8"))

    def generate(self, folder: Path, checkpoints: Sequence[Path], task: str) -> dict[str, Any]:
        """Caption the part's images with one or several checkpoints, and score the captions."""
        words = [self.data, f"--user-dir={USER_DIR}", *shlex.split(f"{TASK} {GENERATION} {task}")]
        words += [
            f"--gen-subset={PARTS[self.part]}",
            f"--path={':'.join(map(str, checkpoints))}",
            f"--results-json={folder / 'results.json'}",
        ]
        seconds = run("fairseq-generate", words, folder / "generate.log")
        scored = self.score(folder, self.data / "captions.json", "--splits", self.data / "splits.json", self.part)
        return {**scored, "generate_cpu_seconds": round(seconds, 1)}

    def train(self, folder: Path, stage: str, options: Sequence[str], before: Sequence[str]) -> dict[str, Any]:
        """Train one stage, and return the figures of its log."""
        words = [self.data, f"--user-dir={USER_DIR}", *options, *before, f"--save-dir={folder}"]
        seconds = run("fairseq-train", words, folder / "train.log")
        log = (folder / "train.log").read_text(encoding="utf-8")
        metric, best = BEST[stage]
        name = f"valid_{metric}"
        return {
            "parameters": count_parameters(log),
            "updates": max(int(row["train_num_updates"]) for row in log_rows(log) if "train_num_updates" in row),
            name: best(float(row[name]) for row in log_rows(log) if name in row),
            "train_cpu_seconds": round(seconds, 1),
        }

    def options(self, setting: Setting, stage: str, seed: int) -> dict[str, Any]:
        """Return the options that a stored result must have been run with."""
        words = [
            TASK,
            TRAINING,
            STAGES[stage],
            f"--seed {seed}",
            setting.model,
            setting.first if stage == FIRST else "",
        ]
        words += [setting.task, self.more[stage]]
        return {"train": " ".join(" ".join(words).split()), "generate": GENERATION, "part": self.part}

    def row(self, name: str, setting: Setting, stage: str, seed: int) -> dict[str, Any]:
        """Train, caption and score one setting in one stage, or read the stored result."""
        folder = self.output / name / f"{stage}-{seed}"
        options = self.options(setting, stage, seed)
        result = self.begin(folder, options)
        if result:
            return result
        before = []
        if stage == FIRST:  # remove stages that started from the previous checkpoint
            shutil.rmtree(self.output / name / f"{SECOND}-{seed}", ignore_errors=True)
        else:
            before.append(f"--finetune-from-model={self.output / name / f'{FIRST}-{seed}' / 'checkpoint_best.pt'}")
        found = self.train(folder, stage, shlex.split(options["train"]), before)
        found |= self.generate(folder, [folder / "checkpoint_best.pt"], setting.task)
        return self.end(folder, options, name, stage, [seed], found)

    def fused(self, name: str, setting: Setting, stage: str, seeds: Sequence[int]) -> dict[str, Any] | None:
        """Caption with an ensemble of several settings or seeds; return None for fewer than two checkpoints."""
        if len(setting.fused) > 1:
            seeds = seeds[:1]
        paths = [self.output / other / f"{stage}-{n}" / "checkpoint_best.pt" for other in setting.fused for n in seeds]
        paths = [path for path in paths if path.with_name("result.json").exists()]
        if len(paths) < 2:
            return None
        folder = self.output / name / stage
        parts = [json.loads(path.with_name("result.json").read_text(encoding="utf-8")) for path in paths]
        used = {str(path.relative_to(self.output)): part["scores"] for path, part in zip(paths, parts)}
        options = {"checkpoints": used, "generate": GENERATION, "part": self.part}
        result = self.begin(folder, options, discard=True)
        if result:
            return result
        found = {"parameters": sum(part["parameters"] for part in parts), **self.generate(folder, paths, setting.task)}
        return self.end(folder, options, name, stage, list(seeds), found)

    def baseline(self, name: str) -> dict[str, Any]:
        """Score given captions: an image's first one against its others, or the next image's against all."""
        folder = self.output / name
        options = {"captions": name, "part": self.part}
        result = self.begin(folder, options)
        if result:
            return result
        references = read_references(self.data / "captions.json")
        images = read_split(self.data / "splits.json", self.part)
        given = {image: references[image][0] for image in images if len(references[image]) > 1}
        if name == "grammar":
            truth = {image: references[image][1:] for image in given}
        else:
            truth = {image: references[image] for image in given}
            given = dict(zip(given, [*list(given.values())[1:], *list(given.values())[:1]]))
        rows = [{"image_id": image, "caption": caption} for image, captions in truth.items() for caption in captions]
        folder.mkdir(parents=True, exist_ok=True)  # another process may work in OUT
        content = {"images": [{"id": image} for image in truth], "annotations": rows}
        write_text(folder / "captions.json", json.dumps(content))
        results = [{"image_id": image, "caption": caption} for image, caption in given.items()]
        write_text(folder / "results.json", json.dumps(results))
        return self.end(folder, options, name, "", [], self.score(folder, folder / "captions.json"))

    def begin(self, folder: Path, options: Any, discard: bool = False) -> dict[str, Any] | None:
        """Return a stored result, or None after creating a folder; ``discard`` discards results of other options."""
        name = folder.relative_to(self.output)
        try:
            result = kept(folder / "result.json", options)
        except StudyError:
            if not discard:
                raise
            result = None
        if result is None:
            shutil.rmtree(folder, ignore_errors=True)
            print(f"{name}: running, see {folder}", flush=True)
        else:
            print(f"{name}: already done", flush=True)
        return result

    def end(self, folder: Path, options: Any, name: str, stage: str, seeds: list[int], found: Any) -> dict[str, Any]:
        """Write the result and return it."""
        result = {"setting": name, "stage": stage, "seeds": seeds, "options": options, **found}
        write_text(folder / "result.json", json.dumps(result, indent=1) + "\n")
        print(f"{folder.relative_to(self.output)}: CIDEr-D {100 * result['scores']['CIDEr-D']:.1f}", flush=True)
        return result


def prepare(output: Path, options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Create missing parts of the data folder; return the folder, and options and CPU seconds of each part created.

    Raises:
        StudyError: a user's file is missing, or an existing file was created with other options.
    """
    data = options.data or output / "scenes"
    path = output / "prepared.json"
    made: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    regions = [data / f"regions.{suffix}" for suffix in ("npz", "h5", "hdf5", "lmdb")]
    weights = output / "detector" / "best.safetensors"
    detector = shlex.split(f"{DETECTOR} {options.detector}")
    if (output / "detector" / "last.pth").exists():
        detector.append("--resume")
    extraction = shlex.split(options.regions) or [*shlex.split(REGIONS), "--checkpoint", weights]
    extraction += ["--splits", data / "splits.json"]
    training = "tools.captioning.train_attributes", [data, output / "detector", *detector]
    steps = [
        ("attributes", [data / "attributes.json"], *training),
        ("regions", regions, "tools.caption", ["extract", data / "images", regions[0], *extraction]),
    ]
    recipes = {"scenes": f"{SCENES} {options.scenes}", "attributes": f"{DETECTOR} {options.detector}"}
    if options.data is None:
        scenes = [data, *shlex.split(recipes["scenes"])]
        steps.insert(0, ("scenes", [data / "splits.json"], "tools.datasets.captioned_scenes", scenes))
    recipes["regions"] = options.regions or REGIONS
    for name in ("images", "captions.json", "splits.json") if options.data else ():
        if not (data / name).exists():
            raise StudyError(f"--data {data} has no {name}")
    lacking = not options.regions and not any(file.exists() for file in (*regions, weights))
    if lacking and (data / "attributes.json").exists():
        raise StudyError(
            f"{data} has attributes.json, but no regions: create them with tools.caption extract, or remove "
            f"attributes.json to create both with a detector that is trained in {output / 'detector'}"
        )
    for name, results, module, arguments in steps:
        if not any(result.exists() for result in results):
            print(f"{name}: making {results[0]}", flush=True)
            seconds = run(module, arguments, output / f"{name}.log")
            made[name] = {"options": recipes[name].strip(), "cpu_seconds": round(seconds, 1)}
            write_text(path, json.dumps(made, indent=1) + "\n")
        elif name in made and made[name]["options"] != recipes[name].strip():
            raise StudyError(
                f"the {name} in {data} were made by {made[name]['options']!r}, not {recipes[name].strip()!r}: name "
                "another OUT"
            )
    return data, made


def report(study: Study, made: Mapping[str, Any], settings: Mapping[str, Setting]) -> str:
    """Write the table of all results in OUT whose options are current, and return it."""
    descriptions = {name: setting.what for name, setting in settings.items()} | BASELINES
    order = {name: number for number, name in enumerate([*BASELINES, *settings])}
    results = []
    for path in study.output.glob("*/**/result.json"):
        row = json.loads(path.read_text(encoding="utf-8"))
        known = row["setting"] in descriptions and row["options"]["part"] == study.part
        if known and "train" in row["options"]:
            known = row["options"] == study.options(settings[row["setting"]], row["stage"], *row["seeds"])
        if known:
            results.append(row)
    results.sort(key=lambda row: (order[row["setting"]], list(STAGES).index(row["stage"] or FIRST), row["seeds"]))
    splits = read_json(study.data / "splits.json")["images"]
    found = facts("fairseq", "pycocoevalcap", "timm")
    parts = [image["split"] for image in splits]
    found["images"] = ", ".join(f"{parts.count(part):,} {part}" for part in dict.fromkeys(parts))
    table = markdown(aggregated(results, descriptions), found, made)
    raw = json.dumps({"facts": found, "made": made, "results": results}, indent=1) + "\n"
    for name, text in (("study.md", table), ("study.json", raw)):  # paths of this machine mean nothing to readers
        write_text(study.output / name, text.replace(f"{sys.prefix}/", ""))
    return table


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, dict[str, Setting]]:
    """Parse the options; return them and all settings, built-in and the user's."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.captioning_study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("output", type=Path, metavar="OUT")
    parser.add_argument(
        "--data", type=Path, metavar="DATA", help="a data folder of the task, instead of synthetic scenes"
    )
    add_arguments(parser)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], metavar="N", help="default: 1")
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES), help="default: both")
    parser.add_argument("--part", choices=list(PARTS), default="test", help="images to score, default %(default)s")
    parser.add_argument(
        "--train", default="", metavar="OPTIONS", help="options of fairseq-train in the cross-entropy stage"
    )
    parser.add_argument(
        "--self-critical", default="", metavar="OPTIONS", help="options of fairseq-train in the self-critical stage"
    )
    parser.add_argument("--scenes", default="", metavar="OPTIONS", help="options of tools.datasets.captioned_scenes")
    parser.add_argument(
        "--detector", default="", metavar="OPTIONS", help="options of tools.captioning.train_attributes"
    )
    parser.add_argument(
        "--regions", default="", metavar="OPTIONS", help="options of tools.caption extract, for other regions"
    )
    options = parser.parse_args(arguments)
    settings = dict(SETTINGS)
    for name, model in added(parser, options, (*settings, *BASELINES, "scenes", "detector")).items():
        what = model if "--arch" in model else f"ETA, {model}"
        settings[name] = Setting(what, model, self_critical=True)
    choose(parser, options, settings)
    if options.data is not None and options.scenes:
        parser.error("--scenes applies to the scenes created without --data")
    if FIRST not in options.stages:
        parser.error(f"--stages must include {FIRST}, from which the other stage starts")
    return options, settings


def main(arguments: list[str] | None = None) -> int:
    options, settings = parse(arguments)
    made = ("sklearn", "skimage", "pycocotools") if options.data is None else ()
    need("fairseq", "timm", "safetensors", "pycocoevalcap", *made)
    output = options.output.resolve()
    options.data = options.data and options.data.resolve()
    try:
        data, made = prepare(output, options)
        study = Study(data, output, options.part, {FIRST: options.train, SECOND: options.self_critical})
        for name in BASELINES:
            study.baseline(name)
        for seed in options.seeds:
            for name in options.settings:
                for stage in options.stages:
                    if not settings[name].fused and (stage == FIRST or settings[name].self_critical):
                        study.row(name, settings[name], stage, seed)
                        table = report(study, made, settings)
        for name in options.settings:
            for stage in options.stages:
                if settings[name].fused:
                    study.fused(name, settings[name], stage, options.seeds)
        table = report(study, made, settings)
        print(f"\n{table}\nwritten: {output / 'study'}.md and .json")
    except (StudyError, BadFile) as error:
        print(f"captioning_study: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
