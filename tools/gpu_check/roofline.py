"""Minimum operations and bytes of a run, and the time they take at the speeds that the device reaches."""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from .timing import Run, fastest

KINDS = {
    "float32": (torch.float32, False),
    "TF32": (torch.float32, True),
    "float16": (torch.float16, False),
    "bfloat16": (torch.bfloat16, False),
}


class Work(NamedTuple):
    """Minimum work of a run.

    Attributes:
        operations: Multiplications and additions of its products.
        moved: Bytes of its inputs and outputs, each counted once.
    """

    operations: int
    moved: int


class Watch(TorchDispatchMode):
    """Mode that counts the operations of products and records the inputs, memory that is read but was not created.

    FlopCounterMode is not used because it also tracks modules, by hooks that fail under autograd.grad.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.read: dict[int, int] = {}
        self.made: dict[int, Tensor] = {}  # kept alive, so that no address is reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            at = tensor.untyped_storage().data_ptr()
            if at not in self.made:
                size = min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
                self.read[at] = max(self.read.get(at, 0), size)
        output = func(*args, **(kwargs or {}))
        for tensor in _tensors(output):
            at = tensor.untyped_storage().data_ptr()
            if at not in self.read:
                self.made[at] = tensor
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.operations += count(*args, **(kwargs or {}), out_val=output)
        return output


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]


def work_of(run: Run) -> Work:
    """Run once and return its minimum work."""
    with Watch() as watch:
        result = run()
    written = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(result))
    return Work(watch.operations, sum(watch.read.values()) + written)


def kind_of(name: str) -> str:
    """Return the kind of arithmetic in a row's name, an entry of :data:`KINDS`."""
    return next((kind for kind in ("bfloat16", "float16", "TF32") if kind in name), "float32")


def ceilings(device: str, side: int) -> dict[str, float]:
    """Measure operations per second of each kind by a matrix product, and bytes per second by a copy."""
    found: dict[str, float] = {}
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for kind, (dtype, allowed) in KINDS.items():
            torch.backends.cuda.matmul.allow_tf32 = allowed
            a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
            found[kind] = 2 * side**3 / fastest(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    source = torch.randn(side * side * 4, device=device)
    target = torch.empty_like(source)
    found["bytes"] = 2 * source.numel() * 4 / fastest(lambda: target.copy_(source), device)
    return found


def main() -> None:
    """Print :func:`ceilings` for the device and the side of matrices in the arguments."""
    print(json.dumps(ceilings(sys.argv[1], int(sys.argv[2]))))


def floor(work: Work, kind: str, rates: dict[str, float]) -> float:
    """Return the minimum time of ``work`` in seconds, which no implementation can beat by much."""
    return max(work.operations / rates[kind], work.moved / rates["bytes"])
