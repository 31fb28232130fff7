"""Strides of tensors, as kernels read them."""

from __future__ import annotations

from typing import TypeVar

import torch
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


def memory_format(like: Tensor) -> torch.memory_format:
    """Return channels-last if (B, C, H, W) is that and not contiguous as well, as with C = 1 or H = W = 1.

    Nothing else decides it, but for ``is_channels_last`` of ``csrc/common/tensor_ops.h``, which is the same rule.
    """
    if not like.is_contiguous() and like.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format
