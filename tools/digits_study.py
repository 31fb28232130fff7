"""Attention modules in small detectors and segmentors on digits on photographs, from the same pretrained backbone.

::

    python -m tools.digits_study deformable          # alone, with 0010, compared with 1111; varied scale and rotation
    python -m tools.digits_study sharing             # the thesis' Table 4.2: shared projections, refinement
    python -m tools.digits_study paddings            # the thesis' Tables 3.3 and 3.4: paddings, smoothings, windows
    python -m tools.digits_study sharing OUT --settings j-conv h-shared i-shared-refined --seeds 0
    python -m tools.digits_study deformable OUT --train 'train_cfg.max_epochs=12'    # --cfg-options, for every setting
    python -m tools.digits_study paddings OUT --add 'nl=nl_narrow-r18_digits' --settings cc nl

    OUT/pretrained/              the plain network with whose backbone every setting starts; backbone.pth
    OUT/SETTING-SEED/            the last checkpoint, mmengine's logs, train.log, result.json
    OUT/STUDY.{md,json}          the table of all finished trainings, rewritten after each one

OUT is ``work_dirs/STUDY_study`` by default. Missing sets are created in ``--data``: ``digits``, on which the backbone
is trained, and for the first study ``digits_varied``. Only the backbone is pretrained, as the papers' networks start
from ImageNet weights. Each training is mmdet's or mmsegmentation's own, on one CPU thread. Trainings with a
``result.json`` are not repeated; an interrupted training restarts from the beginning.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools import need
from tools.datasets.digits_on_photographs import Recipe, build
from tools.files import write_text
from tools.study import ROOT, StudyError, add_arguments, added, choose, facts, kept, run

SEEDS = (0, 1, 2)
SIZE = (128, 160)  # pixels (H, W) for which multiply-adds are counted
VARIED = Recipe(sides=(14, 100), turn=60.0)
SHORT = (  # instead of 1,000 steps
    "max_iters=400 train_cfg.max_iters=400 train_cfg.val_interval=200 param_scheduler.1.T_max=350 "
    "param_scheduler.1.end=400"
)
_LBA = "deeplabv3plus-lba_narrow-r18_digits"
_FUSION = "model.decode_head.fusion_cfg"
_ATTENTION = "model.decode_head.attention"


@dataclasses.dataclass(frozen=True)
class Study:
    """Settings to compare.

    Attributes:
        title: Title of the table.
        toolkit: ``'mmdet'`` or ``'mmseg'``.
        data: Folder in ``--data``.
        recipe: Recipe of the pictures.
        pretrained: Config of the network that provides the backbone.
        metric: Name of the metric in mmengine's log.
        settings: Name to a config of ``configs/TOOLKIT/digits``, then ``--cfg-options``.
        train: ``--cfg-options`` of every setting.
    """

    title: str
    toolkit: str
    data: str
    recipe: Recipe
    pretrained: str
    metric: str
    settings: Mapping[str, str]
    train: str = ""

    @property
    def unit(self) -> str:
        """Name of the metric in the table, where it is in percent."""
        return "mAP" if self.toolkit == "mmdet" else "mIoU"

    def percent(self, value: float) -> float:
        """Convert a ``value`` of the log to percent."""
        return round(100 * value, 2) if self.toolkit == "mmdet" else value


STUDIES = {
    "deformable": Study(
        "Deformable convolution and Transformer attention in a small detector",
        "mmdet", "digits_varied", VARIED, "atss_narrow-r50_fpn_digits", "coco/bbox_mAP",
        {
            "plain": "atss_narrow-r50_fpn_digits",
            "deformable": "atss_narrow-r50-dcn_fpn_digits",
            "1111": "atss_narrow-r50-attn1111_fpn_digits",
            "0010+deformable": "atss_narrow-r50-attn0010-dcn_fpn_digits",
        },
    ),
    "sharing": Study(
        "Local bilateral attention in a small DeepLabv3+",
        "mmseg", "digits", Recipe(), "fcn_narrow-r18_digits", "mIoU",
        {
            "j-conv": "deeplabv3plus-j-conv_narrow-r18_digits",
            "e-unshared": _LBA,
            "h-shared": f"{_LBA} {_FUSION}.shared=True",
            "i-shared-refined": f"{_LBA} {_FUSION}.shared=True {_FUSION}.iterations=3",
            "g-content-shared-refined": (
                f"{_LBA} {_FUSION}.geometric=False {_FUSION}.shared=True {_FUSION}.iterations=3"
            ),
            "a-content": f"{_LBA} {_FUSION}.geometric=False",
            "b-geometric": f"{_LBA} {_FUSION}.content=False",
        },
        SHORT,
    ),
    "paddings": Study(
        "Paddings, smoothings and windows of bilateral criss-cross attention",
        "mmseg", "digits", Recipe(), "fcn_narrow-r18_digits", "mIoU",
        {
            "learned-zscore": "bi-cc_narrow-r18_digits",
            "cc": "cc_narrow-r18_digits",
            "inf-sqrt_d": "bi-cc-inf_narrow-r18_digits",
            "zero-zscore": f"bi-cc_narrow-r18_digits {_ATTENTION}.outside=zero",
            "learned-sqrt_d": f"bi-cc_narrow-r18_digits {_ATTENTION}.smoothing=sqrt_d",
            "zero-sqrt_d": f"bi-cc_narrow-r18_digits {_ATTENTION}.outside=zero {_ATTENTION}.smoothing=sqrt_d",
            "k-3": f"bi-cc_narrow-r18_digits {_ATTENTION}.kernel_size=3",
            "k-31": f"bi-cc_narrow-r18_digits {_ATTENTION}.kernel_size=31",
        },
        SHORT,
    ),
}  # fmt: skip


def training_tool(toolkit: str) -> Path:
    """Return the path of ``tools/train.py`` of mmdet or mmseg, which their packages contain."""
    need(toolkit)
    spec = importlib.util.find_spec(toolkit)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / ".mim/tools/train.py"


def prepare(folder: Path, recipe: Recipe) -> None:
    """Create a set if it is missing.

    Raises:
        StudyError: ``folder`` holds other files, or a set of another recipe.
    """
    if not (folder / "recipe.json").is_file():
        print(f"making {folder}", flush=True)
    try:
        build(folder, recipe)
    except ValueError as error:
        raise StudyError(f"--data: {error}") from error


def data_options(toolkit: str, data: Path) -> list[str]:
    """Return the ``--cfg-options`` that make a config read ``data``."""
    found = [f"{part}_dataloader.dataset.data_root={data}/" for part in ("train", "val", "test")]
    if toolkit == "mmdet":
        found += [f"{part}_evaluator.ann_file={data / 'annotations/val.json'}" for part in ("val", "test")]
    return found


def config_file(toolkit: str, name: str) -> Path:
    """Return the file of a config: a name in ``configs/TOOLKIT/digits``, or a path.

    Raises:
        StudyError: the config does not exist.
    """
    folder = ROOT / "configs" / toolkit / "digits"
    file = folder / f"{name}.py"
    if not file.is_file():
        file = Path(name).resolve()
    if file.suffix != ".py" or not file.is_file():
        raise StudyError(f"a setting begins with a config, a name of {folder} or a path, got {name!r}")
    return file


def size_of(toolkit: str, words: Sequence[str]) -> dict[str, int]:
    """Count the parameters of a setting's network, and its multiply-adds for an image of ``SIZE``, on shapes alone.

    Args:
        toolkit: ``'mmdet'`` or ``'mmseg'``.
        words: A config's name, then ``--cfg-options``.
    """
    import torch
    from mmengine.config import Config, DictAction
    from mmengine.registry import init_default_scope
    from torch.utils.flop_counter import FlopCounterMode

    registry = importlib.import_module(f"{toolkit}.registry")
    config = Config.fromfile(config_file(toolkit, words[0]))
    parser = argparse.ArgumentParser()
    parser.add_argument("--options", nargs="*", action=DictAction)
    config.merge_from_dict(parser.parse_args(["--options", *words[1:]]).options or {})
    init_default_scope(toolkit)
    with torch.device("meta"):
        model = registry.MODELS.build(config.model).eval()
    head = model.bbox_head if toolkit == "mmdet" else model.decode_head
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        head(model.extract_feat(torch.empty(1, 3, *SIZE, device="meta")))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, "multiply_adds": counter.get_total_flops() // 2}


def read_log(folder: Path, metric: str) -> dict[str, list[float]]:
    """Read ``steps``, those with an evaluation, and ``values`` of ``metric`` at each, from mmengine's log.

    Raises:
        StudyError: no evaluation ended.
    """
    found: dict[int, float] = {}
    for file in sorted(folder.glob("*/vis_data/scalars.json")):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if metric in row:
                found[row["step"]] = row[metric]
    if not found:
        raise StudyError(f"{folder} has no */vis_data/scalars.json with {metric}: no evaluation ended")
    return {"steps": sorted(found), "values": [found[step] for step in sorted(found)]}


def keep_backbone(folder: Path) -> Path:
    """Write the backbone's weights of a finished training to ``backbone.pth``, once; return its path."""
    import torch

    path = folder / "backbone.pth"
    if not path.is_file():
        last = folder / Path((folder / "last_checkpoint").read_text(encoding="utf-8").strip()).name
        weights = torch.load(last, map_location="cpu", weights_only=False)["state_dict"]
        partial = path.with_suffix(".partial")
        torch.save({"state_dict": {k: v for k, v in weights.items() if k.startswith("backbone.")}}, partial)
        partial.rename(path)
    return path


