"""Axes of tensors, in ways that every exporter follows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def unflatten(tensor: Tensor, axis: int, sizes: Sequence[int]) -> Tensor:
    """Split an axis, ``tensor.unflatten(axis, sizes)``.

    ``torch.onnx.export(dynamo=False)`` loses track of the sizes beside an unflattened axis: later operations take the
    example's batch size for a constant.
    """
    if not torch.jit.is_tracing():
        return tensor.unflatten(axis, sizes)
    axis %= tensor.dim()
    return tensor.reshape(*tensor.shape[:axis], *sizes, *tensor.shape[axis + 1 :])


def unfold(tensor: Tensor, axis: int, size: int, step: int = 1) -> Tensor:
    """Return all windows of an axis, ``tensor.unfold(axis, size, step)``; exporters know constant sizes alone."""
    if isinstance(size, int) and not torch.jit.is_tracing():
        return tensor.unfold(axis, size, step)
    axis, last = axis % tensor.dim(), tensor.dim() - 1
    first = torch.arange(0, tensor.shape[axis] - size + 1, step, device=tensor.device)
    index = first.unsqueeze(1) + torch.arange(size, device=tensor.device)
    return tensor.movedim(axis, last)[..., index].movedim(last, axis)
