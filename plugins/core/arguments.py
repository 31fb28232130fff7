"""Checks of operators' arguments, made before any kernel runs, and rules for dtypes."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST = 2**31 - 1  # largest option; the product of two fits the kernels' 64-bit indices


def expand(name: str, value: int | Sequence[int], length: int, minimum: int) -> tuple[int, ...]:
    """Return ``value`` as a tuple of ``length`` ints of at least ``minimum``; a single int is repeated."""
    if type(value) is int and minimum <= value <= LARGEST:  # most calls; the rest takes three times as long
        return (value,) * length
    values = tuple(value) if isinstance(value, Sequence) else (value,) * length
    ints = tuple([integer(v) for v in values])
    if len(ints) != length or not all(v is not None and minimum <= v <= LARGEST for v in ints):
        raise ValueError(
            f"{name} must be an int or {length} ints, each at least {minimum} and below 2**31, got {value!r}"
        )
    return ints  # type: ignore[return-value]


def integer(value: Any) -> int | None:
    """Return an int for one of Python or NumPy or for a size, symbolic or traced, and None for anything else."""
    if type(value) is int:
        return value
    if isinstance(value, (numbers.Integral, torch.SymInt)) or (isinstance(value, Tensor) and is_size(value)):
        return int(value)
    return None


def is_size(value: Any) -> bool:
    """Return whether ``value`` is an int or a size, which is a symbol in an export and a Tensor while traced."""
    if isinstance(value, Tensor):
        whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        return whole and value.dim() == 0 and torch.jit.is_tracing()
    return isinstance(value, (int, torch.SymInt))


def as_number(value: Any) -> Any:
    """Return numbers that are computed from sizes as Python's or as symbols, and anything else unchanged.

    While traced, they are Tensors without an axis, of which the trace keeps the number. Those that require a gradient
    stay Tensors, as that would be lost.
    """
    if isinstance(value, torch.SymInt):
        return torch.sym_float(value)
    if isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad and torch.jit.is_tracing():
        return value.item()
    return value


def finite(name: str, value: float) -> float:
    """Return ``value`` as a float; reject tensors, whose gradients would be lost, NaN and infinity."""
    if type(value) is float and -math.inf < value < math.inf:  # most calls
        return value
    value = as_number(value)
    if isinstance(value, torch.SymFloat):
        return value
    if not isinstance(value, (float, int, numbers.Real)):  # Real alone would do, but is slow to check
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not -math.inf < value < math.inf:
        raise ValueError(f"{name} must be a finite number, got {value}")
    return float(value)


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which logits and sums are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def at_least_float32(*tensors: Any) -> Iterator[Any]:
    """Yield half-precision tensors as float32, all else unchanged: no long sum is taken in half precision."""
    return (t.float() if t is not None and t.dtype in (torch.float16, torch.bfloat16) else t for t in tensors)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return autocast's dtype on a device, or None if autocast is off."""
    if device_type == "meta":
        return None
    if hasattr(torch, "get_autocast_dtype"):  # torch >= 2.4
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    if device_type == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Switch autocast off on a device, where it is on."""
    return nullcontext() if autocast_dtype(device_type) is None else torch.autocast(device_type, enabled=False)


def tf32_is_allowed() -> bool:
    """Return whether CUDA may compute products of float32 by TF32, torch's own switch."""
    switches = torch.backends.cuda.matmul
    if hasattr(switches, "fp32_precision"):  # torch 2.9; allow_tf32 cannot be read after this has been set
        return switches.fp32_precision == "tf32"
    return switches.allow_tf32


def in_dtype(
    dtype: torch.dtype, terms: Sequence[Tensor | None], cast: Sequence[bool] | None = None
) -> list[Tensor | None]:
    """Return the terms in autocast's dtype, apart from float64 and those that ``cast`` leaves out."""
    return [
        t if t is None or t.dtype == torch.float64 or (cast is not None and not cast[n]) else t.to(dtype)
        for n, t in enumerate(terms)
    ]


def under_autocast(
    function: Callable[..., Tensor], terms: Sequence[Tensor | None], cast: Sequence[bool] | None = None
) -> Tensor:
    """Return ``function(*terms)``; under autocast, switch it off and cast the terms by :func:`in_dtype` first."""
    device_type = next(term.device.type for term in terms if term is not None)
    dtype = autocast_dtype(device_type)
    if dtype is None:
        return function(*terms)
    with torch.autocast(device_type, enabled=False):
        return function(*in_dtype(dtype, terms, cast))


def check_tensors(first: str, required: Sequence[str] = (), **tensors: Tensor | None) -> None:
    """Check that all tensors are dense and floating-point, with the device and dtype of the one named ``first``.

    Under autocast the dtypes may differ. Tensors not named by ``first`` or ``required`` may be None.
    """
    leader = tensors[first]
    if not isinstance(leader, Tensor):
        raise TypeError(f"{first} must be a Tensor, got {type(leader).__name__}")
    _check_dense(first, leader)
    dtype, device = leader.dtype, leader.device
    for name, tensor in tensors.items():
        if tensor is leader or (tensor is None and name not in required):
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(tensor).__name__}")
        if tensor.dtype != dtype or tensor.layout != torch.strided:  # else it is as the first one is
            _check_dense(name, tensor)
        if tensor.device != device:
            raise ValueError(f"{name} must be on {first}'s device {device}, got {tensor.device}")
        if tensor.dtype != dtype and autocast_dtype(device.type) is None:
            raise TypeError(f"{name} must have {first}'s dtype {dtype}, got {tensor.dtype}")


def _check_dense(name: str, tensor: Tensor) -> None:
    """Check that ``tensor`` is dense and floating-point."""
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense Tensor, got one of layout {tensor.layout}")
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")


def check_padding_mask(mask: Tensor | None, B: int, S: int, device: torch.device, keys: str = "keys") -> None:
    """Check that ``mask`` is None or a bool (B, S) tensor on ``device``; ``keys`` describes S in the message."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = getattr(mask, "dtype", type(mask).__name__)
        raise TypeError(f"key_padding_mask must be a bool Tensor, True for padding, got {kind}")
    if mask.shape != (B, S):
        raise ValueError(f"key_padding_mask must have shape {(B, S)}, batch and {keys}, got {tuple(mask.shape)}")
    if mask.device != device:
        raise ValueError(f"key_padding_mask must be on the keys' device {device}, got {mask.device}")


def broadcasts(tensor: Tensor, shape: Sequence[int], axes: int) -> bool:
    """Return whether ``tensor`` has a shape, or size 1 instead along any of the first ``axes`` axes."""
    if tensor.shape[axes:] != shape[axes:]:
        return False
    for size, expected in zip(tensor.shape[:axes], shape):  # noqa: SIM110  a generator is a call for every axis
        if size != 1 and size != expected:
            return False
    return True


def check_dim(name: str, tensor: Tensor, shape: str) -> None:
    """Check that ``tensor`` has as many axes as ``shape``, such as ``'(B, C, H, W)'``."""
    if tensor.dim() != shape.count(",") + 1:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
