"""Triton's place among the backends: where its kernels run, how they are launched, what they are compiled for.

A region's kernels lie in a file of their own, ``triton_kernels.py``, which imports ``triton`` and is imported by the
first call that they serve. They are launched by :func:`launch` alone. Where the variable ``TRITON_INTERPRET`` is 1 as
that file is imported, its kernels run in Triton's interpreter, on tensors of the CPU: for tests.

Triton compiles a kernel once for each set of dtypes, constants, and integers that are 1 or divisible by 16, and keeps
the binary in ``TRITON_CACHE_DIR`` (``~/.triton/cache``) for later processes. Sizes of maps and sequences are therefore
arguments that kernels name in ``do_not_specialize``, or are rounded up to a power of two where a constant is needed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch import Tensor

from . import backends, plans
from .arguments import tf32_is_allowed
from .devices import device_of

NAME = "triton"
OLDEST = Version("3.3")  # of torch 2.7: an older Triton fails to compile some kernels
OLDEST_CAPABILITY = (8, 0)  # of the devices of NVIDIA that Triton compiles for
LONGEST_GRID = 2**31 - 1
DEVICES = ("cuda", "xpu")  # device types of NVIDIA's and AMD's, and of Intel's GPUs
AMD = ("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")  # families with matrix units that Triton multiplies by


class Target(NamedTuple):
    """Device that kernels are compiled for, on which tiles and precision depend.

    Attributes:
        kind: ``cuda``, ``hip`` (AMD's) or ``xpu`` (Intel's), on which none of the kernels has run.
        capability: Of NVIDIA's devices.
        lanes: Threads of a warp: 32, or 64 on AMD's data-centre devices.
    """

    kind: str
    capability: tuple[int, int] = (0, 0)
    lanes: int = 32


class Launch(NamedTuple):
    """Launch that :func:`recorded` kept instead of running it.

    Attributes:
        kernel: What ``triton.jit`` made.
        grid: Programs along up to three axes.
        args: In order, tensors and numbers.
        constants: ``tl.constexpr`` arguments and Triton's own, such as ``num_warps``.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]


class _State(threading.local):
    recording: list[Launch] | None = None
    target = Target("cuda", OLDEST_CAPABILITY)


_state = _State()


@contextlib.contextmanager
def recorded(target: Target = _State.target) -> Iterator[list[Launch]]:
    """Record this thread's launches instead of running them: the kernel variants that a call needs, without a device.

    Args:
        target: The device that tiles and precision are chosen for.
    """
    before = _state.recording, _state.target
    launches: list[Launch] = []
    _state.recording, _state.target = launches, target
    try:
        yield launches
    finally:
        _state.recording, _state.target = before


def recording() -> bool:
    """Return True within :func:`recorded`, where a kernel's results are not written."""
    return _state.recording is not None


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def refusal(tensor: Tensor) -> str | None:
    """Return the reason why Triton's kernels cannot take ``tensor``, whatever its shape, or None.

    The interpreter takes tensors of the CPU, and :func:`recorded` those of any device, or of none.
    """
    kind = tensor.device.type
    simulated = recording() or (kind == "cpu" and interpreted())
    if not (simulated or kind in DEVICES):
        return f"its kernels are for GPUs of NVIDIA, AMD and Intel, and the tensors are on {kind}"
    if tensor.dtype == torch.float64:
        return "its kernels take no float64"
    return _missing() if simulated else _refusal(kind, tensor.device.index or 0)


def prefers_not(terms: Any, options: Any) -> str | None:
    """Leave to others what kernels are only interpreted or recorded for; see :class:`.backends.Backend`."""
    kind = terms.value.device.type
    return None if kind in DEVICES else f"on {kind}, its kernels are only interpreted or recorded, for tests"


def runs_on(kind: str, index: int) -> bool:
    """Return True where Triton's kernels run on a device, as far as that does not depend on the tensors."""
    return kind in DEVICES and _refusal(kind, index) is None


