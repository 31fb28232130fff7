"""Windows of keys along one axis, as logits: 0 inside, -inf outside.

A rectangular window on a map is the sum of its rows' and its columns' logits, so no (query, key) mask exists.
"""

from __future__ import annotations

import torch
from torch import Tensor


def axis_window(
    queries: int, keys: int, radius: int, q_stride: int = 1, kv_stride: int = 1, device: torch.device | None = None
) -> Tensor:
    """Keys at most ``radius`` pixels from the query: |k * kv_stride - q * q_stride| <= radius.

    Returns:
        (queries, keys), float32.
    """
    q = torch.arange(queries, device=device).unsqueeze(1) * q_stride
    k = torch.arange(keys, device=device) * kv_stride
    return window_logits((k - q).abs() <= radius)


def window_logits(inside: Tensor) -> Tensor:
    """0 where ``inside``, else -inf, float32."""
    return torch.zeros(inside.shape, device=inside.device).masked_fill(~inside, float("-inf"))


def window_position_logits(row: Tensor, column: Tensor, height: int, width: int) -> Tensor:
    """The sum of two axes' logits for every offset of a window.

    Args:
        row: (B, M, H, W, ny), of size 1 along axes that it does not depend on.
        column: (B, M, H, W, nx), likewise.
        height: H.
        width: W.

    Returns:
        (B, M, H, W, ny * nx), offsets row-major, as ``window_attention`` takes them.
    """
    logits = (row.unsqueeze(-1) + column.unsqueeze(-2)).flatten(-2)
    return logits.expand(logits.shape[0], logits.shape[1], height, width, logits.shape[4])
