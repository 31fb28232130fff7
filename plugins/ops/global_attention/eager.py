"""Global attention in plain PyTorch, chunk by chunk, for devices and widths that no other backend supports.

Only one chunk's logits are in memory at a time, so memory is O(N).

Shapes: B batch, M heads, (Hq, Wq) queries, (Hk, Wk) keys, d and dv widths; (b, h, w) a chunk's slices of
batch, query rows and query columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.arguments import arithmetic_dtype
from ...core.attention import empty_results
from ...core.backends import Backend, Gradients, never
from ...core.chunks import WORKSPACE, add_chunk, chunks
from ...core.gradients import like_terms, needed
from ...core.softmax import softmax_
from .operands import Options, Terms


class Problem:
    """Arguments of one call, in the dtype of the arithmetic, and the attention weights of a chunk."""

    def __init__(self, terms: Terms, options: Options) -> None:
        query, key, value, *_ = terms
        self.dtype = dtype = arithmetic_dtype(value.dtype)
        B, M, self.Hk, self.Wk, _ = value.shape
        self.shape = (B, M, *terms.grid())
        self.keys = self.Hk * self.Wk
        self.query = None if query is None else query.to(dtype)
        self.key = None if key is None else key.flatten(2, 3).to(dtype) * options.scale
        self.value = value.flatten(2, 3).to(dtype)
        self.row, self.column, self.key_logits = terms.logits(self.shape, dtype)
        self.device = value.device
        budget = WORKSPACE["cpu" if self.device.type == "cpu" else "cuda"] // self.value.element_size()
        self.chunks = list(chunks(*self.shape, self.keys, budget))

    def workspace(self) -> Tensor:
        """Return an uninitialized buffer for the logits of the largest chunk, which is the first."""
        queries = (self._queries(*self.chunks[0]) if self.chunks else 0) * self.shape[1]
        return torch.empty(queries * self.keys, dtype=self.dtype, device=self.device)

    def _queries(self, b: slice, h: slice, w: slice) -> int:
        return (b.stop - b.start) * (h.stop - h.start) * (w.stop - w.start)

    def matrices(self, workspace: Tensor, chunk: tuple[slice, slice, slice]) -> Tensor:
        """Return the workspace as (b * M, h * w, keys)."""
        M = self.shape[1]
        images = (chunk[0].stop - chunk[0].start) * M
        queries = self._queries(*chunk) * M // images
        return workspace[: images * queries * self.keys].view(images, queries, self.keys)

    def grid(self, matrices: Tensor, chunk: tuple[slice, slice, slice]) -> Tensor:
        """View (b * M, h * w, ·) as (b, M, h, w, ·)."""
        b, h, w = chunk
        return matrices.view(b.stop - b.start, self.shape[1], h.stop - h.start, w.stop - w.start, matrices.shape[-1])

    def probabilities(self, workspace: Tensor, chunk: tuple[slice, slice, slice]) -> tuple[Tensor, Tensor]:
        """Fill the workspace with a chunk's weights (b * M, h * w, keys), return it and log-sum-exps (b, M, h, w)."""
        b, h, w = chunk
        matrices = self.matrices(workspace, chunk)
        if self.query is not None and self.key is not None:
            query = rows_of(self.query[b, :, h, w])
            torch.bmm(query, self.key[b].flatten(0, 1).transpose(1, 2), out=matrices)
        else:
            matrices.zero_()
        logits = self.grid(matrices, chunk)
        grid = logits.unflatten(-1, (self.Hk, -1))
        if self.row is not None:
            grid += self.row[b, :, h, w].unsqueeze(-1)
        if self.column is not None:
            grid += self.column[b, :, h, w].unsqueeze(-2)
        if self.key_logits is not None:
            logits += self.key_logits[b, :, None, None]
        return matrices, softmax_(logits)


def rows_of(block: Tensor) -> Tensor:
    """Reshape (b, M, h, w, ·) to (b * M, h * w, ·): a view if strides allow, else a copy of one chunk."""
    return block.flatten(2, 3).flatten(0, 1)


def forward(terms: Terms, options: Options) -> tuple[Tensor, Tensor]:
    """Return the attention's output (B, M, Hq, Wq, dv) and log-sum-exp (B, M, Hq, Wq)."""
    problem = Problem(terms, options)
    output, lse = empty_results(terms.value, *terms.grid())
    workspace = problem.workspace()
    for chunk in problem.chunks:
        b, h, w = chunk
        weights, lse[b, :, h, w] = problem.probabilities(workspace, chunk)
        mixed = torch.bmm(weights, problem.value[b].flatten(0, 1))
        output[b, :, h, w] = problem.grid(mixed, chunk)
    return output, lse


def backward(
    grad_output: Tensor, terms: Terms, options: Options, output: Tensor, lse: Tensor, needs: dict[str, bool]
) -> Gradients:
    """Return the gradients that are needed."""
    problem = Problem(terms, options)
    wanted = dict(needed(terms, needs))
    grads: Gradients = {}
    for name, term in wanted.items():
        if name == "query":  # written chunk by chunk, all others are sums
            grads[name] = torch.empty_like(term)
        elif name in ("row_logits", "column_logits"):
            grads[name] = torch.zeros_like(term, dtype=problem.dtype)
        else:
            shape = (*problem.shape[:2], problem.keys, *term.shape[4:])
            grads[name] = term.new_zeros(shape, dtype=problem.dtype)
    grad_query, sum_key, sum_value, row_sum, column_sum, key_sums = map(grads.get, terms._fields)
    value = problem.value
    first = problem.workspace()
    second = problem.workspace() if wanted.keys() - {"value"} else None
    for chunk in problem.chunks:
        b, h, w = chunk
        weights, _ = problem.probabilities(first, chunk)
        grad = rows_of(grad_output[b, :, h, w]).to(problem.dtype)
        if sum_value is not None:
            sum_value[b].flatten(0, 1).baddbmm_(weights.transpose(1, 2), grad)
        if second is None:
            continue
        slopes = problem.matrices(second, chunk)
        torch.bmm(grad, value[b].flatten(0, 1).transpose(1, 2), out=slopes)
        slopes.mul_(weights)
        slopes.addcmul_(weights, slopes.sum(-1, keepdim=True), value=-1)
        logits, index = problem.grid(slopes, chunk), (b, slice(None), h, w)
        if row_sum is not None:
            add_chunk(row_sum, index, logits.unflatten(-1, (problem.Hk, -1)).sum(-1))
        if column_sum is not None:
            add_chunk(column_sum, index, logits.unflatten(-1, (problem.Hk, -1)).sum(-2))
        if key_sums is not None:
            key_sums[b] += logits.sum((2, 3))
        if grad_query is not None and problem.key is not None:
            grad_query[b, :, h, w] = problem.grid(torch.bmm(slopes, problem.key[b].flatten(0, 1)), chunk)
        if sum_key is not None and problem.query is not None:
            sum_key[b].flatten(0, 1).baddbmm_(slopes.transpose(1, 2), rows_of(problem.query[b, :, h, w]))
    if sum_key is not None:
        sum_key *= options.scale
    for name in ("key", "value", "key_logits"):
        if (sums := grads.get(name)) is not None:
            grads[name] = sums.unflatten(2, (problem.Hk, problem.Wk))
    return like_terms(terms, grads)


BACKEND = Backend("eager", never, forward, backward)
