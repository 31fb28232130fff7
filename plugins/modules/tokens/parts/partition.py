"""A map cut into windows, each of which a function computes, and put together again (Liu et al. 2021, section 3.2).

Shapes: B batch, (H, W) the map, C channels, (Wh, Ww) a window, (nH, nW) numbers of windows, N = Wh * Ww tokens of a
window row by row, n = B * nH * nW windows, those of one map one after another, M heads, d width per head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ....ops import sequence_attention
from ....terms.alignment import unit_vectors
from ....terms.cosine_scale import cosine_scale
from ....terms.size_cache import cached
from ....terms.window import shifted_window_segments
from .token_moves import inverse, reorder

Pair = tuple[int, int]
OnWindows = Callable[[Tensor, Tensor | None], Tensor]  # windows (n, N, C) and segment ids (nH * nW, N) -> (n, N, C)


def on_windows(x: Tensor, window: Pair, shift: Pair, compute: OnWindows) -> Tensor:
    """Compute the windows of a map that is padded with zeros at the bottom and the right, then rolled by -shift.

    This is the order of transformers and torchvision; timm's is the other one, see :func:`.windows.in_windows`.

    Args:
        x: (B, H, W, C).
        window: (Wh, Ww).
        shift: Rows and columns, each less than the window's.
        compute: Function from all windows to as many tokens. Tokens of a window belong together if their segment ids
            are equal, as ``sequence_attention`` takes them; None without a shift.

    Returns:
        (B, H, W, C) of what ``compute`` returned, contiguous.
    """
    B, H, W, C = x.shape
    (h, w), (below, right) = window, (-H % window[0], -W % window[1])
    if below or right:
        x = F.pad(x, (0, 0, 0, right, 0, below))
    windows = (H + below) // h, (W + right) // w
    order, back = _window_order(B, windows, window, shift, x.device)
    segments = shifted_window_segments(windows, window, shift, x.device) if any(shift) else None
    output = compute(reorder(x.reshape(-1, C), order, back).view(-1, h * w, C), segments)
    output = reorder(output.reshape(-1, output.shape[2]), back, order).view(B, H + below, W + right, -1)
    return output[:, :H, :W].contiguous() if below or right else output


@cached
def _window_order(B: int, windows: Pair, window: Pair, shift: Pair, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the map index of each token in the order of windows, and the inverse."""
    (nH, nW), (h, w) = windows, window
    places = torch.arange(B * nH * h * nW * w, device=device).view(B, nH * h, nW * w)
    if any(shift):
        places = places.roll((-shift[0], -shift[1]), (1, 2))
    order = places.view(B, nH, h, nW, w).transpose(2, 3).reshape(-1)
    return order, inverse(order)


def attend_in_segments(
    query: Tensor, key: Tensor, value: Tensor, logits: Tensor, segments: Tensor | None, scale: float = 1.0
) -> Tensor:
    """Attend within windows: heads (n, M, N, d) and position logits (1, M, N, N) -> (n, N, M * d)."""
    output = sequence_attention(query, key, value, position_logits=logits, segment_ids=segments, scale=scale)
    return output.transpose(1, 2).flatten(2)


def attend_by_cosine(
    query: Tensor, key: Tensor, value: Tensor, logits: Tensor, segments: Tensor | None, logit_scale: Tensor
) -> Tensor:
    """Attend as :func:`attend_in_segments` by scaled cosines (Liu et al. 2022, Eq. 2); ``logit_scale`` is (M, 1, 1).

    Keys of padding are zero vectors. Their gradients, which hooks may see, depend on the ``eps`` of ``normalize``, so
    that it is stock's, except in half precision, in which stock divides by 0.
    """
    halves = value.dtype in (torch.float16, torch.bfloat16)
    q, k = (unit_vectors(x) if halves else F.normalize(x, dim=-1) for x in (query, key))
    q = q * cosine_scale(logit_scale).to(q.dtype)
    return attend_in_segments(q, k, value, logits, segments)
