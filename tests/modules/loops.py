"""Parts of the papers' definitions, one number at a time, for the modules' tests in plain loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def linear(layer: nn.Module, x: np.ndarray) -> np.ndarray:
    """Apply a linear layer, or a convolution of size 1 at one position."""
    product = layer.weight.detach().flatten(1).numpy() @ x
    return product if layer.bias is None else product + layer.bias.detach().numpy()


def softmax(logits: Sequence[float]) -> np.ndarray:
    """Return the weights, which are zeros if no logit is finite."""
    logits = np.asarray(logits)
    weights = np.where(np.isneginf(logits), 0, np.exp(logits - logits[np.isfinite(logits)].max(initial=-1e300)))
    return weights / max(weights.sum(), 1e-300)


def encode(offset: float, width: int, wavelength: float = 10000) -> np.ndarray:
    """Compute sines and cosines of one offset."""
    angles = [offset / wavelength ** (2 * i / width) for i in range(width // 2)]
    return np.array([*map(math.sin, angles), *map(math.cos, angles)])


def zhu_logit(bits: str, q: Any, k: Any, u: Any, v: Any, R: Any) -> Any:
    """Add up the terms of Zhu et al. (2019), Eq. 2, that ``bits`` select: ε1 q·k, ε2 q·R, ε3 u·k and ε4 v·R."""
    terms = (q, k), (q, R), (u, k), (v, R)
    return sum((a * b).sum(-1) for bit, (a, b) in zip(bits, terms) if bit == "1")


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


@torch.no_grad()
def attend(
    module: Any,
    size: tuple[int, int, int],
    logits: Callable[[int, slice, int, list[int]], Sequence[float]],
    value: Callable[[int, slice, int, int], np.ndarray],
    hidden: Tensor | None = None,
) -> Tensor:
    """Attend on sequences, one query and head at a time.

    Args:
        module: Owner of ``num_heads``, ``causal`` and ``out_proj``.
        size: B, T, S.
        logits: Returns those of a sample's head, its channels, for a query and the keys that it sees.
        value: Returns the value of a sample's head for a query and a key.
        hidden: (B, S), keys that are padding.
    """
    (B, T, S), M, C = size, module.num_heads, module.out_proj.in_features
    output = np.zeros((B, T, C))
    for b, m, t in itertools.product(range(B), range(M), range(T)):
        head = slice(m * C // M, (m + 1) * C // M)
        keys = [s for s in range(S) if not (module.causal and s > t) and not (hidden is not None and hidden[b, s])]
        if keys:
            weights = softmax(logits(b, head, t, keys))
            output[b, t, head] = sum(weight * value(b, head, t, s) for weight, s in zip(weights, keys))
    return module.out_proj(torch.from_numpy(output))


def check_with_padding(module: Any, by_loops: Callable[..., Tensor]) -> None:
    """Compare self-attention with its definition ``by_loops(module, x, hidden)``: one sample has padding, one none."""
    x = torch.randn(2, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    hidden = torch.tensor([[False] * 7, [True] * 2 + [False, True] + [False] * 3])
    expected = by_loops(module, x, hidden)
    torch.testing.assert_close(module(x, key_padding_mask=hidden), expected)
    torch.testing.assert_close(module(x)[0], expected[0])
