"""Every config's schedule, weight decay, crop and test mode against ``paper_values.yaml``, the papers' values."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml
from mmengine.config import Config

from tests.mm.mm_helpers import ROOT

TABLE = yaml.safe_load((Path(__file__).parent / "paper_values.yaml").read_text(encoding="utf-8"))
CONFIGS = sorted(path for kit in ("mmdet", "mmseg") for path in (ROOT / "configs" / kit).glob("*/*.py"))
# Small data sets of this package, upstream's transformers except for their attention, and backbones in upstream models.
WITHOUT_PAPER = ("digits", "transformers", "vit")
OF_PAPERS = [path for path in CONFIGS if path.parent.name not in WITHOUT_PAPER]


def folder_of(path: Path) -> str:
    return f"{path.parents[1].name}/{path.parent.name}"


def expected(path: Path) -> dict[str, Any]:
    """Return a config's values in the table: those of its folder and its own."""
    folder = TABLE[folder_of(path)]
    [own] = [row for pattern, row in folder["files"].items() if fnmatch(path.stem, pattern)]
    values: dict[str, Any] = {}
    for part in (folder, own):
        for kind in ("values", "open"):
            given = part.get(kind) or {}
            assert not values.keys() & given.keys()
            values |= given
    return values


def transform(config: Config, kind: str, key: str) -> Any:
    """Return an argument of a training transform, or None if there is no such transform."""
    arguments = [step.get(key) for step in config.train_dataloader.dataset.pipeline if step["type"] == kind]
    assert len(arguments) <= 1
    return list(arguments[0]) if arguments else None


def gpus(path: Path) -> int:
    """Return the number of GPUs in the file name, such as ``4xb2``; ``1x`` and ``150e`` are mmdet's names for 8."""
    match = re.search(r"(\d+)xb\d+", path.stem)
    return int(match[1]) if match else 8


def schedule(config: Config) -> dict[str, Any]:
    values: dict[str, Any] = {"warmup": 0}
    for part in config.param_scheduler:
        if part["type"] == "LinearLR":
            assert part["begin"] == 0
            assert not part["by_epoch"]
            values["warmup"] = part["end"]
        elif part["type"] == "PolyLR":
            values |= {"poly": [part["power"], part["eta_min"]], "iterations": part["end"]}
            assert part["begin"] == values["warmup"]
            assert config.train_cfg.max_iters == part["end"]
        else:
            assert part["type"] == "MultiStepLR"
            assert part["gamma"] == 0.1
            values |= {"steps": list(part["milestones"]), "epochs": config.train_cfg.max_epochs}
            assert part["end"] == config.train_cfg.max_epochs
    return values


def proposals(config: Config) -> dict[str, Any]:
    """Return the numbers of proposals of a two-stage detector."""
    if "rpn_proposal" not in (config.model.get("train_cfg") or {}):
        return {}
    train, test = config.model.train_cfg, config.model.test_cfg
    samplers = train.rpn.sampler, train.rcnn.sampler
    return {
        "proposals": [train.rpn_proposal.max_per_img, test.rpn.max_per_img],
        "proposal_iou": train.rpn_proposal.nms.iou_threshold,
        "samples": [number for sampler in samplers for number in (sampler.num, sampler.pos_fraction)],
    }


def actual(path: Path) -> dict[str, Any]:
    """Return all values of a config that the table may contain."""
    config = Config.fromfile(path)
    optimizer = config.optim_wrapper.optimizer
    return {
        "optimizer": optimizer.type,
        **{name: optimizer.get(name) for name in ("lr", "momentum", "weight_decay")},
        **schedule(config),
        **proposals(config),
        "scale": transform(config, "RandomResize", "ratio_range"),
        "crop": transform(config, "RandomCrop", "crop_size"),
        "colors": any(step["type"] == "PhotoMetricDistortion" for step in config.train_dataloader.dataset.pipeline),
        "batch": config.train_dataloader.batch_size * gpus(path),
        "test": config.model.get("test_cfg", {}).get("mode"),
        "pretrained": config.model.get("pretrained") or config.model.backbone.get("init_cfg"),
    }


OPTIONAL = {"colors", "pretrained", "proposals", "proposal_iou", "samples"}  # values that only some papers print


def test_a_config_is_its_papers():
    for path in OF_PAPERS:
        table, config = expected(path), actual(path)
        assert {name: config.get(name, "missing") for name in table} == table, path
        assert config.keys() - OPTIONAL <= table.keys(), path  # the table is complete


def test_every_folder_is_in_the_table():
    assert {folder_of(path) for path in OF_PAPERS} == set(TABLE)
    for folder, row in TABLE.items():
        stems = [path.stem for path in OF_PAPERS if folder_of(path) == folder]
        for pattern in row["files"]:
            assert any(fnmatch(stem, pattern) for stem in stems), f"{folder}: no config is {pattern}"
