"""Relative positions clipped at a distance k: w[max(-k, min(k, j - i))] (Shaw et al. 2018, section 3.2).

A table holds the offsets -k ... k of a key from its query, or -k ... 0 with ``causal``. Query t is at key position
start + t. Shapes: B batch, M heads, T queries, S keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.axes import unflatten


def clipped_band(logits: Tensor, reach: int) -> Tensor:
    """Extend a band over the offsets -k ... k to -reach ... reach by repeating its ends.

    Args:
        logits: (..., 2k + 1).
        reach: The largest offset of the result.

    Returns:
        (..., 2 * reach + 1).
    """
    k = logits.shape[-1] // 2
    offsets = torch.arange(-reach, reach + 1, device=logits.device)
    return logits.index_select(-1, offsets.clamp(-k, k) + k)


def weights_by_distance(weights: Tensor, distance: int, start: int = 0, causal: bool = False) -> Tensor:
    """Sum the weights of the keys at each clipped offset.

    The product of the result and a table a is Σ_j α_ij a[clip(j - i)].

    Args:
        weights: α, (B, M, T, S), with start + T <= S.
        distance: k.
        start: Position of the first query.
        causal: Whether all keys after the query have weight 0.

    Returns:
        (B, M, T, 2k + 1), or (B, M, T, k + 1) with ``causal``.
    """
    k, (T, S) = distance, weights.shape[-2:]
    # Reading the rows as one element longer shifts row t by t, so that each column holds one offset.
    rows = S + 2 * k
    skewed = unflatten(F.pad(F.pad(weights, (k, k)).flatten(-2), (0, T)), -1, (T, rows + 1))
    K = k + 1 if causal else 2 * k + 1
    sums = skewed[..., start : start + K]
    offset = torch.arange(S, device=weights.device) - torch.arange(start, start + T, device=weights.device)[:, None]
    before = weights.masked_fill(offset >= -k, 0).sum(-1, keepdim=True)
    sums = sums + F.pad(before, (0, K - 1))
    if causal:
        return sums
    behind = weights.masked_fill(offset <= k, 0).sum(-1, keepdim=True)
    return sums + F.pad(behind, (K - 1, 0))
