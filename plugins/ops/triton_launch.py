"""Triton's place among the backends: where its kernels run, how they are launched, what they are compiled for.

A room's kernels lie in a file of their own, ``triton_*_kernels.py``, which imports ``triton`` and is imported by the
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
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import backends

NAME = "triton"
OLDEST_CAPABILITY = (8, 0)  # of the devices that Triton compiles for
LONGEST_GRID = 2**31 - 1


class Launch(NamedTuple):
    """A launch that :func:`recorded` kept instead of doing it.

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


_recording: list[Launch] | None = None
_recorded_capability = OLDEST_CAPABILITY


@contextlib.contextmanager
def recorded(capability: tuple[int, int] = OLDEST_CAPABILITY) -> Iterator[list[Launch]]:
    """Keep launches in a list instead of doing them: which variants of kernels a call needs, without a device.

    Args:
        capability: Of the device that tiles are chosen for.
    """
    global _recording, _recorded_capability
    before = _recording, _recorded_capability
    _recording, _recorded_capability = [], capability
    try:
        yield _recording
    finally:
        _recording, _recorded_capability = before


def recording() -> bool:
    """Return True within :func:`recorded`, where a kernel's results are not written."""
    return _recording is not None


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def refusal(tensor: Tensor) -> str | None:
    """Return the reason why Triton's kernels do not take ``tensor``, whatever its shape, or None.

    Tensors of the CPU are taken by the interpreter, and tensors of no device while launches are recorded, but only
    where :func:`.backend` asks for it.
    """
    if backends.forced() == NAME and (recording() or (tensor.device.type == "cpu" and interpreted())):
        return _missing()
    if not tensor.is_cuda:
        return f"its kernels are for CUDA, and the tensors are on {tensor.device.type}"
    if tensor.dtype == torch.float64:
        return "its kernels take no float64"
    return _missing() or _no_compiler() or _too_old(tensor.device.index or 0)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run ``kernel`` on the device of its first argument, a tensor; an empty grid runs nothing."""
    if _recording is not None:
        _recording.append(Launch(kernel, grid, args, constants))
    elif all(grid):
        with torch.cuda.device_of(args[0]):
            kernel[grid](*args, **constants)


def precision(dtype: torch.dtype) -> str:
    """How ``tl.dot`` multiplies float32; half numbers have one way alone.

    By TF32 where torch's own switch allows it, else by three products of TF32, whose sum is about as exact as float32
    and, on tensor cores, several times as fast as products of float32. So does PyTorch's fused attention.
    """
    if dtype != torch.float32:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def upcast(dtype: torch.dtype) -> bool:
    """Whether operands of ``tl.dot`` must become float32 first: the interpreter cannot multiply bfloat16."""
    return interpreted() and dtype == torch.bfloat16


def factors_in_shared_memory(tensor: Tensor) -> bool:
    """Return True where tensor cores read factors from shared memory (9.0 to 11.x); elsewhere they take registers."""
    capability = _capability(tensor.device.index or 0) if tensor.is_cuda else _recorded_capability
    return 9 <= capability[0] < 12


def hopper(tensor: Tensor) -> bool:
    """Return True on devices of capability 9.x, whose tiles were chosen by times; those of others, by registers."""
    capability = _capability(tensor.device.index or 0) if tensor.is_cuda else _recorded_capability
    return capability[0] == 9


def power_of_two(size: int, smallest: int = 16) -> int:
    """Return the lowest power of two not below ``size`` and ``smallest``; ``tl.dot`` takes 16 and more."""
    return max(smallest, 1 << max(0, size - 1).bit_length())


@cache
def _missing() -> str | None:
    return None if find_spec("triton") else "Triton is not installed; torch's CUDA builds for Linux bring it"


@cache
def _no_compiler() -> str | None:
    """Triton compiles the code that launches a kernel by a C compiler."""
    if interpreted() or os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"):
        return None
    return "Triton needs a C compiler at run time, and neither CC, gcc nor clang is there"


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@cache
def _too_old(index: int) -> str | None:
    if not torch.cuda.is_available():  # tensors that hold nothing, as the doctor explains with
        return "there is no CUDA device here"
    capability = torch.cuda.get_device_capability(index)
    if capability >= OLDEST_CAPABILITY:
        return None
    needed, found = (".".join(map(str, each)) for each in (OLDEST_CAPABILITY, capability))
    return f"Triton needs compute capability {needed}, and the device has {found}"