def finished(study: Study, name: str, seed: int, words: list[str], folder: Path, more: list[str]) -> dict[str, Any]:
    """Train a setting in ``folder``, or read the stored result.

    Args:
        study: Study of the setting.
        name: Its name in the table.
        seed: Seed of all random numbers.
        words: Name of its config, then ``--cfg-options``.
        folder: Its work directory.
        more: ``--cfg-options`` for every setting: the paths of data and backbone.

    Raises:
        StudyError: the training failed, or was run with other options.
    """
    path = folder / "result.json"
    if result := kept(path, words):
        print(f"{folder.name}: already done", flush=True)
        return result
    print(f"{folder.name}: training, see {folder / 'train.log'}", flush=True)
    size = size_of(study.toolkit, words)
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    options = [*more, f"randomness.seed={seed}", *words[1:]]
    arguments = [config_file(study.toolkit, words[0]), f"--work-dir={folder}", "--cfg-options", *options]
    seconds = run(training_tool(study.toolkit), arguments, folder / "train.log")
    found = read_log(folder, study.metric)
    found["values"] = [study.percent(value) for value in found["values"]]
    wall = round(time.monotonic() - began, 1)
    result = {"setting": name, "seed": seed, "options": words, **size, **found}
    result |= {"train_cpu_seconds": round(seconds, 1), "train_wall_seconds": wall}
    write_text(path, json.dumps(result, indent=1) + "\n")
    print(f"{folder.name}: {study.unit} {found['values'][-1]:.1f} after {wall / 60:.1f} minutes", flush=True)
    return result


