"""Shared parts of the stand-in's functions: how they run, and the checks of their arguments."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.arguments import without_autocast
from ..core.onnx_export import untraced

HALVES = (torch.float16, torch.bfloat16)

Function = TypeVar("Function", bound=Callable[..., Any])
OPERATORS: dict[str, Callable[..., Any]] = {}  # what the stand-in offers, by name


def operator(function: Function) -> Function:
    """Offer ``function``, which runs without autograd and autocast, as mmcv's compiled functions do.

    ``torch.jit.trace`` and ONNX's exporter record it as well, unless its caller, an ``autograd.Function``, has a
    ``symbolic``: then that is the node, and PyTorch cannot place what is recorded beside it.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.jit.is_tracing():
            caller = sys._getframe(1).f_locals.get("ctx")
            if hasattr(getattr(caller, "_forward_cls", None), "symbolic"):
                with untraced():
                    return call(*args, **kwargs)
        device_type = next((a.device.type for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), "cpu")
        with torch.no_grad(), without_autocast(device_type):
            return function(*args, **kwargs)

    OPERATORS[function.__name__] = call
    return call  # type: ignore[return-value]


def absent(extension: str, text: str) -> Callable[[str], Callable[..., Any]]:
    """Return a stand-in's ``__getattr__``: functions that it lacks raise NotImplementedError when they are called.

    Args:
        extension: Name of the extension.
        text: The message, with ``{name}`` for that of the function.
    """

    def __getattr__(name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(f"module {extension!r} has no attribute {name!r}")

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(text.format(name=name))

        missing.__name__ = missing.__qualname__ = name
        return missing

    return __getattr__


def write(output: Tensor, result: Tensor) -> None:
    """Write an operator's ``result`` into the ``output`` that its caller gave.

    ``copy_`` returns its tensor: compiled by torch.compile, a function of autograd has that output twice, and passes
    gradients of 0.
    """
    output[...] = result


def widened(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in float32 if it is in half precision."""
    return tensor.float() if tensor.dtype in HALVES else tensor


def check(condition: bool, message: str) -> None:
    """Raise ValueError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


def check_floats(first: str, **tensors: Tensor) -> None:
    """Check that tensors are floating-point and on the device of the one called ``first``."""
    device = tensors[first].device
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be a floating-point Tensor, got {tensor.dtype}")
        check(tensor.device == device, f"{name} must be on {first}'s device {device}, got {tensor.device}")


def check_shape(name: str, tensor: Tensor, *shape: int | str) -> None:
    """Check a shape, whose axes called by a letter may have any size."""
    fits = tensor.dim() == len(shape) and all(
        isinstance(expected, str) or size == expected for size, expected in zip(tensor.shape, shape)
    )
    check(fits, f"{name} must have shape ({', '.join(map(str, shape))}), got {tuple(tensor.shape)}")
