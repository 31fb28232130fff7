"""Attention to a window that is centred on its query; with dropout, the weights are held in memory.

Shapes: B batch, M heads, (H, W) the map, d width per head, n taps of a window, row by row.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ...ops import reference, window_attention
from ..common.capture import window_maps_of

Pair = tuple[int, int]


def attend_centred(
    q: Tensor, k: Tensor, v: Tensor, position_logits: Tensor | None, taps: Pair, dropout: float = 0.0
) -> Tensor:
    """Apply ``window_attention``; with dropout, hold n weights and values per query in memory.

    Args:
        q: (B, M, H, W, d), scaled.
        k: (B, M, H, W, d).
        v: (B, M, H, W, d).
        position_logits: (B or 1, M, H, W, n), or None.
        taps: The window's rows and columns, both odd.
        dropout: Dropout probability of the attention weights.

    Returns:
        (B, M, H, W, d).
    """
    if not dropout:
        return window_attention(q, k, v, position_logits, taps)
    windows = reference.Windows(q.shape[2:4], k.shape[2:4], *_geometry(taps), q.device)
    weights = reference.window_attention_probabilities(q, k, position_logits, windows, False, 1.0)
    weights = F.dropout(weights.to(v.dtype), dropout)
    return (weights.unsqueeze(4) @ windows.gather(v)).squeeze(4)


def centred_maps(
    q: Tensor, k: Tensor, position_logits: Tensor | None, taps: Pair, queries: Tensor | None = None
) -> Tensor:
    """Compute the weights of :func:`attend_centred` on the whole map; see :func:`.window_maps_of`."""
    return window_maps_of(q, k, position_logits, k.shape[2:4], _geometry(taps), queries)


def _geometry(taps: Pair) -> tuple[Pair, Pair, Pair, Pair]:
    """Return kernel size, stride, padding and dilation."""
    return taps, (1, 1), (taps[0] // 2, taps[1] // 2), (1, 1)
