"""Measurement of one model in its own process: reads settings as JSON, prints times and memory as JSON."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..load import Watch
from ..memory import ResidentPeak
from .models import MODELS, Model

MARK = "end to end: "
LEARNING_RATE = 1e-8  # the step costs the same, and synthetic data drive no weight out of range
Batch = dict[str, list]


def load_config(model: Model) -> Any:
    """Return the upstream config for one CPU process: no downloads, BatchNorm for SyncBN."""
    from mmengine.config import Config
    from mmengine.registry import init_default_scope

    package = Path(importlib.import_module(model.package).__file__ or "").parent
    config = Config.fromfile(package / ".mim" / "configs" / model.config)
    init_default_scope(model.package)
    config.model.pop("pretrained", None)
    for_one_process(config.model)
    config.model.data_preprocessor.pop("batch_augments", None)
    if config.model.data_preprocessor.get("size") is not None:
        config.model.data_preprocessor.size = model.size
    config.optim_wrapper.optimizer.lr = LEARNING_RATE
    return config


def for_one_process(node: Any) -> None:
    """Remove pretrained weights and SyncBN from a config, in place."""
    if isinstance(node, dict):
        if node.get("type") == "SyncBN":
            node["type"] = "BN"
        init = node.get("init_cfg")
        if isinstance(init, dict) and init.get("type") == "Pretrained":
            node["init_cfg"] = None
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else ():
        for_one_process(value)


def build(model: Model, ours: bool) -> tuple[torch.nn.Module, Any]:
    """Return the model with random weights, stock or with our layers, and its optimizer wrapper."""
    for module in model.custom_imports if ours else ():
        importlib.import_module(module)
    config = load_config(model)
    registry = importlib.import_module(f"{model.package}.registry").MODELS
    torch.manual_seed(0)
    made = registry.build(config.model)
    made.init_weights()
    from mmengine.optim import build_optim_wrapper

    return made, build_optim_wrapper(made, config.optim_wrapper)


def batch(model: Model) -> Batch:
    """Return a synthetic picture with boxes or a mask, in the format of the package's collate function."""
    H, W = model.size
    generator = torch.Generator().manual_seed(0)
    picture = torch.randint(0, 256, (3, H, W), generator=generator, dtype=torch.uint8)
    shapes = dict(img_shape=(H, W), ori_shape=(H, W), pad_shape=(H, W))
    if model.package == "mmseg":
        from mmengine.structures import PixelData
        from mmseg.structures import SegDataSample

        sample = SegDataSample(metainfo=shapes)
        blocks = torch.randint(0, 19, (1, 1, -(-H // 64), -(-W // 64)), generator=generator).float()
        mask = torch.nn.functional.interpolate(blocks, size=(H, W))[0].long()
        sample.gt_sem_seg = PixelData(data=mask)
        return dict(inputs=[picture], data_samples=[sample])
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    from mmengine.structures import InstanceData

    corners = torch.rand(8, 2, generator=generator) * torch.tensor([0.6 * W, 0.6 * H])
    sides = (0.1 + 0.3 * torch.rand(8, 2, generator=generator)) * torch.tensor([W, H])
    boxes = torch.cat((corners, corners + sides), 1)
    sample = DetDataSample(metainfo=dict(shapes, scale_factor=(1.0, 1.0), img_id=0))
    rows, columns = torch.arange(H).view(H, 1), torch.arange(W)
    inside = [(columns >= x0) & (columns < x1) & (rows >= y0) & (rows < y1) for x0, y0, x1, y1 in boxes]
    sample.gt_instances = InstanceData(
        bboxes=boxes,
        labels=torch.randint(0, 80, (8,), generator=generator),
        masks=BitmapMasks(torch.stack(inside).byte().numpy(), H, W),
    )
    sample.ignored_instances = InstanceData(bboxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.long))
    return dict(inputs=[picture], data_samples=[sample])


class Features:
    """Timer of a model's backbone and neck."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.seconds, self._run = 0.0, model.extract_feat
        model.extract_feat = self  # type: ignore[assignment]

    def __call__(self, *args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return self._run(*args, **options)
        finally:
            self.seconds += time.perf_counter() - begin


def timed(step: Callable[[Batch], Any], make: Callable[[], Batch], features: Features, limit: float) -> dict[str, list]:
    """Return times of ``step``, after a warm-up call, until ``limit`` seconds have passed; at least one."""
    step(make())
    found: dict[str, list] = {"times": [], "features": []}
    begin = time.perf_counter()
    while not found["times"] or time.perf_counter() - begin < limit:
        data, features.seconds = make(), 0.0
        start = time.perf_counter()
        step(data)
        found["times"].append(time.perf_counter() - start)
        found["features"].append(features.seconds)
    return found


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Return times and peak memory of the process, above its level with the model built, for each pass.

    Args:
        settings: ``model``, ``ours``, ``size`` (None: the model's), ``threads``, ``seconds``, and ``weights``, a file
            that the first process writes and the others load, so that all compute the same.
    """
    entry = MODELS[settings["model"]]
    if settings["size"]:
        entry = Model(**{**vars(entry), "size": tuple(settings["size"])})
    torch.set_num_threads(settings["threads"])
    model, optimizer = build(entry, settings["ours"])
    weights = Path(settings["weights"])
    if weights.exists():
        model.load_state_dict(torch.load(weights), strict=True)
    else:
        torch.save(model.state_dict(), weights)
    features, losses = Features(model), []

    def predict(data: Batch) -> None:
        with torch.no_grad():
            model.test_step(data)

    def train(data: Batch) -> None:
        torch.manual_seed(1)  # for box samplers and dropout
        losses.append(float(model.train_step(data, optimizer)["loss"]))

    found: dict[str, Any] = {}
    peak, watch = ResidentPeak(), Watch()
    for name, step in (("prediction", predict), ("training step", train)):
        model.train(step is train)
        peak.reset()
        found[name] = timed(step, lambda: batch(entry), features, settings["seconds"]) | {"memory": peak.read()}
    return {"passes": found, "loss": losses[0], "load": watch.read()}


def main() -> None:
    """Run the measurement that the first argument describes in JSON."""
    print(MARK + json.dumps(run(json.loads(sys.argv[1]))))
