"""Argument checks that modules share: a clear error before any computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from torch import Tensor, nn

from ...core.arguments import autocast_dtype, check_padding_mask
from .bypass import untouched

__all__ = [
    "check_convolved",
    "check_fits",
    "check_heads",
    "check_map",
    "check_padding_mask",
    "check_range",
    "check_sequence",
    "check_source",
    "check_table_size",
    "check_tensor",
    "check_window",
    "odd_pair",
    "one_of",
    "pair",
    "positive",
]

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def one_of(kind: Any, **choices: str) -> None:
    """Check that all ``choices`` are among the strings of ``kind``, a ``Literal``."""
    for name, choice in choices.items():
        if choice not in get_args(kind):
            raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {choice!r}")


def positive(**numbers: int) -> None:
    """Check that all ``numbers`` are ints of at least 1."""
    for name, number in numbers.items():
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be a positive int, got {number!r}")


def pair(name: str, value: int | Sequence[int], minimum: int = 1) -> tuple[int, int]:
    """Return an int twice, or two ints as a tuple, for rows and columns."""
    numbers = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, Sequence) else ()
    if len(numbers) != 2 or not all(isinstance(n, int) and n >= minimum for n in numbers):
        raise ValueError(f"{name} must be an int or two ints, each at least {minimum}, got {value!r}")
    return numbers[0], numbers[1]


def odd_pair(name: str, value: int | Sequence[int]) -> tuple[int, int]:
    """Return :func:`pair` of odd ints."""
    numbers = pair(name, value)
    if any(n % 2 == 0 for n in numbers):
        raise ValueError(f"{name} must be odd, got {value!r}")
    return numbers


def check_range(name: str, n_k: int) -> None:
    """Check that a range of keys is odd, or -1 for all keys."""
    if not isinstance(n_k, int) or (n_k != -1 and (n_k < 1 or n_k % 2 == 0)):
        raise ValueError(f"{name} must be -1 (all keys) or a positive odd int (n_k), got {n_k!r}")


def _own_weight(child: nn.Module | Tensor) -> Tensor | None:
    """Return the weight that a layer computes with, or None if only a call of the layer can tell.

    Quantized, offloaded, adapted or sharded layers may have no weight before they are called, or one of another dtype.
    """
    weight: Any = child
    if isinstance(child, nn.Module):
        if not untouched(child, type(child)):
            return None
        if isinstance(child, nn.Sequential):
            return _own_weight(child[0]) if len(child) else None
        if type(child) not in LAYERS:
            return None
        weight = child.weight
    plain = type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point() and weight.device.type != "meta"
    return weight if plain else None


def check_fits(name: str, x: Tensor, child: nn.Module | Tensor, owner: str = "module") -> None:
    """Check that ``x`` has the device and the dtype of a parameter, or of a child's weight if that is plain.

    Under autocast the dtype may differ.
    """
    weight = _own_weight(child)
    if weight is None:
        return
    if x.device != weight.device:
        raise ValueError(f"{name} must be on the {owner}'s device {weight.device}, got {x.device}")
    if x.dtype != weight.dtype and not (x.is_floating_point() and autocast_dtype(x.device.type) is not None):
        raise TypeError(f"{name} must have the {owner}'s dtype {weight.dtype}, got {x.dtype}")


def check_tensor(name: str, x: object) -> None:
    """Check that ``x`` is a Tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(x).__name__}")


def check_heads(embed_dim: int, num_heads: int, dropout: float) -> None:
    """Check the arguments shared by all attention modules on sequences."""
    positive(embed_dim=embed_dim, num_heads=num_heads)
    if embed_dim % num_heads:
        raise ValueError(f"num_heads must divide embed_dim = {embed_dim}, got {num_heads}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout!r}")


def check_sequence(name: str, x: Tensor, channels: int, child: nn.Module | Tensor, batch: int | None = None) -> None:
    """Check that ``x`` is (B, T, channels) with T > 0, and :func:`fits <check_fits>` ``child``."""
    check_tensor(name, x)
    if x.dim() != 3 or x.shape[2] != channels or x.shape[1] == 0:
        raise ValueError(f"{name} must have shape (B, T, {channels}) with at least one token, got {tuple(x.shape)}")
    if batch is not None and x.shape[0] != batch:
        raise ValueError(f"{name} must have query's batch size {batch}, got {x.shape[0]}")
    check_fits(name, x, child)


def check_source(name: str, x: Tensor, channels: int, batch: int, child: nn.Module | Tensor) -> None:
    """Check that ``x`` is (batch, S, channels) with S > 0, and :func:`fits <check_fits>` ``child``."""
    check_tensor(name, x)
    if x.dim() != 3 or x.shape[0] != batch or x.shape[1] == 0 or x.shape[2] != channels:
        raise ValueError(f"{name} must have shape ({batch}, S, {channels}) with S > 0, got {tuple(x.shape)}")
    check_fits(name, x, child)


def check_map(x: Tensor, channels: int, child: nn.Module | Tensor, name: str = "x") -> None:
    """Check that ``x`` is a non-empty (B, channels, H, W), and :func:`fits <check_fits>` ``child``."""
    check_tensor(name, x)
    if x.dim() != 4 or x.shape[1] != channels or 0 in x.shape[2:]:
        raise ValueError(f"{name} must have shape (B, {channels}, H, W) with at least one pixel, got {tuple(x.shape)}")
    check_fits(name, x, child)


def check_window(
    name: str, x: Tensor, kernel_size: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> None:
    """Check that a window fits on the padded map ``x``, (B, C, H, W)."""
    sizes = zip(x.shape[2:], kernel_size, padding, dilation)
    if any(size + 2 * p <= d * (k - 1) for size, k, p, d in sizes):
        raise ValueError(
            f"{name} is too small: {tuple(x.shape[2:])} with padding {tuple(padding)} has no room for a kernel of "
            f"{tuple(kernel_size)} with dilation {tuple(dilation)}"
        )


def check_table_size(x: Tensor, made: tuple[int, int], size: tuple[int, int], input_size: tuple[int, int]) -> None:
    """Check that relative tables were ``made`` for a map of ``size``."""
    if made != size:
        raise ValueError(
            f"x of size {tuple(x.shape[2:])} attends on a {size} map, but the relative tables are made for {made} "
            f"(input_size={input_size}): use inputs of that size or resize_tables=True"
        )


def check_convolved(
    x: Tensor,
    channels: int,
    weight: Tensor,
    kernel_size: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> None:
    """Check a convolution's input, with clearer messages than those of the stock convolution."""
    check_tensor("input", x)
    axes = ("L",) if len(kernel_size) == 1 else ("H", "W")
    if x.dim() != 2 + len(axes) or x.shape[1] != channels:
        raise ValueError(f"input must have shape (B, C, {', '.join(axes)}) with C = {channels}, got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"input must be floating-point, got {x.dtype}")
    check_fits("input", x, weight, "weight")
    check_window("input", x, kernel_size, padding, dilation)
