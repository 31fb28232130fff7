"""A drawn captioned set with a detector and small captioning models, and runs of ``tools.caption caption`` on it."""

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
from tests.helpers.captioned_pictures import COLOURS, SHAPES, draw
from tools.caption.__main__ import main
from tools.caption.attributes import AttributeDetector
from tools.caption.backbones import TimmBackbone
from tools.pictures import open_picture
from tools.train import attributes as train_attributes

CAPTIONERS = ("show_attend_tell", "lstm_captioner", "conv_captioner")


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
    """Create a data folder of 12 pictures in ``folder``, and beside it a detector and models."""
    data = draw(folder / "data")
    torch.manual_seed(0)
    detector = AttributeDetector(TimmBackbone("test_resnet", (64, 64)), [*COLOURS, *SHAPES])
    pictures = [detector.backbone.prepare(open_picture(path)) for path in sorted((data / "images").iterdir())]
    detector.head.classifier.weight.data *= 500  # words that differ from picture to picture
    detector.head.classifier.bias.data = -detector.eval()(torch.stack(pictures)).mean((0, 2, 3)).detach()
    detector.save(folder / "best.safetensors")
    assert train_attributes.main([str(data), str(folder), "--predict", "--top", "3", "--device", "cpu"]) == 0
    grid = ["--grid", "test_resnet", "--checkpoint", str(folder / "best.safetensors"), "--grid-size", "3"]
    splits = ["--splits", str(data / "splits.json"), "--device", "cpu"]
    assert main(["extract", str(data / "images"), str(data / "regions.npz"), *grid, *splits]) == 0
    for fusion in ("entangled", "visual", "semantic"):
        checkpoint(folder / f"{fusion}.pt", data, "--fusion", fusion)
    for name in CAPTIONERS:
        both = [] if name == "show_attend_tell" else ["--fusion", "parallel"]
        checkpoint(folder / f"{name}.pt", data, f"--arch={name}_tiny", *both)
    checkpoint(folder / "other.pt", data, "--layers=3", seed=1)
    return data


def run(data: Path, out: Path, *pictures: Any, path: str = "entangled", options: tuple = ()) -> int:
    folder = data.parent
    models = ":".join(str(folder / f"{name}.pt") for name in path.split(":"))
    detector = () if path in ("visual", "show_attend_tell") else ("--detector", folder / "best.safetensors")
    given = ["caption", *pictures, "--path", models, *detector, "--out", out, "--device", "cpu", "--max-len", 6]
    return main(list(map(str, [*given, *options])))


def read(path: Path) -> Any:
    return json.loads(path.read_text())
