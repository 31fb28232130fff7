"""Argument checks that modules share: one clear error, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..ops.arguments import autocast_dtype


def positive(**numbers: int) -> None:
    """Check that all are ints of at least 1."""
    for name, number in numbers.items():
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be a positive int, got {number!r}")


def pair(name: str, value: int | Sequence[int], minimum: int = 1) -> tuple[int, int]:
    """An int, or two for rows and columns, as two."""
    numbers = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, Sequence) else ()
    if len(numbers) != 2 or not all(isinstance(n, int) and n >= minimum for n in numbers):
        raise ValueError(f"{name} must be an int or two ints, each at least {minimum}, got {value!r}")
    return numbers[0], numbers[1]


def check_fits(name: str, x: Tensor, weight: Tensor) -> None:
    """Check that ``x`` is on ``weight``'s device and of its dtype, which autocast may see to."""
    if x.device != weight.device:
        raise ValueError(f"{name} must be on the module's device {weight.device}, got {x.device}")
    if x.dtype != weight.dtype and not (x.is_floating_point() and autocast_dtype(x.device.type) is not None):
        raise TypeError(f"{name} must have the module's dtype {weight.dtype}, got {x.dtype}")


def check_tensor(name: str, x: object) -> None:
    """Check that ``x`` is a Tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(x).__name__}")


def check_map(x: Tensor, channels: int, weight: Tensor, name: str = "x") -> None:
    """Check that ``x`` is (B, channels, H, W) with a pixel, on ``weight``'s device and of its dtype."""
    check_tensor(name, x)
    if x.dim() != 4 or x.shape[1] != channels or 0 in x.shape[2:]:
        raise ValueError(f"{name} must have shape (B, {channels}, H, W) with at least one pixel, got {tuple(x.shape)}")
    check_fits(name, x, weight)
