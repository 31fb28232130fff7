"""Parts of the papers' definitions, one number at a time, for the modules' tests in plain loops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import nn


def linear(layer: nn.Module, x: np.ndarray) -> np.ndarray:
    """Apply a linear layer, or a convolution of size 1 at one position."""
    product = layer.weight.detach().flatten(1).numpy() @ x
    return product if layer.bias is None else product + layer.bias.detach().numpy()


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softmax(logits: Sequence[float]) -> np.ndarray:
    """Return the weights, which are zeros if no logit is finite."""
    logits = np.asarray(logits)
    weights = np.where(np.isneginf(logits), 0, np.exp(logits - logits[np.isfinite(logits)].max(initial=-1e300)))
    return weights / max(weights.sum(), 1e-300)


def encode(offset: float, width: int, wavelength: float = 10000) -> np.ndarray:
    """Compute sines and cosines of one offset."""
    angles = [offset / wavelength ** (2 * i / width) for i in range(width // 2)]
    return np.array([*map(math.sin, angles), *map(math.cos, angles)])


def predicted_logits(
    values: np.ndarray,
    taps: Sequence[int | None],
    outside: str,
    smoothing: str,
    width: int,
    counted: Sequence[bool] | None = None,
) -> np.ndarray:
    """Compute the position logits of a query (thesis, Eq. 3.11 and 3.12): predicted nearby, then smoothed.

    Args:
        values: Predicted logits of the window's taps, followed by that of all other keys if ``outside='learned'``.
        taps: Tap of each key; None outside of the window.
        outside: Logit of other keys.
        smoothing: ``zscore``, or division by the root of ``width``.
        width: That number.
        counted: Keys that the statistics of ``zscore`` count; None for all.
    """
    window = values[:-1] if outside == "learned" else values
    beyond = {"learned": values[-1], "zero": 0.0, "min": window.min(), "mean": window.mean(), "-inf": -math.inf}[
        outside
    ]
    logits = np.array([beyond if tap is None else window[tap] for tap in taps])
    if smoothing != "zscore":
        return logits / math.sqrt(width)
    among = logits if counted is None else logits[np.asarray(counted)]
    return (logits - among.mean()) / math.sqrt(among.var() + 1e-6)
