"""Helpers of the mm tests: paths, mmdet's training tool, configs without downloads, a training step."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from mmengine.optim import OptimWrapper, build_optim_wrapper

ROOT = Path(__file__).parents[2]
MMDET_TOOLS = Path(importlib.util.find_spec("mmdet").origin).parent / ".mim/tools"
TRAIN_TOOL, TEST_TOOL = MMDET_TOOLS / "train.py", MMDET_TOOLS / "test.py"


def mmseg_tool(name: str) -> Path:
    """Return the path of mmseg's ``'train'`` or ``'test'`` tool."""
    return Path(importlib.util.find_spec("mmseg").origin).parent / f".mim/tools/{name}.py"


def dictionaries(node: Any) -> Iterator[dict]:
    """Yield every dictionary of a config, outer ones first, so that a caller may change what is inside."""
    if isinstance(node, dict):
        yield node
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else ():
        yield from dictionaries(value)


def without_downloads(config: Any) -> Any:
    """Remove every request for pretrained weights from ``config.model`` and return ``config``."""
    for node in dictionaries(config.model):
        init = node.get("init_cfg")
        if isinstance(init, dict) and init.get("type") == "Pretrained":
            node["init_cfg"] = None
    return config


def training_step(model: torch.nn.Module, optim_wrapper: dict, batch: dict) -> OptimWrapper:
    """Run one training step as mmengine's loop does, keeping the gradients; return the optimizer."""
    optimizer = build_optim_wrapper(model, optim_wrapper)
    model.train()
    losses = model(**model.data_preprocessor(batch, True), mode="loss")
    loss, _ = model.parse_losses(losses)
    assert torch.isfinite(loss)
    optimizer.backward(loss)
    optimizer.step()
    return optimizer


def without_gradient(model: torch.nn.Module, kinds: tuple[type, ...]) -> list[str]:
    """Return the parameters of these kinds of layers whose gradient is missing or not finite."""
    return [
        name
        for prefix, layer in model.named_modules()
        if isinstance(layer, kinds)
        for name, p in layer.named_parameters(prefix)
        if p.grad is None or not p.grad.isfinite().all()
    ]
