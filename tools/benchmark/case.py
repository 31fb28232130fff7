"""What a benchmark case is: one problem, ours and the peers', each as a function that prepares a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

Run = Callable[[], object]


class Buffer(NamedTuple):
    """A buffer that memory is compared with.

    Attributes:
        name: What it is.
        size: Bytes.
    """

    name: str
    size: int


@dataclass
class Case:
    """One row of a table.

    Args:
        name: The problem, as the table shows it.
        ours: Prepares the inputs on a device and returns what is timed.
        peers: The same for every peer, by name. A peer that cannot run raises ImportError or RuntimeError; the table
            shows the message.
        goal: The ratio to the better peer to reach; None where there is none.
        buffer: What the peers' method writes to memory. The working memory of such a row is published as a share of it.
        calls: Calls in one timed sample, for calls that are too short for the clock; times are per call.
        heavy: True where a round takes so long that three must do.
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
    """Return a run of ``function`` and the gradients of all ``tensors`` and ``parameters``, from a random one."""
    leaves = [t if t is None else t.detach().requires_grad_() for t in tensors]
    wanted = [t for t in leaves if t is not None] + list(parameters)
    with torch.no_grad():
        grad = torch.randn_like(function(*leaves))

    def run() -> object:
        return torch.autograd.grad(function(*leaves), wanted, grad)

    return run
