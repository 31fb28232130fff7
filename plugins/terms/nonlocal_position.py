"""Non-localized position logits (Thesis, Eq. 3.12): predicted inside a window, one value for all keys outside it.

k is the window's side, r = (k - 1) / 2. The logits for the window's offsets are predicted from the query's features;
all keys outside the window share one value v, chosen by ``Outside``. The thesis prints |i - j| <= ⌈(k + 1) / 2⌉, which
exceeds the k predicted values; the code uses |i - j| <= r.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Outside = Literal["-inf", "zero", "learned", "min", "mean"]
Smoothing = Literal["sqrt_d", "zscore"]


def check_smoothing(outside: Outside, smoothing: Smoothing) -> None:
    """Raise a ValueError if ``outside`` and ``smoothing`` cannot be combined."""
    if outside == "-inf" and smoothing == "zscore":
        raise ValueError("smoothing 'zscore' needs another outside than '-inf', which has no mean")


def predicted_values(window: int, outside: Outside) -> int:
    """Return how many values f predicts for a query: one per offset, and one more for a learned ``outside``."""
    return window + (outside == "learned")


def with_outside(predicted: Tensor, outside: Outside) -> Tensor:
    """Append the value for keys outside the window.

    Args:
        predicted: (..., n), or (..., n + 1) for ``'learned'``.
        outside: ``'-inf'`` (attention only inside the window), ``'zero'``, ``'learned'``, or the ``'min'`` or
            ``'mean'`` of the window's values.

    Returns:
        (..., n + 1); the last value is that of keys outside.
    """
    if outside == "learned":
        return predicted
    if outside == "min":
        value = predicted.amin(-1, keepdim=True)
    elif outside == "mean":
        value = predicted.mean(-1, keepdim=True)
    elif outside == "zero":
        value = torch.zeros_like(predicted[..., :1])
    else:
        value = torch.full_like(predicted[..., :1], -math.inf)
    return torch.cat((predicted, value), -1)


def axis_index(queries: Tensor, keys: int, k: int) -> Tensor:
    """Return the index of each key among the k offsets of a query's window, -1 outside: (len(queries), keys)."""
    offset = torch.arange(keys, device=queries.device) - queries.unsqueeze(1) + k // 2
    return torch.where((offset >= 0) & (offset < k), offset, -1)


def map_index(positions: Tensor, size: tuple[int, int], kernel_size: tuple[int, int]) -> Tensor:
    """Return the row-major index of each key of a map in a query's window, -1 outside.

    Args:
        positions: (Q,), positions of the queries on the map, row by row.
        size: (H, W), the map's size.
        kernel_size: Sides of the window, both odd.

    Returns:
        (Q, H * W).
    """
    H, W = size
    rows = axis_index(positions // W, H, kernel_size[0]).unsqueeze(2)
    columns = axis_index(positions % W, W, kernel_size[1]).unsqueeze(1)
    return torch.where((rows < 0) | (columns < 0), -1, rows * kernel_size[1] + columns).flatten(1)


def tap_index(taps: tuple[int, int], kernel_size: tuple[int, int], device: torch.device) -> Tensor:
    """Return the index of each tap of a window in another window around the same query, -1 outside; sides are odd.

    Returns:
        (taps[0] * taps[1],), row-major.
    """
    middle = torch.tensor([taps[0] // 2 * taps[1] + taps[1] // 2], device=device)
    return map_index(middle, taps, kernel_size)[0]


def realign(values: Tensor, index: Tensor) -> Tensor:
    """Lay predicted values out over keys.

    Args:
        values: (..., Q, n + 1), from :func:`with_outside`.
        index: (Q, K), index of each key's value; -1 for the value outside the window.

    Returns:
        (..., Q, K).
    """
    index = torch.where(index < 0, values.shape[-1] - 1, index)
    return values.gather(-1, index.expand(*values.shape[:-1], -1))


def standardised(logits: Tensor, counted: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Subtract the mean over keys and divide by the standard deviation ("z-score", Thesis, section 3.5).

    Args:
        logits: (..., K).
        counted: (..., K) bool, keys that are included; all if None.
        eps: Added to the variance.
    """
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    if counted is None:
        mean = wide.mean(-1, keepdim=True)
        variance = (wide - mean).square().mean(-1, keepdim=True)
    else:
        number = counted.sum(-1, keepdim=True).clamp(min=1)
        mean = (wide * counted).sum(-1, keepdim=True) / number
        variance = ((wide - mean).square() * counted).sum(-1, keepdim=True) / number
    return ((wide - mean) * (variance + eps).rsqrt()).to(logits.dtype)
