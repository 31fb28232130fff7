"""Benchmark cases: one problem for our operator and its peers, each as a function that prepares a run."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attn_plugins.core.operator import Operator

Run = Callable[[], object]
Maker = Callable[[], Callable[..., Any]]  # creates a function or a module on the default device
PASSES = ("forward", "forward+backward")


class Kind(NamedTuple):
    """Arithmetic of a row."""

    dtype: torch.dtype
    tf32: bool = False
    autocast: torch.dtype | None = None


KINDS = {
    "bfloat16": Kind(torch.bfloat16),
    "float32": Kind(torch.float32),
    "TF32": Kind(torch.float32, tf32=True),
    "float16": Kind(torch.float16),
    "autocast to bfloat16": Kind(torch.float32, autocast=torch.bfloat16),
    "autocast to float16": Kind(torch.float32, autocast=torch.float16),
}
OWN = "ours by "  # begins the names of other ways of ours
COMPILED = ("definition, compiled",)
ON_CPU, ON_CUDA = ("float32",), ("bfloat16", "float32", "float16")


class Peer(NamedTuple):
    """A peer that is not just called."""

    make: Maker
    differentiated: int | None = None  # number of leading tensors whose gradients it computes; None: all
    compiled: bool = False  # by torch.compile
    dtype: torch.dtype | None = None  # of its tensors; None: the row's


@dataclass
class Case:
    """One row of a table.

    Contestants prepare their inputs and return the function to time. One that cannot run raises; the table shows the
    message.
    """

    name: str
    ours: Callable[[], Run]
    peers: dict[str, Callable[[], Run]] = field(default_factory=dict)  # "ours by …" are not compared with
    calls: int = 1  # in a timed sample, for calls too short for the clock; times are of one
    heavy: bool = False  # a round takes so long that three must suffice
    threads: int | None = None  # of the CPU; None: the command line's
    main: bool = True  # measured on CUDA without --all
    kind: str = "float32"  # a key of KINDS
    timing: str = "graph"  # on CUDA; "eager": eager calls with the host's time, beside a graph; "whole": these alone
    part: str = ""  # rows that share the seconds of --part-seconds; empty: those of the benchmark


def problem(
    title: str,
    device: str,
    inputs: Callable[[torch.dtype], Sequence[Any]],
    ours: Maker,
    peers: Mapping[str, Maker | Peer] | None = None,
    *,
    kinds: Sequence[str] | None = None,
    passes: Sequence[str] = PASSES,
    channels_last: Collection[str] = (),
    definitions: Sequence[str] = (),
    heavy: bool = False,
    main: bool = True,
) -> list[Case]:
    """Return the cases of a problem, one for each kind of arithmetic and pass.

    Args:
        title: Name of the problem.
        device: ``cpu`` or ``cuda``.
        inputs: Draws the arguments in a dtype, on the default device.
        ours: Creates our function.
        peers: Peers by name.
        kinds: Keys of :data:`KINDS`; None for float32 on CPUs, and all dtypes on CUDA.
        passes: Any of :data:`PASSES`.
        channels_last: Names of contestants whose maps are in channels-last memory.
        definitions: Our definition as a peer on CUDA, any of :data:`DEFINITIONS`.
        heavy: Of the cases, like ``main``.
    """
    cases = []
    for kind in kinds or (ON_CPU if device == "cpu" else ON_CUDA):
        for pass_name in passes:

            def preparation(name: str, peer: Maker | Peer, kind: str = kind, passes: str = pass_name) -> Any:
                peer = peer if isinstance(peer, Peer) else Peer(peer)
                return partial(_prepared, peer, inputs, kind, passes, device, name in channels_last)

            prepared = {name: preparation(name, peer) for name, peer in (peers or {}).items()}
            for name in definitions if device == "cuda" else ():
                run = preparation("ours", Peer(ours, compiled="compiled" in name))
                prepared[name] = run if name.startswith(OWN) else by_definition(run)
            cases.append(
                Case(
                    f"{title}, {kind}, {pass_name}",
                    preparation("ours", ours),
                    prepared,
                    heavy=heavy,
                    main=main and kind in ("bfloat16", "float32", "autocast to bfloat16"),
                    kind=kind,
                )
            )
    return cases


def in_half(title: str, device: str, inputs: Callable[[torch.dtype], Sequence[Any]], ours: Maker) -> list[Case]:
    """Return the cases of a problem in bfloat16 on CPUs beside our own in float32; there are none on CUDA."""
    peers = {"ours, float32": Peer(ours, dtype=torch.float32)}
    return [] if device == "cuda" else problem(title, device, inputs, ours, peers, kinds=("bfloat16",))


def normal(*shapes: Sequence[int] | None, scale: float = 1.0) -> Callable[[torch.dtype], list[Tensor | None]]:
    """Return a function that draws normal tensors of these shapes, None for None."""
    return lambda dtype: [None if shape is None else torch.randn(*shape, dtype=dtype) * scale for shape in shapes]


def _prepared(
    peer: Peer, inputs: Callable[[torch.dtype], Sequence[Any]], kind: str, passes: str, device: str, last: bool
) -> Run:
    dtype = peer.dtype or KINDS[kind].dtype
    torch.backends.cuda.matmul.allow_tf32 = KINDS[kind].tf32
    torch.manual_seed(0)
    with torch.device(device):
        function = peer.make()
        torch.manual_seed(0)
        arguments = inputs(dtype)
    if last:
        arguments = pytree.tree_map_only(Tensor, _channels_last, arguments)
    if isinstance(function, nn.Module):
        function = function.to(device, dtype).train(passes != "forward")
    return prepare(function, arguments, kind, passes, device, peer.differentiated, peer.compiled)


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def prepare(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    kind: str = "float32",
    passes: str = "forward",
    device: str = "cpu",
    differentiated: int | None = None,
    compiled: bool = False,
) -> Run:
    """Return a run of ``function``: without gradients, or with those of all its tensors and parameters."""
    call = torch.compile(with_own_code(function), dynamic=False) if compiled else function
    if KINDS[kind].autocast:
        call = torch.autocast(device, KINDS[kind].autocast)(with_own_code(call))
    if passes == "forward":

        def forward() -> object:
            with torch.no_grad():
                return call(*arguments)

        return forward
    kept = len(arguments) if differentiated is None else differentiated
    arguments = [pytree.tree_map_only(Tensor, _leaf, a) if n < kept else a for n, a in enumerate(arguments)]
    wanted = _differentiable(arguments)
    if isinstance(function, nn.Module):
        wanted += [parameter for parameter in function.parameters() if parameter.requires_grad]
    grads = [torch.randn_like(output) for output in _differentiable(call(*arguments))]
    return lambda: torch.autograd.grad(_differentiable(call(*arguments)), wanted, grads, allow_unused=True)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def tensors(values: Any) -> list[Tensor]:
    """Return the tensors in a nest of containers."""
    leaves = [values] if isinstance(values, Tensor) else pytree.tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _differentiable(result: Any) -> list[Tensor]:
    return [tensor for tensor in tensors(result) if tensor.requires_grad]


# --- our definitions as peers -------------------------------------------------------------------------------------

DEFINITIONS = ("definition", *COMPILED, f"{OWN}torch.compile")


@contextmanager
def definitions() -> Iterator[None]:
    """Compute every operator by its definition, also while torch.compile traces."""
    before = Operator._by_reference
    Operator._by_reference = lambda self: True  # type: ignore[method-assign]
    try:
        yield
    finally:
        Operator._by_reference = before  # type: ignore[method-assign]


def by_definition(prepared: Callable[[], Run]) -> Callable[[], Run]:
    """Return a preparation of the same run on the operators' definitions."""

    def make() -> Run:
        with definitions():
            run = prepared()

        def defined() -> object:
            with definitions():
                return run()

        return defined

    return make


def with_own_code(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with a code object of its own, for which torch.compile reuses nothing.

    What was compiled from the definition would otherwise serve the module itself.
    """

    def run(*arguments: Any) -> Any:
        return call(*arguments)

    return types.FunctionType(run.__code__.replace(), globals(), run.__name__, None, run.__closure__)
