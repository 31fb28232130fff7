"""Window attention in plain PyTorch, tap by tap, for devices without a kernel.

Each tap pairs one slice of the queries with one slice of the keys, so nothing is unfolded; the weights of all taps are
stored. Where windows stay inside the map, it pairs several, one for each distance from its queries. No sum depends on
the order in which threads run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.arguments import arithmetic_dtype
from ...core.attention import empty_results
from ...core.backends import Backend, Gradients, never
from ...core.gradients import like_terms, needed
from ...core.softmax import softmax_
from .operands import Options, Terms

Slices = tuple[slice, slice]


class Inside(NamedTuple):
    """Keys of a tap of windows inside the map: along both axes, queries and their keys, in the order of queries."""

    rows: Sequence[Slices]
    columns: Sequence[Slices]


def _axis(queries: int, keys: int, stride: int, start: int) -> Slices:
    """Return the queries whose key, query * stride + start, is inside the map, and these keys."""
    first = max(0, -(start // stride))
    last = min(queries, (keys - 1 - start) // stride + 1)
    if last <= first:
        return slice(0, 0), slice(0, 0)
    return slice(first, last), slice(first * stride + start, (last - 1) * stride + start + 1, stride)


def _inside(size: int, kernel: int, step: int, tap: int) -> Sequence[Slices]:
    above, below = kernel // 2, (kernel - 1) // 2
    before = [(n * step, (n + 1) * step, (tap - n) * step) for n in range(above)]
    after = [(size - (n + 1) * step, size - n * step, (tap + n + 1 - kernel) * step) for n in reversed(range(below))]
    runs = *before, (above * step, size - below * step, (tap - above) * step), *after
    return [(slice(first, end), slice(first + shift, end + shift)) for first, end, shift in runs]


def taps(grid: Sequence[int], size: Sequence[int], options: Options) -> Iterator[tuple[int, tuple, tuple]]:
    """Yield each tap that has keys inside the map, the index of its queries and that of their keys."""
    kernel, stride, padding, dilation, *_ = options
    for t in range(kernel[0] * kernel[1]):
        tap = t // kernel[1], t % kernel[1]
        if options.border == "inside":
            yield t, (...,), Inside(*(_inside(size[n], kernel[n], dilation[n], tap[n]) for n in range(2)))
            continue
        rows, columns = (_axis(grid[n], size[n], stride[n], tap[n] * dilation[n] - padding[n]) for n in range(2))
        if rows[0].stop and columns[0].stop:
            yield t, (..., rows[0], columns[0], slice(None)), (..., rows[1], columns[1], slice(None))


def at(tensor: Tensor, keys: tuple) -> Tensor:
    """Return the tap's key of each of its queries."""
    if not isinstance(keys, Inside):
        return tensor[keys]
    lines = torch.cat([tensor[..., of, :, :] for _, of in keys.rows], -3)
    return torch.cat([lines[..., of, :] for _, of in keys.columns], -2)


def add(tensor: Tensor, keys: tuple, parts: Tensor) -> None:
    """Add what the tap's queries have for their keys."""
    if not isinstance(keys, Inside):
        tensor[keys] += parts
        return
    lines = parts.new_zeros(*parts.shape[:3], *tensor.shape[3:])
    for queries, of in keys.columns:
        lines[..., of, :] += parts[..., queries, :]
    for queries, of in keys.rows:
        tensor[..., of, :, :] += lines[..., queries, :, :]


def _logits(terms: Terms, options: Options, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the logits (B, M, Hq, Wq, taps), -inf outside the map unless the border counts as zeros."""
    query, key, value, position_logits = terms
    number = options.kernel_size[0] * options.kernel_size[1]
    start = 0.0 if options.border == "zero" else float("-inf")
    logits = value.new_full((*shape, number), start, dtype=dtype)
    if options.border == "zero" and position_logits is not None:
        logits += position_logits
    for t, queries, keys in taps(shape[2:], value.shape[2:4], options):
        part = logits[queries][..., t]
        if options.border != "zero":
            part.zero_()
            if position_logits is not None:
                part += position_logits[queries][..., t]
        if query is not None and key is not None:
            part += (query[queries].to(dtype) * at(key, keys).to(dtype)).sum(-1) * options.scale
    return logits


def forward(terms: Terms, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output (B, M, Hq, Wq, dv) and the log-sum-exp (B, M, Hq, Wq), +inf where all keys are masked."""
    value, dtype, grid = terms.value, arithmetic_dtype(terms.value.dtype), terms.grid()
    weights = _logits(terms, options, (*value.shape[:2], *grid), dtype)
    lse = softmax_(weights)
    total = empty_results(value, *grid, dtype=dtype)[0].zero_()
    for t, queries, keys in taps(grid, value.shape[2:4], options):
        total[queries] += weights[queries][..., t, None] * at(value, keys)
    return total.to(value.dtype), lse


def backward(
    grad_output: Tensor, terms: Terms, options: Options, output: Tensor, lse: Tensor, needs: dict[str, bool]
) -> Gradients:
    """Return the gradients that are needed."""
    query, key, value, _ = terms
    dtype, grid, size = lse.dtype, lse.shape[2:], value.shape[2:4]
    weights = _logits(terms, options, lse.shape, dtype)
    softmax_(weights)
    slopes = torch.zeros_like(weights)
    gradient = grad_output.to(dtype)
    for t, queries, keys in taps(grid, size, options):
        slopes[queries][..., t] = (gradient[queries] * at(value, keys)).sum(-1)
    slopes = weights * (slopes - (weights * slopes).sum(-1, keepdim=True))
    sums = {name: torch.zeros_like(term, dtype=dtype) for name, term in needed(terms, needs)}
    grad_query, grad_key, grad_value = map(sums.get, ("query", "key", "value"))
    if needs["position_logits"]:
        sums["position_logits"] = slopes
    for t, queries, keys in taps(grid, size, options):
        if grad_value is not None:
            add(grad_value, keys, weights[queries][..., t, None] * gradient[queries])
        slope = slopes[queries][..., t, None] * options.scale
        if grad_query is not None and key is not None:
            grad_query[queries] += slope * at(key, keys)
        if grad_key is not None and query is not None:
            add(grad_key, keys, slope * query[queries])
    return like_terms(terms, dict(sums))


BACKEND = Backend("eager", never, forward, backward)
