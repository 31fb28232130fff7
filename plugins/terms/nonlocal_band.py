"""Non-localized position logits of sequences (Thesis, Eq. 3.12) without laying them out over the keys.

A query's logits are a band of K values and one value for every key beyond it.

Shapes: B batch, M heads, T queries, S keys, K taps of the band.
"""

from __future__ import annotations

import torch
from torch import Tensor


def counted_keys(
    T: int, S: int, K: int, start: int, causal: bool, key_padding_mask: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Which taps of a band meet a key, and how many keys there are; padding and keys after a causal query left out.

    Args:
        T: Queries, the first of them at the keys' position ``start``.
        S: Keys.
        K: Taps; the last is the query itself with ``causal``, else the middle one.
        start: See T.
        causal: Whether keys after a query's position are left out.
        key_padding_mask: (B, S) bool, True for padding.
        device: Of the results.

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
    """Subtract the mean over a query's keys and divide by the deviation, as ``nonlocal_position.standardised`` does.

    Args:
        band: (B, M, T, K).
        beyond: (B, M, T), the logit of keys that the band does not hold.
        counted: (B or 1, 1, T, K), taps that meet a key.
        number: (B or 1, 1, T), keys of a query.
        eps: Added to the variance.

    Returns:
        Both logits, shaped as they were.
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
