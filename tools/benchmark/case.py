"""Benchmark cases: one problem for our operator and its peers, each as a function that prepares a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

Run = Callable[[], object]


class Buffer(NamedTuple):
    """A buffer for comparison with memory.

    Attributes:
        name: Name of the buffer.
        size: Size in bytes.
    """

    name: str
    size: int


@dataclass
class Case:
    """One row of a table.

    Args:
        name: The problem, as the table shows it.
        ours: Prepares the inputs on a device and returns the function to time.
        peers: Likewise for every peer, by name. A peer that cannot run raises ImportError or RuntimeError; the table
            shows the message.
        goal: Target ratio to the better peer, or None.
        buffer: Buffer that the peers' method writes. The working memory of the row is published relative to its size.
        calls: Calls per timed sample, for calls too short for the clock; times are per call.
        heavy: True if a round takes so long that three must suffice.
        threads: CPU threads of this row; None for the command line's.
    """

    name: str
    ours: Callable[[], Run]
    peers: dict[str, Callable[[], Run]] = field(default_factory=dict)
    goal: float | None = None
    buffer: Buffer | None = None
    calls: int = 1
    heavy: bool = False
    threads: int | None = None


def forward(function: Callable[..., Tensor], *tensors: Tensor | None) -> Run:
    """Return a run of ``function`` without gradients."""

    def run() -> Tensor:
        with torch.no_grad():
            return function(*tensors)

    return run


def forward_backward(
    function: Callable[..., Tensor], *tensors: Tensor | None, parameters: tuple[Tensor, ...] = ()
) -> Run:
    """Return a run of ``function`` and all gradients of ``tensors`` and ``parameters`` for a random output gradient."""
    leaves = [t if t is None else t.detach().requires_grad_() for t in tensors]
    wanted = [t for t in leaves if t is not None] + list(parameters)
    with torch.no_grad():
        grad = torch.randn_like(function(*leaves))

    def run() -> object:
        return torch.autograd.grad(function(*leaves), wanted, grad)

    return run
