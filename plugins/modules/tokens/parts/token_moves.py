"""Rearrangements of tokens that take one copy forward and one backward, differentiable to any order.

Shapes: R tokens in sequence, C channels, n windows, N tokens of a window, M heads, d width per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....core.gradients import is_batched_gradient, transformed


def reorder(tokens: Tensor, order: Tensor, back: Tensor | None = None) -> Tensor:
    """Permute tokens.

    Args:
        tokens: (R, C).
        order: (R,), a permutation of 0 ... R - 1: the source of each token.
        back: (R,), the inverse permutation; None to compute it where a gradient needs it.

    Returns:
        (R, C), contiguous.
    """
    if not _differentiates(tokens):
        return tokens.index_select(0, order)
    return _Reorder.apply(tokens, order, inverse(order) if back is None else back)


def _differentiates(*tensors: Tensor) -> bool:
    """Return whether a function of this file computes the gradient; ``torch.jit`` and ``torch.func`` take none."""
    if not torch.is_grad_enabled() or torch.jit.is_tracing() or transformed():
        return False
    return any(t.requires_grad for t in tensors)


def inverse(order: Tensor) -> Tensor:
    """Return the inverse permutation, (R,)."""
    places = torch.arange(order.shape[0], device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


class _Reorder(torch.autograd.Function):
    """A gather by a permutation, whose gradient is a gather as well instead of a scatter-add."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(order, back)
        return tokens.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        order, back = ctx.saved_tensors
        return reorder(grad, back, order), None, None


def grouped_qkv(projected: Tensor, sizes: Sequence[int], num_heads: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Split the projection of windows into groups, and each into queries, keys and values of heads.

    Args:
        projected: (n, N, 3 * M * d), queries, keys and values in this order.
        sizes: Number of windows in each group; their sum is n.
        num_heads: M.

    Returns:
        Three views (size, M, N, d) for each group.
    """
    if _differentiates(projected):
        views = _GroupedQKV.apply(projected, list(sizes), num_heads)
    else:
        views = _views(projected, sizes, num_heads)
    return [(views[i], views[i + 1], views[i + 2]) for i in range(0, len(views), 3)]


def _views(projected: Tensor, sizes: Sequence[int], num_heads: int) -> tuple[Tensor, ...]:
    n, N, C = projected.shape
    heads = projected.view(n, N, 3, num_heads, C // (3 * num_heads)).permute(2, 0, 3, 1, 4)
    return tuple(view for part in heads.split(list(sizes), 1) for view in part.unbind(0))


class _GroupedQKV(torch.autograd.Function):
    """The views of :func:`grouped_qkv`, with their gradients written into one tensor."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, sizes: list[int], num_heads: int) -> tuple[Tensor, ...]:
        ctx.sizes, ctx.num_heads = sizes, num_heads
        return _views(projected, sizes, num_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        join = _JoinedQKV.apply if _differentiates(*grads) else _joined
        return join(ctx.sizes, ctx.num_heads, *grads), None, None


def _joined(sizes: Sequence[int], num_heads: int, *parts: Tensor) -> Tensor:
    """Return the (n, N, 3 * M * d) whose :func:`_views` are ``parts``."""
    _, _, N, d = parts[0].shape
    shape = (sum(sizes), N, 3 * num_heads * d)
    if transformed() or any(map(is_batched_gradient, parts)):  # which cannot be written to a tensor made here
        heads = torch.cat([torch.stack(parts[i : i + 3]) for i in range(0, len(parts), 3)], 1)
        return heads.permute(1, 3, 0, 2, 4).reshape(shape)
    joined = parts[0].new_empty(shape)
    for view, part in zip(_views(joined, sizes, num_heads), parts):
        view.copy_(part)
    return joined


class _JoinedQKV(torch.autograd.Function):
    """The transpose of :class:`_GroupedQKV`."""

    @staticmethod
    def forward(ctx: Any, sizes: list[int], num_heads: int, *parts: Tensor) -> Tensor:
        ctx.sizes, ctx.num_heads = sizes, num_heads
        return _joined(sizes, num_heads, *parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        split = _GroupedQKV.apply if _differentiates(grad) else _views
        return None, None, *split(grad, ctx.sizes, ctx.num_heads)
