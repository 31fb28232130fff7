"""Comparison of what a stock layer and ours make of a scenario: the words of the tables in docs/reliability.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from attn_plugins import ops
from tests.helpers.replacement import (
    COLUMNS,
    Layer,
    Result,
    Scenario,
    class_names,
    compiled,
    converted,
    dropout_in_eval,
    export,
    functional,
    fx,
    outcome,
    rotated_children,
    script,
    wrapped_children,
)


def printed(layer: str) -> dict[str, str]:
    """Return the words of a layer's rows in the tables of docs/reliability.md, by column."""
    page = (Path(__file__).parents[2] / "docs/reliability.md").read_text()
    rows = (line.strip("| ").split(" | ") for line in page.splitlines())
    return dict(zip(COLUMNS, [cell for cells in rows if cells[0] == layer for cell in cells[1:]], strict=True))


class Watch(TorchDispatchMode):
    """Note whether an operator that only our code calls was called."""

    def __init__(self, marks: str) -> None:
        super().__init__()
        self.marks, self.seen = marks, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen |= self.marks in str(function)
        return function(*args, **(kwargs or {}))


def without_ours(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output and all gradients of a call, in which no operator of this package runs."""
    leaf = x.clone().requires_grad_()
    with Watch("attn_plugins") as watch:
        output = module(leaf)
    output.square().sum().backward()
    assert not watch.seen
    return [output, leaf.grad, *(p.grad for p in module.parameters())]


def differences(stock: Any, ours: Any, where: str = "") -> list[str]:
    """Return where ours does not give what stock gives; what stock cannot do, ours may."""
    if isinstance(stock, Exception):
        return []
    if isinstance(ours, Exception):
        return [f"{where}: {type(ours).__name__}: {ours}"]
    if isinstance(stock, dict):
        return [wrong for key in stock if key in ours for wrong in differences(stock[key], ours[key], f"{where}.{key}")]
    if isinstance(stock, tuple):
        return [wrong for a, b in zip(stock, ours) for wrong in differences(a, b, where)]
    if stock is None:
        return []
    if isinstance(stock, Tensor) and isinstance(ours, Tensor):
        error = float((ours - stock).abs().max() / stock.abs().max().clamp(min=1.0))
        limit = 0.1 if where.endswith("quantized") else 1e-3  # the linear layers that are quantized may differ
        return [] if error < limit else [f"{where}: differs by {error:.2g} of the largest value"]
    shown = ["values" if isinstance(value, Tensor) else value for value in (ours, stock)]
    return [] if isinstance(ours, type(stock)) and ours == stock else [f"{where}: {shown[0]} instead of {shown[1]}"]


class FirstCall(BaseException):
    """Ends a scenario, which catches no more than ``Exception``."""


class UntilFirstCall(Watch):
    """End at the first call of an operator that only our code calls."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.marks in str(function):
            raise FirstCall
        return function(*args, **(kwargs or {}))


def runs_our_code(layer: Layer, scenario: Scenario, module: nn.Module) -> bool:
    """Return whether our operator is called, for scenarios that do not trace."""
    try:
        with UntilFirstCall(layer.marks):
            outcome(scenario, module, layer.inputs())
    except FirstCall:
        return True
    return False


OWN = ("TokenAttention", "ViTAttention_1111")  # classes of layers that a user chooses instead of stock ones


def _own_names(stock: dict[str, str], ours: dict[str, str]) -> str:
    """Return the name of a class that the user chose for a layer, if that is all that differs."""
    changed = {name: kind for name, kind in ours.items() if kind != stock.get(name)}
    kinds = {kind for name, kind in changed.items() if not any(name.startswith(f"{layer}.") for layer in changed)}
    return kinds.pop() if len(kinds) == 1 and next(iter(kinds)) in OWN else ""


def _acting(stock: Result, ours: Result) -> set[str]:
    """Return the last names of the parts whose wrappers act in ours, and which stock ignores."""
    return {name.rpartition(".")[2] for name in stock if stock[name] is None and isinstance(ours.get(name), Tensor)}


def verdict(layer: Layer, scenario: Scenario) -> str:
    """Return the word of one cell.

    Raises:
        AssertionError: Ours differs from stock, or fails without an error of its own.
    """
    stock = outcome(scenario, layer.stock(), layer.inputs())
    with layer.replaced():
        ours = outcome(scenario, layer.ours(layer.stock()), layer.inputs())
        if isinstance(ours, Exception):
            if scenario is converted:
                with ops.backend("reference"):
                    defined = outcome(scenario, layer.ours(layer.stock()), layer.inputs())
                if not isinstance(defined, Exception):
                    return "by reference"
                if str(ours) == "other values":
                    return "other values"
            if isinstance(stock, Exception):
                return "fails as stock"
            if re.search("setup_context|must be|not supported", str(ours)):
                return "clear error"
            raise AssertionError(f"stock works, ours raises {type(ours).__name__}: {ours}") from ours
        if scenario is class_names and isinstance(stock, dict) and (own := _own_names(stock["names"], ours["names"])):
            return f"`{own}`"
        assert not (wrong := differences(stock, ours)), wrong
        if scenario in (wrapped_children, rotated_children) and (acting := sorted(_acting(stock, ours))):
            return f"as stock; {', '.join(f'`{name}`' for name in acting)} works"
        if isinstance(stock, Exception):
            return "works"
        if scenario is dropout_in_eval and set(stock.values()) == {None}:
            return "works" if True in ours.values() else "no dropout"
        traces = scenario in (export, compiled, functional, fx, script, converted, class_names)
        return "as stock" if traces or runs_our_code(layer, scenario, layer.ours(layer.stock())) else "stock's code"
