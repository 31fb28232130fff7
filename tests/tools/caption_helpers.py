"""A drawn captioned set with small captioning models, and runs of ``tools.caption caption`` on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from fairseq import options as fairseq_options
from fairseq import tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer

import attn_plugins.fairseq  # noqa: F401
from tests.helpers.captioned_pictures import COLORS, SHAPES, draw
from tools.caption.__main__ import main
from tools.caption.backbones import TimmBackbone
from tools.pictures import open_picture


def checkpoint(path: Path, data: Path, *options: str, seed: int = 0) -> Path:
    """Save a model with fairseq's trainer. Its random weights are large, for captions far from alike."""
    given = [data, "--task=captioning", "--arch=eta_transformer_tiny", "--min-word-count=1", "--max-attributes=4"]
    given += ["--optimizer=adam", "--lr=0.1", "--cpu", "--max-target-positions=20"]
    given += ["--no-save-optimizer-state", *options]
    parsed = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), list(map(str, given)))
    cfg = convert_namespace_to_omegaconf(parsed)
    torch.manual_seed(seed)
    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 3
    Trainer(cfg, task, model, task.build_criterion(cfg.criterion)).save_checkpoint(str(path), {})
    return path


def create(folder: Path) -> Path:
    """Create a data folder of 12 pictures in ``folder``, and beside it the pictures' attributes by name and models."""
    data = draw(folder / "data")
    words = {i: [[COLORS[i % 4], 0.9], [SHAPES[i % 3], 0.8]] for i in range(1, 13)}
    (data / "attributes.json").write_text(json.dumps(words))
    (folder / "attributes.json").write_text(json.dumps({f"{i:06}": own for i, own in words.items()}))
    torch.manual_seed(0)
    backbone = TimmBackbone("test_resnet", (64, 64)).train()
    pictures = torch.stack([backbone.prepare(open_picture(path)) for path in sorted((data / "images").iterdir())])
    for _ in range(30):  # statistics by which features differ from picture to picture
        backbone(pictures)
    torch.save(backbone.model.state_dict(), folder / "backbone.pth")
    grid = ["--grid", "test_resnet", "--checkpoint", str(folder / "backbone.pth"), "--size", "64", "--grid-size", "3"]
    splits = ["--splits", str(data / "splits.json"), "--device", "cpu"]
    assert main(["extract", str(data / "images"), str(data / "regions.hdf5"), *grid, *splits]) == 0
    for fusion in ("entangled", "visual", "semantic"):
        checkpoint(folder / f"{fusion}.pt", data, "--fusion", fusion)
    checkpoint(folder / "show_attend_tell.pt", data, "--arch=show_attend_tell_tiny")
    checkpoint(folder / "other.pt", data, "--layers=3", seed=1)
    return data


def run(data: Path, out: Path, *pictures: Any, path: str = "entangled", options: tuple = ()) -> int:
    folder = data.parent
    models = ":".join(str(folder / f"{name}.pt") for name in path.split(":"))
    attributes = () if path in ("visual", "show_attend_tell") else ("--attributes", folder / "attributes.json")
    given = ["caption", *pictures, "--path", models, *attributes, "--out", out, "--device", "cpu", "--max-len", 6]
    return main(list(map(str, [*given, *options])))


def read(path: Path) -> Any:
    return json.loads(path.read_text())
