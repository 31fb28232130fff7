"""Training, captioning and scoring by fairseq's commands and ours: the thesis' tables, on synthetic scenes."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from tools.caption.score import read_references, read_split
from tools.files import write_text
from tools.study.commands import ROOT, StudyError, fairseq_log, run
from tools.study.settings import Run, Study

PLUGINS = f"--user-dir={ROOT / 'plugins/fairseq'}"
TASK = "--task captioning --cpu --num-workers 0"
GENERATION = "--batch-size 50 --beam 5 --max-len-b 40 --required-batch-size-multiple 1"
SUBSETS = {"val": "valid", "test": "test"}


class Captioning:
    """Trainings in one or two stages, ensembles of finished ones, and given captions as baselines.

    ``--data`` names a data folder of the task ``captioning`` to use instead of the scenes: ``images``,
    ``captions.json`` and ``splits.json``. Missing attributes and regions are created in it by a small detector.
    """

    needs = ("fairseq", "timm", "safetensors", "pycocoevalcap")
    facts = ("fairseq", "pycocoevalcap", "timm")

    def __init__(self, study: Study, output: Path, options: Namespace) -> None:
        self.study, self.output, self.given = study, output, options
        self.first, self.second = study.parts
        self.more = {self.first: options.train, self.second: options.self_critical}
        self.data = (options.data or output / "scenes").resolve()
        self.part = options.part
        if options.data and options.scenes:
            raise StudyError("--scenes applies to the scenes created without --data")
        if options.stages and self.first not in options.stages:
            raise StudyError(f"--stages must include {self.first}, from which the other stage starts")

    def runs(self, chosen: list[Run]) -> list[Run]:
        """Return baselines, trainings and then ensembles."""
        settings = self.study.settings
        ensembles = [Run(one.setting, one.part) for one in chosen if "fused" in settings[one.setting]]
        trained = [one for one in chosen if "fused" not in settings[one.setting]]
        trained = [one for one in trained if one.part == self.first or settings[one.setting].get("stages") == 2]
        self.seeds = list(dict.fromkeys(one.seed for one in chosen))
        return [*(Run(name) for name in self.study.data["baselines"]), *trained, *dict.fromkeys(ensembles)]

    def prepare(self, runs: list[Run]) -> None:
        """Create missing parts of the data folder, recording the options and CPU seconds of each."""
        data, given, study = self.data, self.given, self.study.data
        for name in ("images", "captions.json", "splits.json") if given.data else ():
            if not (data / name).exists():
                raise StudyError(f"--data {data} has no {name}")
        regions = [data / f"regions.{suffix}" for suffix in ("npz", "h5", "hdf5", "lmdb")]
        detector = self.output / "detector"
        weights = detector / "best.safetensors"
        lacking = not given.regions and not any(file.exists() for file in (*regions, weights))
        if lacking and (data / "attributes.json").exists():
            raise StudyError(
                f"{data} has attributes.json, but no regions: extract them, or remove attributes.json to create both "
                f"with a detector that is trained in {detector}"
            )
        resume = ["--resume"] if (detector / "last.pth").exists() else []
        recipes = {
            "scenes": f"{study['scenes']} {given.scenes}".strip(),
            "attributes": f"{study['detector']} {given.detector}".strip(),
            "regions": (given.regions or study["regions"]).strip(),
        }
        source = ["--splits", data / "splits.json", *([] if given.regions else ["--checkpoint", weights])]
        steps: dict[str, tuple[list[Path], str, list[Any]]] = {
            "scenes": ([data / "splits.json"], "tools.datasets.captioned_scenes", [data]),
            "attributes": ([data / "attributes.json"], "tools.train attributes", [data, detector, *resume]),
            "regions": (regions, "tools.caption extract", [data / "images", regions[0], *source]),
        }
        if given.data:
            del steps["scenes"]
        made = self.made
        for name, (products, command, arguments) in steps.items():
            if not any(product.exists() for product in products):
                print(f"{name}: making {products[0]}", flush=True)
                words = [*arguments, *shlex.split(recipes[name])]
                seconds = run(command, words, self.output / f"{name}.log")
                made[name] = {"options": recipes[name], "cpu_seconds": round(seconds, 1)}
                write_text(self.output / "prepared.json", json.dumps(made, indent=1) + "\n")
            elif name in made and made[name]["options"] != recipes[name]:
                raise StudyError(
                    f"the {name} in {data} were made by {made[name]['options']!r}, not {recipes[name]!r}: name another "
                    "OUT"
                )

    @property
    def made(self) -> dict[str, Any]:
        """Options and CPU seconds of the parts of the data folder that the study created."""
        path = self.output / "prepared.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def checkpoints(self, one: Run) -> list[Path]:
        """Return the checkpoints of an ensemble: of all seeds of one setting, or of the first seed of several."""
        names = self.study.settings[one.setting]["fused"]
        seeds = self.seeds if len(names) == 1 else self.seeds[:1]
        folders = [self.output / Run(name, one.part, seed).folder for name in names for seed in seeds]
        return [folder / "checkpoint_best.pt" for folder in folders if (folder / "result.json").exists()]

    def options(self, one: Run) -> dict[str, Any] | None:
        """Return what a stored result must have been run with; None for an ensemble of fewer than two."""
        if not one.part:
            return {"captions": one.setting, "part": self.part}
        setting = self.study.settings[one.setting]
        if one.seed is None:
            paths = self.checkpoints(one)
            scores = {str(path.parent.relative_to(self.output)): self.result(path)["scores"] for path in paths}
            return None if len(paths) < 2 else {"checkpoints": scores, "generate": GENERATION, "part": self.part}
        first = setting.get("first", "") if one.part == self.first else ""
        words = [self.study.data["train"], self.study.parts[one.part]["train"], f"--seed {one.seed}"]
        words += [setting.get("options", ""), first, setting.get("task", ""), self.more[one.part]]
        return {"train": " ".join(" ".join(words).split()), "generate": GENERATION, "part": self.part}

    def result(self, checkpoint: Path) -> dict[str, Any]:
        """Return the result beside a checkpoint."""
        return json.loads(checkpoint.with_name("result.json").read_text(encoding="utf-8"))

    def train(self, one: Run, folder: Path) -> dict[str, Any]:
        """Train, caption and score; or only the last two, or the last."""
        if not one.part:
            return self.baseline(one.setting, folder)
        setting = self.study.settings[one.setting]
        task = setting.get("task", "")
        if one.seed is None:
            paths = self.checkpoints(one)
            seeds = sorted({self.result(path)["seed"] for path in paths})
            parameters = sum(self.result(path)["parameters"] for path in paths)
            return {"seeds": seeds, "parameters": parameters, **self.generate(folder, paths, task)}
        before = []
        if one.part == self.first:
            shutil.rmtree(self.output / Run(one.setting, self.second, one.seed).folder, ignore_errors=True)
        else:
            checkpoint = self.output / Run(one.setting, self.first, one.seed).folder / "checkpoint_best.pt"
            before.append(f"--finetune-from-model={checkpoint}")
        options = shlex.split((self.options(one) or {})["train"])
        seconds = run(
            "fairseq-train", [self.data, PLUGINS, *options, *before, f"--save-dir={folder}"], folder / "train.log"
        )
        parameters, rows = fairseq_log(folder / "train.log")
        best = self.study.parts[one.part]["best"]
        values = [float(row[f"valid_{best}"]) for row in rows if f"valid_{best}" in row]
        return {
            "parameters": parameters,
            "updates": max(int(row["train_num_updates"]) for row in rows if "train_num_updates" in row),
            f"valid_{best}": min(values) if best == "loss" else max(values),
            "train_cpu_seconds": round(seconds, 1),
            **self.generate(folder, [folder / "checkpoint_best.pt"], task),
        }

    def generate(self, folder: Path, checkpoints: list[Path], task: str) -> dict[str, Any]:
        """Caption images with one or several checkpoints, and score the captions."""
        words = [self.data, PLUGINS, *shlex.split(f"{TASK} {GENERATION} {task}")]
        words += [f"--gen-subset={SUBSETS[self.part]}", f"--path={':'.join(map(str, checkpoints))}"]
        words.append(f"--results-json={folder / 'results.json'}")
        seconds = run("fairseq-generate", words, folder / "generate.log")
        splits = ["--splits", self.data / "splits.json", self.part]
        scored = self.score(folder, self.data / "captions.json", *splits)
        return {**scored, "generate_cpu_seconds": round(seconds, 1)}

    def baseline(self, name: str, folder: Path) -> dict[str, Any]:
        """Score given captions: an image's first one against its others, or the next image's against all."""
        references = read_references(self.data / "captions.json")
        images = read_split(self.data / "splits.json", self.part)
        given = {image: references[image][0] for image in images if len(references[image]) > 1}
        if name == "grammar":
            truth = {image: references[image][1:] for image in given}
        else:
            truth = {image: references[image] for image in given}
            given = dict(zip(given, [*list(given.values())[1:], *list(given.values())[:1]]))
        rows = [{"image_id": image, "caption": caption} for image, captions in truth.items() for caption in captions]
        content = {"images": [{"id": image} for image in truth], "annotations": rows}
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "captions.json", json.dumps(content))
        results = [{"image_id": image, "caption": caption} for image, caption in given.items()]
        write_text(folder / "results.json", json.dumps(results))
        return self.score(folder, folder / "captions.json")

    def score(self, folder: Path, captions: Path, *splits: str | Path) -> dict[str, Any]:
        """Return the report of tools.caption score."""
        scores = folder / "scores.json"
        arguments = [folder / "results.json", captions, *splits, "--json", scores]
        run("tools.caption score", arguments, folder / "score.log")
        return json.loads(scores.read_text(encoding="utf-8").replace(f"{sys.prefix}/", ""))

    def about(self) -> dict[str, str]:
        """Return the number of images of every part."""
        splits = json.loads((self.data / "splits.json").read_text(encoding="utf-8"))["images"]
        parts = [image["split"] for image in splits]
        return {"images": ", ".join(f"{parts.count(part):,} {part}" for part in dict.fromkeys(parts))}
