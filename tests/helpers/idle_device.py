"""A device of Triton that launches nothing, to test what the host does before a launch, without a GPU.

Triton's binder, cache and launch code run as they are. What it would compile is replaced by its key, a launch by a call
of a function, and tensors of the CPU, of which Triton reads only dtype and address, pass for those of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from attn_plugins.core import backends, plans, triton_launch

_NUMBERS = count(-1, -1)


def new_device() -> Any:
    """Return what Triton asks of a driver before a launch, with a number of its own, which no GPU has."""
    number = next(_NUMBERS)
    return SimpleNamespace(
        get_current_device=lambda: number,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        compiled={},  # variants whose launches are known
        plans={},
    )


@contextmanager
def idle_device(launched: Callable[..., None] = lambda *args: None, device: Any = None) -> Iterator[None]:
    """Let Triton's backend serve tensors of the CPU by launches that do nothing.

    Args:
        launched: Called with what Triton gives a launcher: three sizes of the grid, the stream, (kernel, key) twice,
            three arguments for profilers, then the kernel's arguments and constants.
        device: A :func:`new_device` that remembers the kernels of earlier calls; None for another one.
    """
    device = device or new_device()

    def compile(self: Any, key: Any, signature: Any, number: int, *_: Any) -> CompiledKernel:
        kernel = object.__new__(CompiledKernel)
        kernel.module = kernel.function = kernel.packed_metadata = kernel.name = (self, key)
        kernel.src, kernel._run = None, launched
        self.device_caches[number][0][key] = kernel
        return kernel

    changes = [
        (JITFunction, "_do_compile", compile),
        (driver, "_active", device),
        (torch.cuda, "device_of", lambda tensor: nullcontext()),
        (triton_launch, "refusal", lambda tensor: None),
        (triton_launch, "_compiled", device.compiled),
        (plans, "_plans", device.plans),
    ]
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(backends.backend(triton_launch.NAME))
        yield


@contextmanager
def idle() -> Iterator[Callable[[], int]]:
    """Let Triton's operators launch nothing; give the number of launches so far."""
    launches: list[Any] = []
    with idle_device(lambda *launch: launches.append(None), new_device()):
        yield launches.__len__
