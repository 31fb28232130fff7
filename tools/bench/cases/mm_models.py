"""Models of mmdet and mmsegmentation, stock beside the drop-in in one process; on CPUs at tiny sizes.

Configs and synthetic data are those of :mod:`.end_to_end`. Where mmcv is not compiled, stock models call this package's
operators in place of mmcv's, and the peer is named so.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from attn_plugins.replacement import stock_of

from .. import compiled_mmcv
from ..case import Case
from .end_to_end import MODELS as ALL
from .end_to_end import Batch, Model, batch, build
from .whole import ALONE, Steps, operators_alone, rows

BATCHES = {"cpu": (1,), "cuda": (2, 8)}
TINY = {"mmdet": (192, 256), "mmseg": (97, 97)}  # DINO selects 900 pixels
MODELS = [model for model in ALL if model.title != "Mask2Former Swin-T, instances"]


class Forward(NamedTuple):
    """A class of a toolkit, its own ``forward`` and the drop-in's."""

    layer: Any
    stock: Any
    ours: Any


@contextlib.contextmanager
def our_operators() -> Iterator[None]:
    """Let the layers have the drop-in's ``forward``, which keeps no stock code for its speed."""
    with layers(True), operators_alone():
        yield


@cache
def _forwards() -> list[Forward]:
    """Return what the drop-in changes, which then is the toolkits' own again.

    Raises:
        RuntimeError: The drop-in was there before.
    """
    for toolkit in ("mmdet.models", "mmseg.models"):
        importlib.import_module(toolkit)
    from attn_plugins.mmcv.places import PLACES

    kinds: list[Any] = [getattr(importlib.import_module(place.module), place.layer) for place in PLACES]
    stock = [kind.forward for kind in kinds]
    if any(stock_of(forward) is not forward for forward in stock):
        raise RuntimeError("attn_plugins.mmcv.drop_in was imported before the toolkits' own layers could be kept")
    from attn_plugins.mmcv import drop_in

    drop_in.replace()
    made = [Forward(kind, before, kind.forward) for kind, before in zip(kinds, stock)]
    for layer, before, _ in made:
        layer.forward = before
    return made


@contextlib.contextmanager
def layers(ours: bool) -> Iterator[None]:
    """Let the toolkits' layers have the drop-in's ``forward``, or their own as afterwards."""
    for layer, before, after in _forwards():
        layer.forward = after if ours else before
    try:
        yield
    finally:
        for layer, before, _ in _forwards():
            layer.forward = before


def data(model: Model, count: int, device: str) -> Batch:
    """Return ``count`` pictures with their samples on the device."""
    parts = [batch(model) for _ in range(count)]
    return {
        "inputs": [part["inputs"][0].to(device) for part in parts],
        "data_samples": [part["data_samples"][0].to(device) for part in parts],
    }


def _calibrate(network: Any, pictures: Batch) -> None:
    """Set the statistics of every BatchNorm to the batch's, without which random weights overflow float16."""
    norms = [norm for norm in network.modules() if isinstance(norm, nn.modules.batchnorm._BatchNorm)]
    network.eval()
    for norm in norms:
        norm.train().momentum, norm.kept = 1.0, norm.momentum
    with torch.no_grad():
        network.extract_feat(network.data_preprocessor(_copied(pictures), False)["inputs"])
    for norm in norms:
        norm.momentum = norm.kept


def _copied(pictures: Batch) -> Batch:
    return {key: list(values) for key, values in pictures.items()}  # preprocessing replaces the elements


@lru_cache(maxsize=1)
def built(model: Model, count: int, peer: str, device: str) -> Mapping[str, Steps]:
    """Build stock and ours from the same weights."""
    made: dict[str, Steps] = {}
    pictures, weights = data(model, count, device), None
    for name in (peer, "ours"):
        installed = partial(layers, name == "ours")
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)  # mmengine logs the initialization of every parameter
        try:
            with installed(), contextlib.redirect_stdout(io.StringIO()):
                network, wrapper = build(model, ours=False)
        finally:
            logging.disable(before)
        network.to(device)
        if weights is None:
            _calibrate(network, pictures)
            weights = network.state_dict()
        network.load_state_dict(weights)

        def loss(network: Any = network) -> torch.Tensor:
            losses = network(**network.data_preprocessor(_copied(pictures), True), mode="loss")
            return network.parse_losses(losses)[0]

        def predict(network: Any = network) -> object:
            return network(**network.data_preprocessor(_copied(pictures), False), mode="predict")

        made[name] = Steps(network, wrapper.optimizer, loss, predict, installed)
    return made | {ALONE: replace(made["ours"], layers=our_operators)}


def cases(device: str) -> list[Case]:
    peer = "stock"
    with contextlib.suppress(ImportError):
        peer = "stock" if compiled_mmcv.is_compiled() else "stock on our operators for mmcv's"
    made = []
    for model in MODELS:
        model = model if device == "cuda" else replace(model, size=TINY[model.package])
        for count in BATCHES[device]:
            title = f"{model.title}, {model.size[0]}x{model.size[1]}, batch {count}"
            version = "Swin" if "Swin" in model.title else None
            made += rows(title, peer, partial(built, model, count, peer), device, model.title, version)
    return made