# As torch.compiler.assume_constant_result does, which would import all of dynamo.
runs_on._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _refusal(kind: str, index: int) -> str | None:
    return _missing() or _no_compiler() or _unfit(kind, index)


def launch(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], **constants: Any) -> None:
    """Run ``kernel`` on the device of its first argument, a tensor; an empty grid runs nothing.

    Args:
        kernel: What ``triton.jit`` made; its ``tl.constexpr`` parameters come last.
        grid: Programs along up to three axes.
        arguments: Tensors and numbers by the names of the parameters; what the kernel does not name is left out.
        **constants: ``tl.constexpr`` parameters and Triton's own, such as ``num_warps``.
    """
    args = tuple([arguments[name] for name in kernel.arg_names if name not in constants])
    if _state.recording is not None:
        _state.recording.append(Launch(kernel, grid, args, constants))
    elif all(grid):
        with device_of(args[0]):
            plans.launched(*_run(kernel, grid, args, constants))


# What triton.jit compiled, and the values of the tl.constexpr parameters, by what it was compiled for. Triton's own
# search for it looks at every argument anew, which takes longer than the rest of a launch. A property of an argument
# that Triton specializes and _variant leaves out would launch a binary for other arguments: wrong results, or a fault.
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def _run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, Any]:
    """Launch, and return a function that does so again and its arguments; None for it where that is not known."""
    key = _variant(kernel, args, constants)
    known = _compiled.get(key) if key is not None else None
    if known is None:
        compiled = kernel[grid](*args, **constants)
        if key is not None and hasattr(type(compiled), "__getitem__"):  # not what Triton compiles in the background
            _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])
        return partial(kernel[grid], **constants) if interpreted() else None, args
    compiled, values = known
    run, args = compiled[(*grid, 1, 1)[:3]], (*args, *values)
    run(*args)
    return run, args


