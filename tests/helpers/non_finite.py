"""Numbers that are not finite in a layer that we replace: ours does not hide what the stock layer shows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

BAD = {"NaN": math.nan, "inf": math.inf, "-inf": -math.inf}
PLACES = (1 / 6, 1 / 2, 5 / 6)
JOINT = ("qkv", "in_proj")  # projections of query, key and value, which have each of the places; others the middle


@contextmanager
def spoilt(tensor: Tensor, place: float, bad: float) -> Iterator[None]:
    """Put ``bad`` into one element of a tensor."""
    flat = tensor.detach().view(-1)
    number = int(place * flat.numel())
    kept = flat[number].item()
    flat[number] = bad
    try:
        yield
    finally:
        flat[number] = kept


class Guarded(TorchDispatchMode):
    """Raise an error for NaN offsets where torchvision's kernel for CPUs reads beyond its memory and mostly crashes."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function).startswith("torchvision.deform_conv2d") and args[2].isnan().any():
            raise FloatingPointError("torchvision crashes")
        return function(*args, **(kwargs or {}))


def results(module: nn.Module, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the output and the gradients of all inputs and parameters."""
    output = module(*leaves.values())
    leaves = leaves | dict(module.named_parameters())
    grad_output = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view(output.shape)
    grads = torch.autograd.grad(output, list(leaves.values()), grad_output, allow_unused=True)
    return {"output": output} | {f"gradient of {n}": grad for n, grad in zip(leaves, grads) if grad is not None}


def finite(tensor: Tensor) -> Tensor:
    """Return 1 for each finite number, and 0 for others."""
    return tensor.isfinite().float()


def attempt(module: nn.Module, leaves: dict[str, Tensor], tensor: Tensor, place: float, bad: float) -> Any:
    """Return the results with ``bad`` in one element of a tensor, or the error instead of a crash."""
    with spoilt(tensor, place, bad), Guarded():
        try:
            return {name: finite(result) for name, result in results(module, leaves).items()}
        except FloatingPointError as error:
            return error


def shown(runs: list[Any]) -> Any:
    """Return True for each result that has a number which is not finite in one of the runs, else None.

    ``differences`` lets ours show more than stock.
    """
    failed = [run for run in runs if isinstance(run, Exception)]
    return failed[0] if failed else {n: True if any((run[n] == 0).any() for run in runs) else None for n in runs[0]}


def non_finite(module: nn.Module, inputs: tuple[Any, ...]) -> dict[str, Any]:
    """Spoil elements of inputs and parameters in turn, by NaN and infinity, and return which results are finite.

    For inputs these are the numbers of all results. Parameters are shared by all queries: for them it is whether a
    result shows NaN, or infinity of either sign. If a query's logits are -inf for all keys, the softmax of stock layers
    is NaN, and PyTorch's fused attention and our operators give 0.
    """
    leaves = {f"input {n}": x.clone().requires_grad_() for n, x in enumerate(inputs)}
    found: dict[str, Any] = {}
    for name, tensor in leaves.items():
        for word, bad in BAD.items():
            for place in PLACES:
                found[f"{word} in {name} at {place:.2g}"] = attempt(module, leaves, tensor, place, bad)
    for name, tensor in module.named_parameters():
        for word, numbers in ("NaN", [math.nan]), ("infinity", [math.inf, -math.inf]):
            for place in PLACES if any(joint in name for joint in JOINT) else PLACES[1:2]:
                runs = [attempt(module, leaves, tensor, place, bad) for bad in numbers]
                found[f"{word} in {name} at {place:.2g}"] = shown(runs)
    return found
