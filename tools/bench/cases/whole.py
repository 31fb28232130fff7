"""Steps of whole models that a process holds side by side: a prediction, and a training step with its optimizer."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attn_plugins.modules.tokens.parts.window_speed import SWITCH, Version, is_slower
from attn_plugins.ops import use_onednn

from ..case import KINDS, OWN, Case, Run

ALONE = f"{OWN}the operators alone"  # measured where ours keeps stock's windows
COMPILED = f"{OWN}torch.compile"  # measured in bfloat16 on CUDA
ON_CPU, ON_CUDA = ("float32",), ("TF32", "autocast to float16", "autocast to bfloat16", "float32")
PASSES = ("prediction", "training step")
LEARNING_RATE = 1e-8  # the step costs the same, and synthetic data drive no weight out of range


@dataclass
class Steps:
    """A model on its device, with synthetic data."""

    network: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[], Tensor]
    predict: Callable[[], object]
    layers: Callable[[], AbstractContextManager[object]] = nullcontext  # in which the model's layers are those named


def choosing(model: nn.Module, onednn: bool) -> nn.Module:
    """Return ``model``, whose calls let oneDNN compute products as ``accelerate`` does, or leave PyTorch's."""

    def choose_products(*_: object) -> None:
        use_onednn(onednn)

    model.register_forward_pre_hook(choose_products)
    return model


def both(peer: str, stock: nn.Module) -> dict[str, nn.Module]:
    """Return ``stock``, named ``peer``, and a copy with ``accelerate`` and its choice of products."""
    from attn_plugins import accelerate

    ours = copy.deepcopy(stock)
    accelerate(ours, onednn=False)
    return {peer: choosing(stock, False), "ours": choosing(ours, True)}


def steps(model: nn.Module, loss: Callable[[Any], Tensor], *inputs: Tensor, **named: Tensor) -> Steps:
    """Return the steps of a model on these inputs, with a loss of its output."""
    predict = partial(model, *inputs, **named)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    return Steps(model, optimizer, lambda: loss(predict()), predict)


def accelerated(
    peer: str, stock: nn.Module, loss: Callable[[Any], Tensor], *inputs: Tensor, **named: Tensor
) -> dict[str, Steps]:
    """Return the steps of ``stock``, named ``peer``, and of a copy with ``accelerate``."""
    return {name: steps(model, loss, *inputs, **named) for name, model in both(peer, stock).items()}


@contextmanager
def operators_alone() -> Iterator[None]:
    """Let no layer of ours keep stock's code for its speed."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "0"
    try:
        yield
    finally:
        del os.environ[SWITCH]
        if before is not None:
            os.environ[SWITCH] = before


def keeps_stock(version: Version | None, kind: str, training: bool) -> bool:
    """Return whether our windows of a model keep stock's code on CUDA in the arithmetic of a key of ``KINDS``."""
    arithmetic = "half" if KINDS[kind].autocast else "TF32" if KINDS[kind].tf32 else None
    return version is not None and is_slower(version, arithmetic, training)


def step(steps: Steps, kind: str, training: bool, device: str) -> Run:
    """Return a prediction, or a training step that returns its loss, in the arithmetic of a key of ``KINDS``.

    float16 trains with PyTorch's scaler of gradients. TF32 is on but for float32, also outside autocast.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = kind != "float32"
    dtype = KINDS[kind].autocast
    cast = partial(torch.autocast, device, dtype or torch.bfloat16, enabled=dtype is not None)
    scaler = torch.amp.GradScaler(device, init_scale=1.0, enabled=dtype is torch.float16)
    steps.network.train(training)

    def predict() -> object:
        with steps.layers(), torch.no_grad(), cast():
            return steps.predict()

    def train() -> Tensor:
        torch.manual_seed(1)  # for box samplers and dropout
        with steps.layers():
            with cast():
                loss = steps.loss()
            scaler.scale(loss).backward()
            scaler.step(steps.optimizer)
            scaler.update()
            steps.optimizer.zero_grad()
        return loss.detach()

    return train if training else predict


def rows(
    title: str,
    peer: str,
    built: Callable[[str], Mapping[str, Steps]],
    device: str,
    part: str | None = None,
    version: Version | None = None,
    compiled: bool = False,
) -> list[Case]:
    """Return the rows of a model beside ``peer``, for each kind of arithmetic and both passes.

    Ours is what users get. Where its windows keep stock's code, :data:`ALONE` is measured as well.

    Args:
        title: Name of the rows.
        peer: Name of the other model in what ``built`` returns, beside ``"ours"``.
        built: Builds both models on a device, once for rows that follow one another.
        device: ``cpu`` or ``cuda``.
        part: See :class:`..case.Case`; None for the title.
        version: Of the model's windows, if it has some.
        compiled: ``built`` also returns :data:`COMPILED`.
    """

    def prepared(name: str, kind: str, training: bool) -> Run:
        return step(built(device)[name], kind, training, device)

    def peers(kind: str, training: bool) -> dict[str, Callable[[], Run]]:
        names = [peer]
        if device == "cuda" and keeps_stock(version, kind, training):
            names.append(ALONE)
        if device == "cuda" and compiled and kind == "autocast to bfloat16":
            names.append(COMPILED)
        return {name: partial(prepared, name, kind, training) for name in names}

    return [
        Case(
            f"{title}, {kind}, {pass_name}",
            partial(prepared, "ours", kind, training),
            peers(kind, training),
            kind=kind,
            timing="graph" if device == "cpu" else "whole",
            heavy=device == "cpu",
            part=part or title,
        )
        for kind in (ON_CPU if device == "cpu" else ON_CUDA)
        for training, pass_name in zip((False, True), PASSES)
    ]
