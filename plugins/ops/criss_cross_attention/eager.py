"""Criss-cross attention as batched matrix products, for every device; ``cpu.py`` calls it with products of its own.

The queries of a column share their keys, so the logits of a column are one H x H product, and those of a row one W x W
product. Both read strided views: nothing is gathered, transposed or concatenated. A query's logits lie side by side in
one scratch tensor, the column's before the row's, and one in-place softmax turns them into weights.

The backward reads the weights that the forward kept. Recomputing them takes a twelfth of the time (6 of 81 ms at
97 x 97, d 64, dv 512) and frees 7.5 of the 30.5 MiB kept between the passes, but does not lower the peak, which is in
the backward. They are recomputed only if Triton's kernels were selected.

Shapes: B batch, M heads, (H, W) the map, d and dv widths per head, S the padded length of a query's logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise, permutations, product

import torch
from torch import Tensor

from ...core.arguments import arithmetic_dtype
from ...core.backends import Backend, Gradients, never
from ...core.gradients import needed
from ...core.transposition import channels_innermost
from .operands import Options, Terms

_ALIGNMENT = 8  # elements to which both parts of a query's logits are padded: tensor cores read halves by 16 bytes
_MIXES = hasattr(torch.ops.aten.baddbmm, "dtype_out")  # half-precision operands, float32 results: torch >= 2.8, CUDA


def aligned(size: int) -> int:
    return (size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


def _operand_dtype(value: Tensor) -> torch.dtype:
    """Return the dtype that the products read."""
    return value.dtype if value.is_cuda and _MIXES else arithmetic_dtype(value.dtype)


def empty(like: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialized (B, M, H, W, width), stored as (B, H, W, M, width) for the projection that follows.

    It is not a view: callers may modify it in place where no backward needs it.
    """
    B, M, H, W, _ = like.shape
    strides = (H * W * M * width, width, W * M * width, M * width, 1)
    return like.new_empty_strided((B, M, H, W, width), strides, dtype=dtype)


