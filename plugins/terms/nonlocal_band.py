"""Non-localized position logits of sequences (Thesis, Eq. 3.12), without a logit for every query and key.

A query's logits are a band of K values and one value for every key beyond it.

Shapes: B batch, M heads, T queries, S keys, K taps of the band.
"""

from __future__ import annotations

import torch
from torch import Tensor


def counted_keys(
    T: int, S: int, K: int, start: int, causal: bool, key_padding_mask: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Find the taps of a band that are on a key, and count each query's keys.

    Padding is not counted and, with ``causal``, neither are keys after the query.

    Args:
        T: Number of queries; the first is at key position ``start``.
        S: Number of keys.
        K: Number of taps; the query itself is the last tap with ``causal``, else the middle one.
        start: See T.
        causal: Whether to leave out keys after the query.
        key_padding_mask: (B, S) bool, True for padding.
        device: Device of the results.

    Returns:
        (B or 1, 1, T, K) bool and (B or 1, 1, T) integers.
    """
    position = torch.arange(T, device=device) + start
    key = position.unsqueeze(1) + torch.arange(K, device=device) - (K - 1 if causal else K // 2)
    counted = ((key >= 0) & (key < S)).unsqueeze(0)
    if key_padding_mask is None:
        number = (position + 1).clamp(max=S) if causal else torch.full_like(position, S)
        return counted.unsqueeze(1), number[None, None]
    real = ~key_padding_mask
    counted = counted & real[:, key.clamp(0, S - 1)]
    seen = real.cumsum(1)
    number = seen[:, position.clamp(max=S - 1)] if causal else seen[:, -1:].expand(-1, T)
    return counted.unsqueeze(1), number.unsqueeze(1)


def standardised_band(
    band: Tensor, beyond: Tensor, counted: Tensor, number: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Standardise each query's logits over its keys, as ``nonlocal_position.standardised`` does.

    Args:
        band: (B, M, T, K).
        beyond: (B, M, T), the logit of all keys beyond the band.
        counted: (B or 1, 1, T, K), taps that are on a key.
        number: (B or 1, 1, T), number of keys of each query.
        eps: Added to the variance.

    Returns:
        ``band`` and ``beyond``, standardised.
    """
    dtype = band.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    band, beyond = band.to(wide), beyond.to(wide)
    far = (number - counted.sum(-1)).to(wide)
    total = number.clamp(min=1).to(wide)
    mean = ((band * counted).sum(-1) + beyond * far) / total
    band, beyond = band - mean.unsqueeze(-1), beyond - mean
    variance = ((band.square() * counted).sum(-1) + beyond.square() * far) / total
    factor = (variance + eps).rsqrt()
    return (band * factor.unsqueeze(-1)).to(dtype), (beyond * factor).to(dtype)
