"""Whole models of mmdet and mmsegmentation from their own configs: stock, and with our layers by the drop-in.

Each measurement is a fresh process; stock and ours take turns. Both have the same random weights; pictures, boxes and
masks are synthetic. A training step is forward, loss, backward and the optimizer's step.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from tools import need

from .. import compiled_mmcv, load
from ..case import Case
from ..memory import ResidentPeak
from ..results import compared, summarize

PASSES = ("prediction", "training step")
PROCESSES, LEAST, SECONDS = 5, 2, 210.0  # of each kind for a model: at most, at least, and the time for all of them
LEARNING_RATE = 1e-8  # the step costs the same, and synthetic data drive no weight out of range
Batch = dict[str, list]


@dataclass(frozen=True)
class Model:
    """An upstream model, and the same model with our layers."""

    title: str
    package: str  # mmdet or mmseg, which determines the synthetic data: boxes or masks
    config: str  # below the package's configs
    size: tuple[int, int] = (800, 1344)  # height and width of the picture


MODELS = (
    Model("Faster R-CNN R-50, attention 0010 and DCN", "mmdet",
          "empirical_attention/faster-rcnn_r50-attn0010-dcn_fpn_1x_coco.py"),
    Model("Faster R-CNN R-50, attention 1111", "mmdet", "empirical_attention/faster-rcnn_r50-attn1111_fpn_1x_coco.py"),
    Model("CCNet R-50", "mmseg", "ccnet/ccnet_r50-d8_4xb2-80k_cityscapes-769x769.py", (769, 769)),
    Model("Deformable DETR R-50", "mmdet", "deformable_detr/deformable-detr_r50_16xb2-50e_coco.py"),
    Model("DINO R-50, 4 scales", "mmdet", "dino/dino-4scale_r50_8xb2-12e_coco.py"),
    Model("Mask R-CNN Swin-T", "mmdet", "swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py"),
    Model("Mask2Former R-50, instances", "mmdet", "mask2former/mask2former_r50_8xb2-lsj-50e_coco.py"),
    Model("Mask2Former Swin-T, instances", "mmdet", "mask2former/mask2former_swin-t-p4-w7-224_8xb2-lsj-50e_coco.py"),
    Model("Mask2Former R-50, semantic (mmseg)", "mmseg",
          "mask2former/mask2former_r50_8xb2-90k_cityscapes-512x1024.py", (512, 1024)),
)  # fmt: skip


def cases(device: str) -> list[Case]:
    if device != "cpu":
        return []
    need("mmdet", "mmseg")
    compiled_mmcv.extension()  # without it, stock models would run on our operators
    return [Case(model.title, lambda: lambda: None, heavy=True, rows=partial(rows, model)) for model in MODELS]


def rows(model: Model, settings: Any) -> list[dict[str, Any]]:
    """Measure a model with settings of :mod:`..measure`, and return a row for each pass."""
    measurements: dict[str, list[dict[str, Any]]] = {"stock": [], "ours": []}
    model = replace(model, size=tuple(settings.size or model.size))
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(min(PROCESSES, settings.rounds)):
            spent = time.perf_counter() - begin
            if number >= min(LEAST, settings.min_rounds) and spent * (number + 1) / number > SECONDS:
                break
            for kind, processes in measurements.items():
                job = (model, kind == "ours", torch.get_num_threads(), settings.seconds, Path(folder) / "weights.pth")
                with ProcessPoolExecutor(1, get_context("spawn"), _silence) as pool:
                    processes.append(pool.submit(measured, *job).result())
    return [row(model, pass_name, measurements["ours"], measurements["stock"]) for pass_name in PASSES]


def row(model: Model, pass_name: str, ours: Sequence[Mapping], stock: Sequence[Mapping]) -> dict[str, Any]:
    """Return the row of one pass from the measurements of both kinds of processes."""
    both = {}
    for kind, processes in (("ours", ours), ("stock", stock)):
        results = [process["passes"][pass_name] for process in processes]
        both[kind] = summarize([t for result in results for t in result["times"]])
        both[kind] |= {
            "memory": max(result["memory"] for result in results),
            "features": min(t for result in results for t in result["features"]),
            "loss": float(f"{processes[0]['loss']:.6g}"),
        }
    loads = [process["load"] for process in (*ours, *stock)]
    others = max((reading["others"] for reading in loads if reading["others"] is not None), default=None)
    return compared(
        f"{model.title}, {model.size[0]}x{model.size[1]}, {pass_name}",
        both["ours"],
        {"stock": both["stock"]},
        config=f"{model.package}::{model.config}",
        attempts=1,
        rounds=len(ours),
        load={"others": others, "switches": sum(reading["switches"] for reading in loads)},
        loaded=(others or 0) > load.LOADED,
        goal=None,
    )


# --- in the fresh process -----------------------------------------------------------------------------------------


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
    if ours:
        importlib.import_module("attn_plugins.mmcv.drop_in")
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
    ys, xs = torch.arange(H).view(H, 1), torch.arange(W)
    inside = [(xs >= x0) & (xs < x1) & (ys >= y0) & (ys < y1) for x0, y0, x1, y1 in boxes]
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
    samples: dict[str, list] = {"times": [], "features": []}
    begin = time.perf_counter()
    while not samples["times"] or time.perf_counter() - begin < limit:
        data, features.seconds = make(), 0.0
        start = time.perf_counter()
        step(data)
        samples["times"].append(time.perf_counter() - start)
        samples["features"].append(features.seconds)
    return samples


def _silence() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # mmengine logs the initialization of every parameter


def measured(model: Model, ours: bool, threads: int, seconds: float, weights: Path) -> dict[str, Any]:
    """Return times and memory above the built model's level.

    All processes load the weights that the first one writes, so that all compute the same.
    """
    torch.set_num_threads(threads)
    network, optimizer = build(model, ours)
    if weights.exists():
        network.load_state_dict(torch.load(weights), strict=True)
    else:
        torch.save(network.state_dict(), weights)
    features, losses = Features(network), []

    def predict(data: Batch) -> None:
        with torch.no_grad():
            network.test_step(data)

    def train(data: Batch) -> None:
        torch.manual_seed(1)  # for box samplers and dropout
        losses.append(float(network.train_step(data, optimizer)["loss"]))

    passes: dict[str, Any] = {}
    peak, watch = ResidentPeak(), load.Watch()
    for name, step in zip(PASSES, (predict, train)):
        network.train(step is train)
        peak.reset()
        passes[name] = timed(step, lambda: batch(model), features, seconds) | {"memory": peak.read()}
    return {"passes": passes, "loss": losses[0], "load": watch.read()}