def empty_results(terms: Terms, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized output, weights and log-sum-exp; the one of the latter that is not kept is empty."""
    value = terms.value
    output = empty(value, value.shape[4])
    if options.recompute:
        return output, value.new_empty(0), value.new_empty(value.shape[:4], dtype=arithmetic_dtype(value.dtype))
    return output, scratch_of_weights(value, value.dtype), value.new_empty(0)


def empty_gradient(term: Tensor) -> Tensor:
    """Return an uninitialized gradient, in its term's layout if the last axis of that is contiguous."""
    if term.stride(-1) == 1:
        gradient = torch.empty_like(term)
        if gradient.stride(-1) == 1:  # it is not for some overlapping views
            return gradient
    return empty(term, term.shape[-1])


def heads_innermost(tensor: Tensor) -> Tensor:
    """Return a (B, M, H, W, x) tensor as (B, H, W, M, x), the order in which :func:`empty` stores it."""
    return tensor.permute(0, 2, 3, 1, 4)


def packed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor`` in ``dtype`` with a contiguous last axis, copied only if necessary."""
    if tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    if tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    return channels_innermost(tensor)


def _columns(tensor: Tensor) -> Tensor:
    """Return (B, M, H, W, x) as one matrix per column, (B, M, W, H, x)."""
    return tensor.transpose(2, 3)


def _parts(logits: Tensor, H: int, W: int) -> tuple[Tensor, Tensor]:
    """Split (B, M, H, W, S) into the columns' logits (B, M, W, H, H) and the rows' (B, M, H, W, W)."""
    start = aligned(H)
    return _columns(logits[..., :H]), logits[..., start : start + W]


def _fill_padding(logits: Tensor, H: int, W: int, number: float) -> None:
    start = aligned(H)
    if start > H:
        logits[..., H:start].fill_(number)
    if logits.shape[-1] > start + W:
        logits[..., start + W :].fill_(number)


Strides = tuple[int, ...]
Multiply = Callable[..., None]  # as `multiply`


def _merged_axes(sizes: tuple[int, ...], strides: tuple[Strides, ...]) -> tuple[int, ...]:
    """Return the batch axes, in memory order, that can be merged in all tensors: those with the most items."""
    axes = [n for n in range(3) if sizes[n] > 1] or [2]

    def merge(order: tuple[int, ...]) -> bool:
        return all(s[outer] == s[inner] * sizes[inner] for s in strides for outer, inner in pairwise(order))

    orders = [order for length in range(1, len(axes) + 1) for order in permutations(axes, length) if merge(order)]
    return max(orders, key=lambda order: math.prod(sizes[n] for n in order))


@lru_cache(maxsize=1024)
def _views(sizes: tuple[int, ...], strides: tuple[Strides, ...]) -> tuple[int, list[Strides], list[Strides]]:
    """Return the matrices of a batch, the strides of each tensor's batches, and the tensors' offsets of each batch."""
    merged = _merged_axes(sizes, strides)
    rest = [n for n in range(3) if n not in merged]
    indices = product(*(range(sizes[n]) for n in rest))
    offsets = [tuple(sum(i * s[n] for i, n in zip(index, rest)) for s in strides) for index in indices]
    return math.prod(sizes[n] for n in merged), [(s[merged[-1]], *s[3:]) for s in strides], offsets


def _batches(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """Yield (batch, rows, columns) views of (B, M, N, rows, columns) tensors, as few as their strides allow."""
    count, strides, offsets = _views(tuple(tensors[0].shape[:3]), tuple([t.stride() for t in tensors]))
    views = [(t, (count, *t.shape[3:]), stride, t.storage_offset()) for t, stride in zip(tensors, strides)]
    for steps in offsets:
        yield [t.as_strided(shape, stride, start + step) for (t, shape, stride, start), step in zip(views, steps)]


def multiply(result: Tensor, left: Tensor, right: Tensor, *, add: bool = False, scale: float = 1.0) -> None:
    """Set ``result`` to scale * left @ right, or add the product to it; all are (B, M, N, rows, columns)."""
    if scale == 0 and not add:  # torch's product for ARM keeps NaN of an uninitialized result
        result.zero_()
        return
    beta = 1 if add else 0
    for c, a, b in _batches(result, left, right):
        if a.dtype == c.dtype:
            c.baddbmm_(a, b, beta=beta, alpha=scale)
        else:
            torch.ops.aten.baddbmm.dtype_out(c, a, b, c.dtype, beta=beta, alpha=scale, out=c)


def _write_weights(
    multiply: Multiply,
    query: Tensor | None,
    key: Tensor | None,
    position_logits: Tensor | None,
    scale: float,
    logits: Tensor,
    log_sum_exp: Tensor | None = None,
) -> None:
    """Fill ``logits`` (B, M, H, W, S) with the softmax over each query's keys, 0 for fully masked queries.

    Fill ``log_sum_exp`` (B, M, H, W), unless it is None; it is +inf for fully masked queries.
    """
    H, W = logits.shape[2:4]
    column, row = _parts(logits, H, W)
    _fill_padding(logits, H, W, float("-inf"))
    if position_logits is not None:
        column.copy_(_columns(position_logits[..., :H]))
        row.copy_(position_logits[..., H:])
    if query is not None and key is not None:
        add = position_logits is not None
        multiply(column, _columns(query), _columns(key).mT, add=add, scale=scale)
        multiply(row, query, key.mT, add=add, scale=scale)
    column.diagonal(dim1=3, dim2=4).fill_(float("-inf"))  # a query's own position counts in the row
    scratch = heads_innermost(logits)
    masked = None
    if position_logits is not None:
        masked = scratch.amax(-1, keepdim=True) == float("-inf")
    if log_sum_exp is not None:
        log_sum_exp.copy_(logits.logsumexp(-1))
        log_sum_exp.masked_fill_(log_sum_exp == float("-inf"), float("inf"))
    torch.softmax(scratch, -1, out=scratch)
    if masked is not None:
        scratch.masked_fill_(masked, 0)


def _mix(multiply: Multiply, result: Tensor, column: Tensor, row: Tensor, tensor: Tensor, scale: float = 1.0) -> None:
    """Set ``result`` to the sum of both parts' products with ``tensor``; both are (B, M, H, W, x)."""
    total = result if result.dtype == tensor.dtype else torch.empty_like(result, dtype=tensor.dtype)
    multiply(_columns(total), column, _columns(tensor), scale=scale)
    multiply(total, row, tensor, add=True, scale=scale)
    if total is not result:
        result.copy_(total)


def scratch_of_weights(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an uninitialized (B, M, H, W, S) tensor for logits or weights."""
    H, W = value.shape[2:4]
    return empty(value, aligned(H) + aligned(W), dtype)


def forward(terms: Terms, options: Options, multiply: Multiply = multiply) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output (B, M, H, W, dv), and the weights (B, M, H, W, S) or the log-sum-exp (B, M, H, W)."""
    output, kept_weights, log_sum_exp = empty_results(terms, options)
    H, W = output.shape[2:4]
    dtype, arithmetic = _operand_dtype(terms[2]), arithmetic_dtype(terms[2].dtype)
    query, key, value = (None if t is None else packed(t, dtype) for t in terms[:3])
    assert value is not None
    weights = scratch_of_weights(value, terms[2].dtype) if options.recompute else kept_weights
    logits = weights if weights.dtype == arithmetic else torch.empty_like(weights, dtype=arithmetic)
    _write_weights(multiply, query, key, terms[3], options.scale, logits, log_sum_exp if options.recompute else None)
    if logits is not weights:
        weights.copy_(logits)
    _mix(multiply, output, *_parts(weights if weights.dtype == dtype else logits, H, W), value)
    return output, kept_weights, log_sum_exp


def backward(
    grad_output: Tensor,
    terms: Terms,
    options: Options,
    output: Tensor | None,
    weights: Tensor,
    log_sum_exp: Tensor,
    needs: dict[str, bool],
    multiply: Multiply = multiply,
) -> Gradients:
    """Return the gradients that are needed."""
    H, W = terms[2].shape[2:4]
    dtype, arithmetic = _operand_dtype(terms[2]), arithmetic_dtype(terms[2].dtype)
    query, key, value, gradient = (None if t is None else packed(t, dtype) for t in (*terms[:3], grad_output))
    assert value is not None
    assert gradient is not None
    grads: Gradients = {name: empty_gradient(term) for name, term in needed(terms, needs)}
    grad_query, grad_key, grad_value, grad_position = map(grads.get, terms._fields)
    if options.recompute:
        weights = scratch_of_weights(value, arithmetic)
        _write_weights(multiply, query, key, terms[3], options.scale, weights)
    weights_read = weights.to(dtype)
    if grad_value is not None:
        column, row = _parts(weights_read, H, W)
        _mix(multiply, grad_value, column.mT, row.mT, gradient)
    if grad_query is None and grad_key is None and grad_position is None:
        return grads
    slopes = scratch_of_weights(value, arithmetic)  # softmax's backward writes in this order alone
    _fill_padding(slopes, H, W, 0)
    column, row = _parts(slopes, H, W)
    multiply(column, _columns(gradient), _columns(value).mT)
    multiply(row, gradient, value.mT)
    scratch, probabilities = heads_innermost(slopes), heads_innermost(weights.to(arithmetic))
    if weights.dtype != arithmetic:  # rounded weights do not sum to 1
        probabilities = probabilities / probabilities.sum(-1, keepdim=True).clamp_min_(torch.finfo(arithmetic).tiny)
    torch.ops.aten._softmax_backward_data.out(scratch, probabilities, -1, arithmetic, grad_input=scratch)
    if grad_position is not None:
        shape = (*grad_position.shape[:4], H)
        grad_position[..., :H] = _columns(column).sum_to_size(shape)
        grad_position[..., H:] = row.sum_to_size((*shape[:4], W))
    column, row = _parts(slopes.to(dtype), H, W)
    if grad_query is not None and key is not None:
        _mix(multiply, grad_query, column, row, key, options.scale)
    if grad_key is not None and query is not None:
        _mix(multiply, grad_key, column.mT, row.mT, query, options.scale)
    return grads


BACKEND = Backend("eager", never, forward, backward)
