"""Strides of tensors, as kernels read them."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

T = TypeVar("T", Tensor, "Tensor | None")


def has_rows(tensor: Tensor) -> bool:
    """Return whether the last axis is contiguous."""
    return tensor.stride(-1) == 1 or tensor.shape[-1] == 1


def with_rows(tensor: T) -> T:
    """Return ``tensor``, or a copy where its last axis is not contiguous; None for None."""
    if tensor is None or tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    return tensor.contiguous()


def strides(tensor: Tensor | None, axes: int = 4) -> tuple[int, ...]:
    """Return the strides of the first ``axes`` axes; 0 along axes of size 1, and for None."""
    if tensor is None:
        return (0,) * axes
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape[:axes], tensor.stride()))
