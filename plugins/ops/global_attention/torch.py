"""Global attention in plain PyTorch, chunk by chunk, for devices and widths that no other backend supports.

Only one chunk's logits are in memory at a time, so memory is O(N).

Shapes: B batch, M heads, (Hq, Wq) queries, (Hk, Wk) keys, d and dv widths; (b, h, w) a chunk's slices of
batch, query rows and query columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.arguments import arithmetic_dtype
from ..common.backends import Backend, Gradients, never
from ..common.chunks import WORKSPACE, chunks
from ..common.softmax import softmax_
from .operands import Options, Terms


class Problem:
    """Arguments of one call, in the dtype of the arithmetic, and the attention weights of a chunk."""

    def __init__(self, terms: Terms, options: Options) -> None:
        query, key, value, row_logits, column_logits, key_logits = terms
        self.dtype = dtype = arithmetic_dtype(value.dtype)
        B, M, self.Hk, self.Wk, _ = value.shape
        self.shape = (B, M, *terms.grid())
        self.keys = self.Hk * self.Wk
        self.query = None if query is None else query.to(dtype)
        self.key = None if key is None else _batch_of_keys(key).to(dtype) * options.scale
        self.value = _batch_of_keys(value).to(dtype)
        self.row = _expand(row_logits, (*self.shape, self.Hk), dtype)
        self.column = _expand(column_logits, (*self.shape, self.Wk), dtype)
        self.key_logits = None
        if key_logits is not None:
            self.key_logits = key_logits.to(dtype).flatten(2).contiguous().expand(B, M, self.keys)
        self.device = value.device
        budget = WORKSPACE["cpu" if self.device.type == "cpu" else "cuda"] // self.value.element_size()
        self.chunks = list(chunks(*self.shape, self.keys, budget))

    def workspace(self) -> Tensor:
        """Return an uninitialised buffer for the logits of the largest chunk, which is the first."""
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


def _batch_of_keys(tensor: Tensor) -> Tensor:
    return tensor.flatten(2, 3)


def _expand(logits: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    return None if logits is None else logits.to(dtype).expand(shape)


def forward(terms: Terms, options: Options, output: Tensor, lse: Tensor) -> None:
    """Write the attention's output (B, M, Hq, Wq, dv) and log-sum-exp (B, M, Hq, Wq)."""
    problem = Problem(terms, options)
    workspace = problem.workspace()
    for chunk in problem.chunks:
        b, h, w = chunk
        weights, lse[b, :, h, w] = problem.probabilities(workspace, chunk)
        mixed = torch.bmm(weights, problem.value[b].flatten(0, 1))
        output[b, :, h, w] = problem.grid(mixed, chunk)


def backward(
    grad_output: Tensor, terms: Terms, options: Options, output: Tensor, lse: Tensor, grads: Gradients
) -> Gradients:
    """Fill or return the gradients that are not None."""
    problem = Problem(terms, options)
    grad_query = grads["query"]
    B, M, Hq, Wq = problem.shape
    row_sum = _BroadcastSum(grads["row_logits"], (*problem.shape, problem.Hk), problem.dtype)
    column_sum = _BroadcastSum(grads["column_logits"], (*problem.shape, problem.Wk), problem.dtype)
    value = problem.value

    def zeros(grad: Tensor | None, *shape: int) -> Tensor | None:
        return None if grad is None else value.new_zeros(B, M, *shape)

    sum_value = zeros(grads["value"], problem.keys, value.shape[-1])
    sum_key = zeros(grads["key"], problem.keys, 0 if problem.key is None else problem.key.shape[-1])
    key_sums = zeros(grads["key_logits"], problem.keys)
    first = problem.workspace()
    second = problem.workspace() if any(g is not None for name, g in grads.items() if name != "value") else None
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
        _logit_gradient_(
            problem.grid(weights, chunk),
            problem.grid(slopes, chunk),
            row_sum.target(chunk),
            column_sum.target(chunk),
            None if key_sums is None else key_sums[b],
            problem.Hk,
        )
        row_sum.add(chunk)
        column_sum.add(chunk)
        if grad_query is not None and problem.key is not None:
            grad_query[b, :, h, w] = problem.grid(torch.bmm(slopes, problem.key[b].flatten(0, 1)), chunk)
        if sum_key is not None and problem.query is not None:
            sum_key[b].flatten(0, 1).baddbmm_(slopes.transpose(1, 2), rows_of(problem.query[b, :, h, w]))
    row_sum.finish()
    column_sum.finish()
    if sum_key is not None:
        sum_key *= options.scale
    sums = dict(key=sum_key, value=sum_value, key_logits=key_sums)
    return {name: None if t is None else t.unflatten(2, (problem.Hk, problem.Wk)) for name, t in sums.items()}


class _BroadcastSum:
    """Gradient of row or column logits, summed chunk by chunk over broadcast axes."""

    def __init__(self, grad: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.grad = grad
        self.direct = grad is not None and tuple(grad.shape) == shape and grad.dtype == dtype
        self.buffer: Tensor | None = None
        if grad is not None and not self.direct:
            self.sum = torch.zeros(grad.shape, dtype=dtype, device=grad.device)
        self.shape, self.dtype = shape, dtype

    def target(self, chunk: tuple[slice, slice, slice]) -> Tensor | None:
        """Return the tensor to write the chunk's gradient (b, M, h, w, ·) into."""
        if self.grad is None:
            return None
        b, h, w = chunk
        if self.direct:
            return self.grad[b, :, h, w]
        sizes = (b.stop - b.start, self.shape[1], h.stop - h.start, w.stop - w.start, self.shape[4])
        self.buffer = torch.empty(sizes, dtype=self.dtype, device=self.grad.device)
        return self.buffer

    def add(self, chunk: tuple[slice, slice, slice]) -> None:
        if self.grad is None or self.direct or self.buffer is None:
            return
        everything = slice(None)
        b, h, w = (s if self.sum.shape[i] > 1 else everything for s, i in zip(chunk, (0, 2, 3)))
        target = self.sum[b, :, h, w]
        target += self.buffer.sum_to_size(target.shape)

    def finish(self) -> None:
        if self.grad is not None and not self.direct:
            self.grad.copy_(self.sum)


def _logit_gradient_(
    probabilities: Tensor,
    gradient: Tensor,
    row_gradient: Tensor | None,
    column_gradient: Tensor | None,
    key_gradient: Tensor | None,
    key_rows: int,
) -> None:
    gradient.mul_(probabilities)
    gradient.addcmul_(probabilities, gradient.sum(-1, keepdim=True), value=-1)
    grid = gradient.unflatten(-1, (key_rows, -1))
    if row_gradient is not None:
        row_gradient.copy_(grid.sum(-1))
    if column_gradient is not None:
        column_gradient.copy_(grid.sum(-2))
    if key_gradient is not None:
        key_gradient += gradient.sum((2, 3))


BACKEND = Backend("torch", never, forward, backward)
