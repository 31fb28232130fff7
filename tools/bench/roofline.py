"""Minimum operations and bytes of a run, and the time they take at the speeds that the device reaches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from attn_plugins.ops import use_onednn

from .case import KINDS, Run, tensors
from .timing import Contestant

SIZES = {"cuda": (8192, 2**28), "cpu": (2048, 2**26)}  # side of the matrices, and length of the copy, that are timed
ON_CPU_TIMED = ("bfloat16", "float32")  # a CPU's float16 product takes minutes


class Work(NamedTuple):
    """Minimum work: multiplications and additions of products, and bytes of inputs and outputs, each counted once."""

    operations: int
    moved: int


class Counter(TorchDispatchMode):
    """Mode that counts the operations of products and records the inputs, memory that is read but was not created.

    FlopCounterMode is not used because it also tracks modules, by hooks that fail under autograd.grad.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.read: dict[int, int] = {}
        self.made: dict[int, Tensor] = {}  # kept alive, so that no address is reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors((args, kwargs)):
            at = tensor.untyped_storage().data_ptr()
            if at not in self.made:
                size = min(tensor.nbytes, tensor.untyped_storage().nbytes())
                self.read[at] = max(self.read.get(at, 0), size)
        output = func(*args, **(kwargs or {}))
        for tensor in tensors(output):
            at = tensor.untyped_storage().data_ptr()
            if at not in self.read:
                self.made[at] = tensor
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.operations += count(*args, **(kwargs or {}), out_val=output)
        return output


def work_of(run: Run) -> Work:
    """Run once and return its minimum work."""
    with Counter() as counter:
        result = run()
    return Work(counter.operations, sum(counter.read.values()) + sum(tensor.nbytes for tensor in tensors(result)))


def ceilings(device: str) -> dict[str, float]:
    """Measure operations per second of each kind by a matrix product, and bytes per second by a copy.

    Products of float32 on CPUs are oneDNN's where ``ops.use_onednn`` takes it, and then MKL's as well.
    """
    (side, length), rates = SIZES[device], dict[str, float]()
    before = torch.backends.cuda.matmul.allow_tf32
    onednn = device == "cpu" and use_onednn()
    for name, kind in KINDS.items():
        if not kind.autocast and (device == "cuda" or name in ON_CPU_TIMED):
            torch.backends.cuda.matmul.allow_tf32 = kind.tf32
            a, b = (torch.randn(side, side, device=device, dtype=kind.dtype) for _ in range(2))
            rates[name] = 2 * side**3 / fastest(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
    torch.backends.cuda.matmul.allow_tf32 = before
    use_onednn(False)
    if onednn:
        a, b = torch.randn(side, side), torch.randn(side, side)
        rates["float32 by MKL"] = 2 * side**3 / fastest(lambda: a @ b, device)
    source = torch.randn(length, device=device)
    target = torch.empty_like(source)
    rates["bytes"] = 2 * source.nbytes / fastest(lambda: target.copy_(source), device)
    return rates


def fastest(run: Run, device: str) -> float:
    """Return the minimum time of a run, with warm caches."""
    contestant = Contestant(run, device)
    return min(contestant.once() for _ in range(5))


def floor(work: Mapping[str, int], kind: str, rates: Mapping[str, float]) -> float:
    """Return the minimum time of work in seconds, which no implementation can beat by much."""
    rate = rates[str(KINDS[kind].autocast).removeprefix("torch.") if KINDS[kind].autocast else kind]
    return max(work["operations"] / rate, work["moved"] / rates["bytes"])
