"""Operators under ``torch.vmap``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor


def mapped(
    operator: Any, size: int, in_dims: Sequence[Any], args: Sequence[Any], shared: Collection[int] | None
) -> tuple[Any, Any]:
    """Call an operator for each index of a mapped axis.

    Where all tensors with an axis of images are mapped, with as many images in each, and no other tensor is, one call
    computes the images of all indices. Otherwise each index is a call.

    Args:
        operator: Of ``torch.ops``.
        size: Of the mapped axis.
        in_dims: For each argument, the axis that is mapped; None, or a list of None, where none is.
        args: Arguments of the operator.
        shared: Numbers of the tensors that have no axis of images. None: each index is a call.

    Returns:
        The results, mapped along their first axis, and 0 for each of them.
    """
    over = [isinstance(axis, int) for axis in in_dims]
    args = [arg.movedim(axis, 0) if isinstance(axis, int) else arg for arg, axis in zip(args, in_dims)]
    images = {arg.shape[1] for arg, moved in zip(args, over) if moved and arg.dim() > 2}  # not of an empty result
    single = len(operator._schema.returns) == 1
    if (
        shared is not None
        and len(images) == 1
        and all(moved == (n not in shared) for n, moved in enumerate(over) if isinstance(args[n], Tensor))
    ):
        results = operator(*(arg.flatten(0, 1) if moved else arg for arg, moved in zip(args, over)))
        results = [
            result.unflatten(0, (size, *images)) if result.dim() > 1 else result.new_empty(size, 0)  # not needed
            for result in ([results] if single else results)
        ]
    else:
        if size == 0:  # one call tells the shapes, and has the history that gradients take
            args = [torch.cat((arg, arg.new_zeros(1, *arg.shape[1:]))) if m else arg for arg, m in zip(args, over)]
        calls = [operator(*(arg[n] if moved else arg for arg, moved in zip(args, over))) for n in range(max(1, size))]
        results = [torch.stack(parts)[:size] for parts in zip(*([call] if single else call for call in calls))]
    return (results[0], 0) if single else (tuple(results), (0,) * len(results))