def state(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return what launches for ``tensor`` depend on besides arguments, or None where no plan is to be made of them."""
    forced = backends.forced()
    if not (tensor.device.type in DEVICES or forced == NAME) or recording():
        return None
    exact = tensor.dtype != torch.float32 or not tf32_is_allowed()
    return forced, tensor.get_device(), torch.are_deterministic_algorithms_enabled(), exact


def _variant(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return what Triton compiles a kernel for, or None where Triton is to find that out.

    These are the device, the constants, dtypes of tensors and whether they begin at multiples of 16 bytes, and whether
    integers are 1 or multiples of 16, but for those in ``do_not_specialize``.
    """
    if not _launches_are_known() or kernel.pre_run_hooks:
        return None
    kinds: list[Any] = []
    for arg, unspecialized in zip(args, _unspecialized(kernel)):
        kind = type(arg)
        if kind is int:
            if not -(2**31) <= arg < 2**31:  # Triton passes it as 64 bits
                return None
            if not unspecialized:
                kinds.append((arg == 1, arg % 16 == 0))
        elif arg is None:
            kinds.append(None)
        elif isinstance(arg, Tensor):
            kinds.append(arg.dtype if arg.data_ptr() % 16 == 0 else (arg.dtype,))
        elif kind is not float:
            return None
    return (id(kernel), args[0].device.index, *kinds, *constants.items())


@cache
def _unspecialized(kernel: Any) -> tuple[bool, ...]:
    """Return for each parameter of a kernel whether ``do_not_specialize`` names it."""
    return tuple(parameter.do_not_specialize for parameter in kernel.params)


@cache
def _launches_are_known() -> bool:
    """Return whether this Triton takes launches as :func:`_run` makes them: all arguments, constants as well."""
    import triton

    return not interpreted() and Version("3.6") <= Version(triton.__version__) < Version("3.10")


def precision(tensor: Tensor) -> str:
    """Return how ``tl.dot`` multiplies float32 on a device; in half precision there is only one way.

    By TF32 where torch's own switch allows it, else by three products of TF32, whose sum is about as exact as float32
    and, on tensor cores, several times as fast as products of float32. So does PyTorch's fused attention. On GPUs of
    AMD, where not all compile that, and of Intel, by products of float32.
    """
    if tensor.dtype != torch.float32 or _target(tensor).kind != "cuda":
        return "ieee"
    return "tf32" if tf32_is_allowed() else "tf32x3"


def upcast(dtype: torch.dtype) -> bool:
    """Return whether operands of ``tl.dot`` must become float32 first: the interpreter cannot multiply bfloat16."""
    return interpreted() and dtype == torch.bfloat16


def factors_in_shared_memory(tensor: Tensor) -> bool:
    """Return True where tensor cores read factors from shared memory (9.0 to 11.x); elsewhere they take registers."""
    return 9 <= _target(tensor).capability[0] < 12


def hopper(tensor: Tensor) -> bool:
    """Return True on devices of capability 9.x, whose tiles were chosen by times; those of others, by registers."""
    return _target(tensor).capability[0] == 9


def rdna(tensor: Tensor) -> bool:
    """Return True on AMD's devices with warps of 32 threads, for which larger tiles compile to spills."""
    target = _target(tensor)
    return target.kind == "hip" and target.lanes == 32


def _target(tensor: Tensor) -> Target:
    """Return the device of a tensor, or the one that launches are recorded for."""
    device = tensor.device
    return _device(device.type, device.index or 0) if device.type in DEVICES else _state.target


def power_of_two(size: int, smallest: int = 16) -> int:
    """Return the lowest power of two not below ``size`` and ``smallest``; ``tl.dot`` takes 16 and more."""
    return max(smallest, 1 << max(0, size - 1).bit_length())


@cache
def _missing() -> str | None:
    if not find_spec("triton"):
        return "Triton is not installed; torch's CUDA builds for Linux bring it"
    try:
        import triton
    except Exception as error:  # as one for another Python raises
        return f"Triton does not load: {error}"
    if Version(triton.__version__) < OLDEST:
        return f"Triton {triton.__version__} is older than {OLDEST}, the first that compiles its kernels"
    return None


@cache
def _no_compiler() -> str | None:
    """Return the reason why the C code that launches Triton's kernels cannot be compiled, or None.

    Triton takes a function that compiles it as well. Its build for Windows brings a compiler (TinyCC) and headers.
    """
    if interpreted() or _builds_itself():
        return None
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler at run time, and neither CC, gcc nor clang is there"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton: Debian has none there
    header = Path(sysconfig.get_path("include", scheme), "Python.h")
    if not header.is_file():
        return f"Triton needs Python's C headers at run time, and {header} is not there"
    return None


def _builds_itself() -> bool:
    """Return whether Triton was given a function that compiles C, or is built for Windows."""
    if os.name == "nt":
        return True
    knobs = getattr(sys.modules.get("triton"), "knobs", None)
    return getattr(getattr(knobs, "build", None), "impl", None) is not None


@cache
def _device(kind: str, index: int) -> Target:
    if kind == "xpu":
        return Target("xpu")
    if torch.version.hip is not None:
        return Target("hip", lanes=torch.cuda.get_device_properties(index).warp_size)
    return Target("cuda", torch.cuda.get_device_capability(index))


@cache
def _unfit(kind: str, index: int) -> str | None:
    if not getattr(torch, kind).is_available():  # tensors that hold nothing, as the doctor explains with
        return f"there is no {kind.upper()} device here"
    if kind == "xpu":
        return None
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(index).gcnArchName
        return None if name.startswith(AMD) else f"its kernels are for AMD's {', '.join(AMD)}, and the device is {name}"
    capability = torch.cuda.get_device_capability(index)
    if capability >= OLDEST_CAPABILITY:
        return None
    needed, available = (".".join(map(str, version)) for version in (OLDEST_CAPABILITY, capability))
    return f"Triton needs compute capability {needed}, and the device has {available}"
