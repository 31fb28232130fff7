"""What a benchmark case is: one problem, ours and the peers', each as a function that prepares a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Run = Callable[[], object]


@dataclass
class Case:
    """One row of a table.

    Args:
        name: The problem, as the table shows it.
        ours: Prepares the inputs on a device and returns what is timed.
        peers: The same for every peer, by name. One that cannot run raises ImportError or RuntimeError, and the
            table says so.
        goal: The ratio to the best peer that we are after; None where there is none.
    """

    name: str
    ours: Callable[[], Run]
    peers: dict[str, Callable[[], Run]] = field(default_factory=dict)
    goal: float | None = None


def forward(function: Callable[..., Tensor], *tensors: Tensor | None) -> Run:
    """A run of ``function`` without gradients."""

    def run() -> Tensor:
        with torch.no_grad():
            return function(*tensors)

    return run


def forward_backward(
    function: Callable[..., Tensor], *tensors: Tensor | None, parameters: tuple[Tensor, ...] = ()
) -> Run:
    """A run of ``function`` and of the gradients of all ``tensors`` and ``parameters``, from a random gradient."""
    leaves = [t if t is None else t.detach().requires_grad_() for t in tensors]
    wanted = [t for t in leaves if t is not None] + list(parameters)
    with torch.no_grad():
        grad = torch.randn_like(function(*leaves))

    def run() -> object:
        return torch.autograd.grad(function(*leaves), wanted, grad)

    return run