def spread(values: Sequence[float]) -> str:
    """Return mean ± standard deviation."""
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{deviation}"


def markdown(study: Study, results: Sequence[Mapping[str, Any]], where: Mapping[str, str]) -> str:
    """Return the table of ``results``."""
    lines = [
        f"# {study.title}", "", ", ".join(f"{k} {v}" for k, v in where.items()), "",
        f"| setting | config and options | parameters | M multiply-adds | seeds | {study.unit}, % | CPU s |",
        "|---|---|---:|---:|---|---:|---:|",
    ]  # fmt: skip
    for name in dict.fromkeys(result["setting"] for result in results):
        rows = [result for result in results if result["setting"] == name]
        cells = [
            f"`{name}`", f"`{' '.join(rows[0]['options'])}`", f"{rows[0]['parameters']:,}",
            f"{rows[0]['multiply_adds'] / 1e6:.1f}", " ".join(str(row["seed"]) for row in rows),
            spread([row["values"][-1] for row in rows]), spread([row["train_cpu_seconds"] for row in rows]),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def report(which: str, settings: Mapping[str, list[str]], output: Path) -> str:
    """Write the table of every finished training in ``output`` whose options are current, and return it."""
    study, results = STUDIES[which], []
    for name, words in settings.items():
        for path in sorted(output.glob(f"{name}-*/result.json")):
            result = json.loads(path.read_text(encoding="utf-8"))
            if result["setting"] == name and result["options"] == words:
                results.append(result)
    where = facts(study.toolkit, "mmcv", "mmengine")
    where["images"] = f"{study.recipe.train} for training, {study.recipe.val} for validation"
    table = markdown(study, results, where)
    write_text(output / f"{which}.md", table)
    content = {"facts": where, "metric": study.unit, "results": results}
    write_text(output / f"{which}.json", json.dumps(content, indent=1) + "\n")
    return table


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, dict[str, list[str]]]:
    """Parse the options; return them and all settings, each a config's name and ``--cfg-options``."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.digits_study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=list(STUDIES), metavar="STUDY", help=", ".join(STUDIES))
    parser.add_argument("output", type=Path, nargs="?", metavar="OUT", help="default: work_dirs/STUDY_study")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder of the sets; default: data")
    add_arguments(parser, "a config and --cfg-options")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="default: 0 1 2")
    parser.add_argument("--train", default="", metavar="OPTIONS", help="--cfg-options for every setting")
    options = parser.parse_args(arguments)
    options.output = (options.output or ROOT / f"work_dirs/{options.study}_study").resolve()
    study = STUDIES[options.study]
    settings = dict(study.settings)
    settings.update(added(parser, options, (*settings, "pretrained")))
    choose(parser, options, settings)
    more = shlex.split(f"{study.train} {options.train}")
    return options, {name: [*shlex.split(own), *more] for name, own in settings.items()}


def main(arguments: list[str] | None = None) -> int:
    options, settings = parse(arguments)
    study, output, data = STUDIES[options.study], options.output, options.data.resolve()
    need(study.toolkit, "mmcv", "mmengine", "sklearn", "skimage", "pycocotools")
    try:
        for name in options.settings:
            config_file(study.toolkit, settings[name][0])
        prepare(data / "digits", Recipe())
        prepare(data / study.data, study.recipe)
        upright = data_options(study.toolkit, data / "digits")
        folder = output / "pretrained"
        finished(study, "pretrained", 0, [study.pretrained, *shlex.split(options.train)], folder, upright)
        more = [*data_options(study.toolkit, data / study.data), f"load_from={keep_backbone(folder)}"]
        table = ""
        for seed in options.seeds:
            for name in options.settings:
                finished(study, name, seed, settings[name], output / f"{name}-{seed}", more)
                table = report(options.study, settings, output)
        print(f"\n{table}\nwritten: {output / options.study}.md and .json")
    except StudyError as error:
        print(f"digits_study: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
