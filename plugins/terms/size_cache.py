"""Cache of tensors that depend only on sizes.

Indices, masks and encodings of positions take many small operations. In a small layer on a GPU their launches take
longer than the attention itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.fx import _symbolic_trace as fx
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

P = ParamSpec("P")
T = TypeVar("T")

ENTRIES = 32  # results kept per function
NUMBERS = (int, float, bool, torch.dtype)

_is_compiling = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling  # torch >= 2.3, or before
_is_fx_tracing = getattr(fx, "is_fx_symbolic_tracing", None) or (lambda: fx._is_fx_tracing_flag)  # newer, or before
_pre_dispatch_modes = getattr(torch._ops, "_len_torch_dispatch_stack_pre_dispatch", int)  # absent in old versions


def cached(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``function`` with its last 32 results kept, by its arguments.

    The kept tensors are shared by all callers: never write to them, nor return them to a user, who might. They are
    made outside of inference mode and autocast, so the first caller's modes do not matter to the next.

    The arguments are numbers, tuples of ints, a dtype, and the device of all tensors in the result. For any other
    argument (symbolic sizes, proxies, no device), on other devices than the CPU and CUDA, and while PyTorch compiles,
    traces, transforms or captures the call, ``function`` runs as if it were not decorated, and nothing is kept.

    Args:
        function: Computes tensors, or a tuple with tensors, from its arguments alone. It must not read the default
            dtype or the default device.
    """

    @functools.lru_cache(ENTRIES, typed=True)
    def kept(stream: int, device: torch.device, /, *arguments: Any, **named: Any) -> T:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
            return function(*arguments, **named)

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> T:
        if _is_compiling():  # first, as dynamo traces what precedes
            return function(*arguments, **named)
        device = _device((*arguments, *named.values()))
        if device is None or _is_observed():
            return function(*arguments, **named)
        stream = 0
        if device.type == "cuda":
            # A graph that is being captured would read a kept tensor's memory after the tensor is dropped.
            if torch.cuda.is_current_stream_capturing():
                return function(*arguments, **named)
            # Another stream could read a tensor before this one has written it.
            stream = torch.cuda.current_stream(device).cuda_stream
        return kept(stream, device, *arguments, **named)  # type: ignore[arg-type]

    vars(call).update(kept=kept)
    return call


def _device(arguments: Iterable[object]) -> torch.device | None:
    """Return the device among arguments that identify a result; None if they do not."""
    device: torch.device | None = None
    for argument in arguments:
        if isinstance(argument, torch.device):
            device = argument
        elif type(argument) is tuple:
            if any(type(n) is not int for n in argument):
                return None
        elif type(argument) not in NUMBERS:
            return None
    if device is None or device.type == "cpu" or (device.type == "cuda" and device.index is not None):
        return device
    return None  # "cuda" without an index is another device after torch.cuda.set_device


def _is_observed() -> bool:
    """Return whether PyTorch traces or transforms this call, or a mode sees its operations."""
    return (
        torch.jit.is_tracing()
        or _is_fx_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or _pre_dispatch_modes() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        # A default device is a mode, too.
        or any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())
    )
