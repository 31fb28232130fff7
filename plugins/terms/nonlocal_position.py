"""Non-localized position logits (Thesis, Eq. 3.12): predicted inside a window, one value for all keys outside it.

k is the window's side, r = (k - 1) / 2. The query's logits for the offsets of the window are predicted from its
features; every key farther away gets the padding value v. (The thesis prints |i - j| <= ⌈(k + 1) / 2⌉, which overruns
the k predicted values; |i - j| <= r is meant.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

PADDINGS = ("-inf", "zero", "learned", "min", "mean")
SMOOTHINGS = ("sqrt_d", "zscore")


def check_choices(padding: str, smoothing: str) -> None:
    """Check that both are known, and go together."""
    for name, value, choices in (("padding", padding, PADDINGS), ("smoothing", smoothing, SMOOTHINGS)):
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    if padding == "-inf" and smoothing == "zscore":
        raise ValueError("smoothing 'zscore' needs another padding than '-inf', of which there is no mean")


def predicted_values(window: int, padding: str) -> int:
    """How many values f predicts for a query: the window's, and one more where the padding is learned."""
    return window + (padding == "learned")


def with_padding(predicted: Tensor, padding: str) -> Tensor:
    """Append the value for keys outside the window.

    Args:
        predicted: (..., n), or (..., n + 1) for ``'learned'``.
        padding: ``'-inf'`` (attention stays in the window), ``'zero'``, ``'learned'``, ``'min'`` or ``'mean'`` of the
            window's values.

    Returns:
        (..., n + 1), the padding last.
    """
    if padding == "learned":
        return predicted
    if padding == "min":
        value = predicted.amin(-1, keepdim=True)
    elif padding == "mean":
        value = predicted.mean(-1, keepdim=True)
    elif padding == "zero":
        value = torch.zeros_like(predicted[..., :1])
    else:
        value = torch.full_like(predicted[..., :1], -math.inf)
    return torch.cat((predicted, value), -1)


def axis_index(queries: Tensor, keys: int, k: int) -> Tensor:
    """Which of a window's k offsets a key is for a query, -1 outside: (len(queries), keys)."""
    offset = torch.arange(keys, device=queries.device) - queries.unsqueeze(1) + k // 2
    return torch.where((offset >= 0) & (offset < k), offset, -1)


def realign(values: Tensor, index: Tensor) -> Tensor:
    """Lay predicted values out over keys.

    Args:
        values: (..., Q, n + 1), of :func:`with_padding`.
        index: (Q, K), which value a key has; -1: the padding.

    Returns:
        (..., Q, K).
    """
    index = torch.where(index < 0, values.shape[-1] - 1, index)
    return values.gather(-1, index.expand(*values.shape[:-1], -1))


def standardised(logits: Tensor, counted: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Subtract the mean over keys and divide by the deviation ("z-score", Thesis, section 3.5).

    Args:
        logits: (..., K).
        counted: (..., K), which keys count; None: all.
        eps: Added to the variance.
    """
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    if counted is None:
        mean = wide.mean(-1, keepdim=True)
        variance = (wide - mean).square().mean(-1, keepdim=True)
    else:
        number = counted.sum(-1, keepdim=True)
        mean = (wide * counted).sum(-1, keepdim=True) / number
        variance = ((wide - mean).square() * counted).sum(-1, keepdim=True) / number
    return ((wide - mean) * (variance + eps).rsqrt()).to(logits.dtype)
