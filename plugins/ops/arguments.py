"""What the operators do with their arguments: checks, one clear error before any kernel runs; and dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def expand(name: str, value: int | Sequence[int], length: int, minimum: int) -> tuple[int, ...]:
    """``value`` or ``length`` values, as a tuple of ints of at least ``minimum``."""
    values = tuple(value) if isinstance(value, Sequence) else (value,) * length
    if len(values) != length or not all(isinstance(v, int) and v >= minimum for v in values):
        raise ValueError(f"{name} must be an int or {length} ints, each at least {minimum}, got {value!r}")
    return values


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of logits and sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def at_least_float32(*tensors: Any) -> Iterator[Any]:
    """Half tensors as float32, None as None: sums of many products are never taken in half precision."""
    return (t.float() if t is not None and t.dtype in (torch.float16, torch.bfloat16) else t for t in tensors)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast asks for on a device, None where it is off."""
    if device_type == "meta":
        return None
    if hasattr(torch, "get_autocast_dtype"):  # torch >= 2.4
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    if device_type == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


def check_tensors(first: str, required: Sequence[str] = (), **tensors: Tensor | None) -> None:
    """Check that all tensors are floating, share the dtype and the device of the one named ``first``.

    Those not named ``first`` or ``required`` may be None.
    """
    leader = tensors[first]
    if not isinstance(leader, Tensor):
        raise TypeError(f"{first} must be a Tensor, got {type(leader).__name__}")
    for name, tensor in {first: leader, **tensors}.items():
        if tensor is None and name not in required:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(tensor).__name__}")
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")
        if tensor.device != leader.device:
            raise ValueError(f"{name} must be on {first}'s device {leader.device}, got {tensor.device}")
        if tensor.dtype != leader.dtype and autocast_dtype(leader.device.type) is None:
            raise TypeError(f"{name} must have {first}'s dtype {leader.dtype}, got {tensor.dtype}")


def check_dim(name: str, tensor: Tensor, shape: str) -> None:
    """Check that ``tensor`` has as many axes as ``shape``, written as ``'(B, C, H, W)'``, names."""
    if tensor.dim() != shape.count(",") + 1:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
