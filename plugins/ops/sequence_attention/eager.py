"""Sequence attention in plain PyTorch, chunk by chunk, for devices without a kernel.

Only one chunk's logits are in memory at a time, so memory is O(T).

Shapes: B batch, M heads, T queries, S keys, K taps of the band, d and dv widths; (b, t) a chunk's slices of batch
and queries, n its number of queries.
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


def band_reach(K: int, causal: bool) -> tuple[int, int]:
    """Return how many keys a band of K taps covers before and after the query's position."""
    return (K - 1, 0) if causal else (K // 2, K // 2)


class Problem:
    """Arguments of one call, in the dtype of the arithmetic, and the logits of a chunk."""

    def __init__(self, terms: Terms, options: Options) -> None:
        value = terms.value
        self.dtype = dtype = arithmetic_dtype(value.dtype)
        self.B, self.M, self.S, _ = value.shape
        self.T, self.start, self.causal, self.device = terms.queries(), options.start, options.causal, value.device
        B, M, T = self.B, self.M, self.T
        self.query = None if terms.query is None else terms.query.to(dtype)
        self.key = None if terms.key is None else (terms.key.to(dtype) * options.scale)
        self.value = value.to(dtype)
        self.band, self.outside, self.position = (
            None if t is None else t.to(dtype).expand(B, M, T, *t.shape[3:]) for t in terms[3:]
        )
        mask = options.key_padding_mask
        self.masked = None if mask is None else mask[:, None, None].expand(B, 1, 1, self.S)
        ids = options.segment_ids
        self.segments = None if ids is None else ids.repeat(B // max(1, ids.shape[0]), 1)
        budget = WORKSPACE["cpu" if self.device.type == "cpu" else "cuda"] // self.value.element_size()
        self.chunks = [(b, t) for b, _, t in chunks(B, M, 1, T, self.S, budget)]

    def workspace(self) -> Tensor:
        """Return an uninitialized buffer for the logits of the largest chunk, which is the first."""
        b, t = self.chunks[0]
        return self.value.new_empty((b.stop - b.start) * self.M * (t.stop - t.start) * self.S)

    def keys(self, t: slice) -> int:
        """Return how many keys the queries of a chunk may attend to."""
        return max(0, min(self.S, self.start + t.stop)) if self.causal else self.S

    def matrices(self, workspace: Tensor, chunk: tuple[slice, slice]) -> Tensor:
        """Return the workspace as (b * M, n, keys)."""
        b, t = chunk
        shape = ((b.stop - b.start) * self.M, t.stop - t.start, self.keys(t))
        return workspace[: shape[0] * shape[1] * shape[2]].view(shape)

    def offsets(self, t: slice, first: int, last: int) -> Tensor:
        """Return key minus query position for keys first ... last - 1, (n, last - first)."""
        positions = torch.arange(self.start + t.start, self.start + t.stop, device=self.device)
        return torch.arange(first, last, device=self.device) - positions.unsqueeze(1)

    def logits(self, workspace: Tensor, chunk: tuple[slice, slice]) -> Tensor:
        """Fill the workspace with the logits of a chunk, (b * M, n, keys)."""
        b, t = chunk
        keys = self.keys(t)
        matrices = self.matrices(workspace, chunk)
        if self.query is not None and self.key is not None:
            key = self.key[b, :, :keys].flatten(0, 1)
            torch.bmm(self.query[b, :, t].flatten(0, 1), key.transpose(1, 2), out=matrices)
        else:
            matrices.zero_()
        logits = matrices.unflatten(0, (-1, self.M))
        if self.position is not None:
            logits += self.position[b, :, t, :keys]
        if self.band is not None:
            self._add_band(logits, chunk)
        if self.causal:
            first = min(keys, max(0, self.start + t.start))  # no query of the chunk is before these keys
            logits[..., first:].masked_fill_(self.offsets(t, first, keys) > 0, float("-inf"))
        if self.masked is not None:
            logits.masked_fill_(self.masked[b, :, :, :keys], float("-inf"))
        if self.segments is not None:
            own = self.segments[b, self.start + t.start : self.start + t.stop].unsqueeze(2)
            logits.masked_fill_((own != self.segments[b, :keys].unsqueeze(1)).unsqueeze(1), float("-inf"))
        return matrices

    def _add_band(self, logits: Tensor, chunk: tuple[slice, slice]) -> None:
        """Add the band logits inside each query's band, and the outside logits elsewhere."""
        b, t = chunk
        assert self.band is not None
        band, K, keys = self.band[b, :, t], self.band.shape[3], logits.shape[3]
        left, right = band_reach(K, self.causal)
        first = min(keys, max(0, self.start + t.start - left))
        last = max(first, min(keys, self.start + t.stop + right))
        tap = self.offsets(t, first, last) + left
        of_band = band.gather(3, tap.clamp(0, K - 1).expand(*band.shape[:3], last - first))
        inside = (tap >= 0) & (tap < K)
        if self.outside is None:
            logits[..., first:last] += of_band.masked_fill_(~inside, 0)
        else:
            outside = self.outside[b, :, t].unsqueeze(-1)
            logits[..., first:last] += torch.where(inside, of_band, outside)
            logits[..., :first] += outside
            logits[..., last:] += outside

    def band_of(self, slopes: Tensor, t: slice) -> Tensor:
        """Gather the band's gradients (b, M, n, K) from all logits' (b, M, n, keys); 0 where there is no key."""
        assert self.band is not None
        K, keys = self.band.shape[3], slopes.shape[3]
        left, _ = band_reach(K, self.causal)
        positions = torch.arange(self.start + t.start, self.start + t.stop, device=self.device)
        key = torch.arange(K, device=self.device) - left + positions.unsqueeze(1)
        band = slopes.gather(3, key.clamp(0, keys - 1).expand(*slopes.shape[:3], K))
        return band.masked_fill_((key < 0) | (key >= keys), 0)


def forward(terms: Terms, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output (B, M, T, dv) and the log-sum-exp (B, M, T), +inf where all keys are masked."""
    problem = Problem(terms, options)
    output, lse = empty_results(terms.value, problem.T)
    workspace = problem.workspace()
    for chunk in problem.chunks:
        b, t = chunk
        keys = problem.keys(t)
        if keys == 0:  # causal queries before the first key
            output[b, :, t].zero_()
            lse[b, :, t] = float("inf")
            continue
        weights = problem.logits(workspace, chunk)
        lse[b, :, t] = softmax_(weights).unflatten(0, (-1, problem.M))
        output[b, :, t] = torch.bmm(weights, problem.value[b, :, :keys].flatten(0, 1)).unflatten(0, (-1, problem.M))
    return output, lse


def backward(
    grad_output: Tensor, terms: Terms, options: Options, output: Tensor | None, lse: Tensor, needs: dict[str, bool]
) -> Gradients:
    """Return the gradients that are needed."""
    problem = Problem(terms, options)
    sums = {name: term.new_zeros(term.shape, dtype=problem.dtype) for name, term in needed(terms, needs)}
    sum_query, sum_key, sum_value, sum_band, sum_outside, sum_position = map(sums.get, terms._fields)
    first = problem.workspace()
    second = problem.workspace() if sums.keys() - {"value"} else None
    for chunk in problem.chunks:
        b, t = chunk
        keys = problem.keys(t)
        if keys == 0:
            continue
        weights = problem.logits(first, chunk)
        softmax_(weights)
        grad = grad_output[b, :, t].to(problem.dtype).flatten(0, 1)
        if sum_value is not None:
            sum_value[b, :, :keys] += torch.bmm(weights.transpose(1, 2), grad).unflatten(0, (-1, problem.M))
        if second is None:
            continue
        slopes = problem.matrices(second, chunk)
        torch.bmm(grad, problem.value[b, :, :keys].flatten(0, 1).transpose(1, 2), out=slopes)
        slopes.mul_(weights)
        slopes.addcmul_(weights, slopes.sum(-1, keepdim=True), value=-1)
        if sum_query is not None and problem.key is not None:
            sum_query[b, :, t] = torch.bmm(slopes, problem.key[b, :, :keys].flatten(0, 1)).unflatten(0, (-1, problem.M))
        if sum_key is not None and problem.query is not None:
            query = problem.query[b, :, t].flatten(0, 1)
            sum_key[b, :, :keys] += torch.bmm(slopes.transpose(1, 2), query).unflatten(0, (-1, problem.M))
        logits, index = slopes.unflatten(0, (-1, problem.M)), (b, slice(None), t)
        if sum_position is not None:
            add_chunk(sum_position[..., :keys], index, logits)
        if sum_band is not None or sum_outside is not None:
            band = problem.band_of(logits, t)
            if sum_band is not None:
                add_chunk(sum_band, index, band)
            if sum_outside is not None:  # the gradients of a query's logits sum to 0
                add_chunk(sum_outside, index, band.sum(-1).neg_())
    if sum_key is not None:
        sum_key *= options.scale
    return like_terms(terms, dict(sums))


BACKEND = Backend("eager", never, forward, backward)
