"""A learned table of relative positions in a window: one logit for every offset and head (Liu et al. 2021, Eq. 4).

The index order is Swin's, as in timm, mmdet and mmsegmentation: offsets are q - k, not k - q, rows first. Entry
(Wh - 1 + qh - kh) * (2 Ww - 1) + (Ww - 1 + qw - kw) is the logit of key (kh, kw) for query (qh, qw). The table does
not split into row and column logits; the result is a ``position_logits`` of ``sequence_attention``.

Shapes: M heads, Wh rows and Ww columns of a window, N = Wh * Ww pixels row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .map_size import check_size
from .size_cache import cached

CLS_ENTRIES = 3  # cls to pixel, pixel to cls, cls to cls


def table_logits(table: Tensor, size: Sequence[int], *, cls_token: bool = False) -> Tensor:
    """Lay out a table over offsets as logits over pairs of pixels.

    Args:
        table: ((2 Wh - 1) * (2 Ww - 1), M). With ``cls_token`` three more rows follow (BEiT): the token as query, the
            token as key, and the token with itself.
        size: (Wh, Ww).
        cls_token: Whether a token without a position precedes the pixels.

    Returns:
        (M, N, N), or (M, 1 + N, 1 + N) with ``cls_token``, queries before keys, in the table's dtype.

    Raises:
        ValueError: ``table`` does not have the rows of ``size``.
    """
    H, W = check_size("size", size)
    offsets = _offsets(table, (H, W), cls_token)
    # Indexing with entries innermost is faster (12 × 12, 4 heads, forward and backward: 0.13 ms instead of 0.32 ms).
    logits = table.t().index_select(1, _flat_index((H, W), table.device)).view(-1, H * W, H * W)
    if not cls_token:
        return logits
    from_cls, to_cls, itself = (entry.view(-1, 1, 1) for entry in table[offsets:].unbind(0))
    top = torch.cat((itself, from_cls.expand(-1, 1, H * W)), 2)
    return torch.cat((top, torch.cat((to_cls.expand(-1, H * W, 1), logits), 2)), 1)


def table_index(size: Sequence[int], *, device: torch.device | str | None = None) -> Tensor:
    """Return the table index of each pair of a query and a key, (N, N) int64."""
    H, W = check_size("size", size)
    rows, columns = (torch.arange(s, device=device) for s in (H, W))
    dy = rows.unsqueeze(1) - rows + H - 1
    dx = columns.unsqueeze(1) - columns + W - 1
    return (dy[:, None, :, None] * (2 * W - 1) + dx[None, :, None, :]).reshape(H * W, H * W)


@cached
def _flat_index(size: tuple[int, int], device: torch.device) -> Tensor:
    return table_index(size, device=device).flatten()


def tap_logits(table: Tensor, size: Sequence[int], taps: Sequence[int]) -> Tensor:
    """Return a table's entries for the keys of a window that is centred on its query.

    Args:
        table: ((2 Wh - 1) * (2 Ww - 1), M).
        size: (Wh, Ww), the table's window.
        taps: Rows and columns of the centred window, both odd and at most 2 Wh - 1 and 2 Ww - 1.

    Returns:
        (M, taps[0] * taps[1]), offsets k - q row-major, as ``window_attention`` takes them.

    Raises:
        ValueError: ``table`` does not have the rows of ``size``.
    """
    H, W = check_size("size", size)
    _offsets(table, (H, W), False)
    top, left = (length - 1 - n // 2 for length, n in zip((H, W), taps))
    inner = table.view(2 * H - 1, 2 * W - 1, -1)[top : top + taps[0], left : left + taps[1]]
    return inner.flip(0, 1).flatten(0, 1).t()  # a table's offsets are q - k


def resize_position_table(
    table: Tensor, size: Sequence[int], new_size: Sequence[int], *, cls_token: bool = False
) -> Tensor:
    """Resize a table to another window, as timm's ``resize_rel_pos_bias_table`` does (after BEiT's fine-tuning code).

    Offset ±n of the old window is mapped to ±(1 + r + ... + r^(n-1)) of the new one, with r such that the borders
    coincide: logits of near offsets are kept and those of distant offsets are stretched. r is clamped to 1.01 ... 1.5.
    The new logits are interpolated linearly between those points, and constant beyond the last. If one axis changes,
    both are interpolated; since r >= 1.01, logits along the unchanged axis change slightly, too.

    Args:
        table: ((2 Wh - 1) * (2 Ww - 1), M); with ``cls_token`` three more rows, which are kept.
        size: (Wh, Ww), the table's window.
        new_size: (Wh', Ww'), the new window.
        cls_token: See :func:`table_logits`.

    Returns:
        ((2 Wh' - 1) * (2 Ww' - 1), M), with the same three rows, in the table's dtype; ``table`` itself if the windows
        are equal. The result is differentiable in ``table``.

    Raises:
        ValueError: ``table`` does not have the rows of ``size``.
    """
    old, new = check_size("size", size), check_size("new_size", new_size)
    offsets = _offsets(table, old, cls_token)
    if old == new:
        return table
    dtype = torch.float64 if table.dtype == torch.float64 else torch.float32
    rows, columns = (_interpolation(a, b).to(table.device, dtype) for a, b in zip(old, new))
    grid = table[:offsets].to(dtype).reshape(rows.shape[1], columns.shape[1], -1)
    resized = torch.einsum("ys,xt,stm->yxm", rows, columns, grid).flatten(0, 1)
    return torch.cat((resized.to(table.dtype), table[offsets:]))


def _offsets(table: Tensor, size: tuple[int, int], cls_token: bool) -> int:
    """Return the number of offsets of a window; raise a ValueError if the table does not have their rows."""
    H, W = size
    offsets = (2 * H - 1) * (2 * W - 1)
    rows = offsets + CLS_ENTRIES * cls_token
    if table.dim() != 2 or table.shape[0] != rows:
        name = f"a window of {H} × {W}" + (" and a cls token" if cls_token else "")
        raise ValueError(f"table must have shape ({rows}, M) for {name}, got {tuple(table.shape)}")
    return offsets


def _interpolation(length: int, new: int) -> Tensor:
    """Return the matrix from logits at the old offsets to those at the new ones, (2 new - 1, 2 length - 1) float64."""
    exact: dict[str, Any] = dict(dtype=torch.float64, device="cpu")  # Apple's GPUs, which may be the default, lack it
    if length == 1:
        return torch.ones(2 * new - 1, 1, **exact)
    points = torch.tensor(_points(length, new), **exact)
    offsets = torch.arange(1 - new, new, **exact).clamp(points[0], points[-1])
    right = torch.bucketize(offsets, points).clamp(min=1)
    share = (offsets - points[right - 1]) / (points[right] - points[right - 1])
    columns = torch.arange(2 * length - 1, device="cpu")
    left = (columns == (right - 1).unsqueeze(1)) * (1 - share).unsqueeze(1)
    return left + (columns == right.unsqueeze(1)) * share.unsqueeze(1)


def _points(length: int, new: int) -> list[float]:
    """Return the positions of the old axis's offsets on the new one, ascending."""
    low, high = 1.01, 1.5
    ratio = (low + high) / 2
    while high - low > 1e-6:
        ratio = (low + high) / 2
        if (ratio ** (length - 1) - 1) / (ratio - 1) > new - 1:
            high = ratio
        else:
            low = ratio
    distances = [(ratio**n - 1) / (ratio - 1) for n in range(1, length)]
    return [*(-distance for distance in reversed(distances)), 0.0, *distances]
