"""Sums over all keys with weights that are no softmax, without a matrix of all pairs.

Shapes: B batch, N queries, K keys, d width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def dot_products(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """1 / K Σ_j (q_i·k_j) v_j, for queries (B, N, d), keys (B, K, d) and values (B, K, dv): (B, N, dv)."""
    # Half of the factor in each operand: in float16 neither a sum over K overflows nor an operand underflows.
    factor = key.shape[1] ** -0.5
    return query.matmul((key * factor).transpose(1, 2).matmul(value * factor))


def rectified_sums(a: Tensor, b: Tensor, value: Tensor) -> Tensor:
    """1 / K Σ_j ReLU(a_i + b_j) v_j, in O(N log K + K log K + (N + K) dv) operations.

    Args:
        a: (B, N), of the queries.
        b: (B, K), of the keys.
        value: (B, K, dv).

    Returns:
        (B, N, dv).
    """
    dtype, K = value.dtype, b.shape[1]
    # In float64: the sums over all keys before the last may be far larger than a query's answer.
    a, b, value = a.double(), b.double(), value.double()
    order = b.argsort(1, descending=True)
    b = b.gather(1, order)
    value = value.gather(1, order.unsqueeze(2).expand_as(value))
    sums = F.pad(prefix_sums(torch.cat((value, value * b.unsqueeze(2)), 2)), (0, 0, 1, 0))  # of the first 0 ... K keys
    counts = torch.searchsorted(-b.detach(), a.detach().contiguous())  # of the keys with b_j > -a_i
    values, products = sums.gather(1, counts.unsqueeze(2).expand(-1, -1, sums.shape[2])).chunk(2, 2)
    return ((a.unsqueeze(2) * values + products) / K).to(dtype)


def prefix_sums(x: Tensor) -> Tensor:
    """Sums over the first 1 ... K rows of (B, K, c)."""
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():  # for which PyTorch has no cumsum on CUDA
        return _prefix_sums_by_products(x)
    return x.cumsum(1)


def _prefix_sums_by_products(x: Tensor) -> Tensor:
    """The sums within about √K blocks of as many rows, and those of the blocks before."""
    B, K, c = x.shape
    side = math.isqrt(K - 1) + 1
    blocks = F.pad(x, (0, 0, 0, side * side - K)).view(B, side, side, c)
    lower = x.new_ones(side, side).tril()
    within = lower.matmul(blocks)
    before = lower.tril(-1).matmul(within[:, :, -1])
    return (within + before.unsqueeze(2)).flatten(1, 2)[:, :K]
