"""Sums over all keys with weights other than softmax, without a matrix of all pairs.

Shapes: B batch, N queries, K keys, d width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ....core.devices import has_float64
from ....core.gradients import traced


def dot_products(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute 1 / K Σ_j (q_i·k_j) v_j, (B, N, dv), for queries (B, N, d), keys (B, K, d) and values (B, K, dv)."""
    # Split the factor between both operands: in float16 the sum does not overflow and no operand underflows.
    factor = key.shape[1] ** -0.5
    return query.matmul((key * factor).transpose(1, 2).matmul(value * factor))


def rectified_sums(a: Tensor, b: Tensor, value: Tensor) -> Tensor:
    """Compute 1 / K Σ_j ReLU(a_i + b_j) v_j in O(N log K + K log K + (N + K) dv) operations.

    Args:
        a: (B, N), for the queries.
        b: (B, K), for the keys.
        value: (B, K, dv).

    Returns:
        (B, N, dv).
    """
    dtype, K = value.dtype, b.shape[1]
    if not has_float64(value.device.type) or (traced() and torch.onnx.is_in_onnx_export()):  # it knows no searchsorted
        return torch.relu(a.unsqueeze(2) + b.unsqueeze(1)).matmul(value) / K
    # In float64, as prefix sums may be far larger than a query's result.
    a, b, value = a.double(), b.double(), value.double()
    order = b.argsort(1, descending=True)
    b = b.gather(1, order)
    value = value.gather(1, order.unsqueeze(2).expand_as(value))
    sums = F.pad(prefix_sums(torch.cat((value, value * b.unsqueeze(2)), 2)), (0, 0, 1, 0))  # of the first 0 ... K keys
    counts = torch.searchsorted(-b.detach(), a.detach().contiguous())  # number of keys with b_j > -a_i
    values, products = sums.gather(1, counts.unsqueeze(2).expand(-1, -1, sums.shape[2])).chunk(2, 2)
    return ((a.unsqueeze(2) * values + products) / K).to(dtype)


def prefix_sums(x: Tensor) -> Tensor:
    """Compute sums over the first 1 ... K rows of (B, K, c)."""
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():  # no deterministic cumsum on CUDA
        return _prefix_sums_by_products(x)
    return x.cumsum(1)


def _prefix_sums_by_products(x: Tensor) -> Tensor:
    """Compute sums within about √K blocks of √K rows, and add those of the preceding blocks."""
    B, K, c = x.shape
    side = math.isqrt(K - 1) + 1
    blocks = F.pad(x, (0, 0, 0, side * side - K)).view(B, side, side, c)
    lower = x.new_ones(side, side).tril()
    within = lower.matmul(blocks)
    before = lower.tril(-1).matmul(within[:, :, -1])
    return (within + before.unsqueeze(2)).flatten(1, 2)[:, :K]
