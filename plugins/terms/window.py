"""Windows of keys, as logits: 0 inside, -inf outside.

A rectangular window on a map is the sum of row and column logits, so no (query, key) mask is needed. In a partition
into windows (Swin), shifted windows have up to four distinct masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .map_size import check_size
from .size_cache import cached


def axis_window(
    queries: int, keys: int, radius: int, q_stride: int = 1, kv_stride: int = 1, device: torch.device | None = None
) -> Tensor:
    """Return the logits of a window along one axis: |k * kv_stride - q * q_stride| <= radius.

    Returns:
        (queries, keys), float32, 0 or -inf.
    """
    q = torch.arange(queries, device=device).unsqueeze(1) * q_stride
    k = torch.arange(keys, device=device) * kv_stride
    return window_logits((k - q).abs() <= radius)


@cached
def shared_axis_window(
    queries: int, keys: int, radius: int, q_stride: int, kv_stride: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return :func:`axis_window` in another dtype. The result is shared; see :func:`.cached`."""
    return axis_window(queries, keys, radius, q_stride, kv_stride, device).to(dtype)


def window_logits(inside: Tensor) -> Tensor:
    """Return 0 where ``inside`` is True and -inf elsewhere, float32."""
    return torch.zeros(inside.shape, device=inside.device).masked_fill(~inside, float("-inf"))


def window_position_logits(row: Tensor, column: Tensor, height: int, width: int) -> Tensor:
    """Add the logits of two axes for every offset of a window.

    Args:
        row: (B, M, H, W, ny), with size 1 along axes that it does not depend on.
        column: (B, M, H, W, nx), likewise.
        height: H.
        width: W.

    Returns:
        (B, M, H, W, ny * nx), offsets row-major, as ``window_attention`` expects.
    """
    logits = (row.unsqueeze(-1) + column.unsqueeze(-2)).flatten(-2)
    return logits.expand(logits.shape[0], logits.shape[1], height, width, logits.shape[4])


class WindowGroup(NamedTuple):
    """Windows of a shifted partition that share a mask.

    Attributes:
        rows: Slice of the rows of windows.
        columns: Slice of the columns of windows.
        logits: (N, N), queries and keys of a window, 0 or -inf; None if nothing is masked.
    """

    rows: slice
    columns: slice
    logits: Tensor | None


def shifted_window_groups(
    windows: Sequence[int], window: Sequence[int], shift: Sequence[int], device: torch.device | None = None
) -> list[WindowGroup]:
    """Return the masks of shifted windows (Liu et al. 2021, Figure 4), one per group of windows with equal masks.

    After the map is rolled by -shift, the last row and the last column of windows contain pixels of opposite borders,
    which must not attend to each other. There are up to four groups: the inner windows, the last column of windows, the
    last row, and the corner. Attention runs once per group, with logits that batch and windows share, so that neither
    the masks nor their sum with a position table are held for every window:

        for group in shifted_window_groups((nH, nW), (Wh, Ww), shift):
            tokens = map_of_windows[:, group.rows, group.columns]          # of (B, nH, nW, N, C)

    For training, cut the map with ``split`` at the groups' borders, as the backward pass of each slice fills a whole
    map with zeros.

    timm, mmdet and mmsegmentation mask with -100, one (N, N) for every window; the softmax is the same.

    Args:
        windows: (nH, nW), numbers of windows, including padding.
        window: (Wh, Ww), in pixels; N = Wh * Ww, row by row.
        shift: Pixels of rows and of columns, each at least 0 and less than the window; 0 masks nothing along an axis.
        device: Device of the logits.

    Returns:
        Groups that contain every window once. Logits are float32.

    Raises:
        ValueError: ``windows`` or ``window`` is not two ints of at least 1, or ``shift`` not two ints below ``window``.
    """
    masks = _masks(windows, window, shift, partial(_mask, device=device, dtype=torch.float32))
    slices = [
        [slice(0, n - 1), slice(n - 1, n)] if moved and n > 1 else [slice(0, n)] for n, moved in zip(windows, shift)
    ]
    places = [(rows, columns) for rows in slices[0] for columns in slices[1]]
    return [WindowGroup(rows, columns, mask) for (rows, columns), mask in zip(places, masks)]


def shifted_window_masks(
    windows: Sequence[int], window: Sequence[int], shift: Sequence[int], device: torch.device, dtype: torch.dtype
) -> list[Tensor | None]:
    """Return only the masks of :func:`shifted_window_groups`, in its order.

    ``torch.compile`` specializes on the numbers in a slice; without slices ``windows`` may be symbolic.

    Returns:
        For each group (N, N), or None if nothing is masked. The masks are shared; see :func:`.cached`.

    Raises:
        ValueError: For the reasons of :func:`shifted_window_groups`.
    """
    return _masks(windows, window, shift, partial(_shared_mask, device=device, dtype=dtype))


@cached
def shifted_window_segments(
    windows: tuple[int, int], window: tuple[int, int], shift: tuple[int, int], device: torch.device
) -> Tensor:
    """Return the masks of :func:`shifted_window_groups` as numbers: tokens of a window see those of their number.

    Returns:
        (nH * nW, N) int32. The result is shared; see :func:`.cached`.
    """
    rows, columns = (
        (torch.arange(count * length, device=device) >= count * length - moved).view(count, length).int()
        for count, length, moved in zip(windows, window, shift)
    )
    return (2 * rows[:, None, :, None] + columns[None, :, None, :]).flatten(2).flatten(0, 1)


def _masks(
    windows: Sequence[int],
    window: Sequence[int],
    shift: Sequence[int],
    mask: Callable[[tuple[int, int], tuple[int, int]], Tensor],
) -> list[Tensor | None]:
    """Return the masks of groups, each computed from the window and the pixels wrapped along its axes."""
    windows, (H, W) = check_size("windows", windows), check_size("window", window)
    moves = tuple(shift) if isinstance(shift, Sequence) else ()
    if len(moves) != 2 or not all(isinstance(s, int) and 0 <= s < length for s, length in zip(moves, (H, W))):
        raise ValueError(f"shift must be two ints from 0 to below window {(H, W)}, got {shift!r}")
    axes = [[0, moved] if moved and count > 1 else [moved] for count, moved in zip(windows, moves)]
    return [mask((H, W), (rows, columns)) if rows or columns else None for rows in axes[0] for columns in axes[1]]


def shifted_axis(length: int, shift: int, device: torch.device | None = None) -> Tensor:
    """Return the mask of an axis's last window, which separates the last ``shift`` pixels from the others.

    Returns:
        (length, length), float32.
    """
    wrapped = torch.arange(length, device=device) >= length - shift
    return window_logits(wrapped.unsqueeze(1) == wrapped)


def _mask(window: tuple[int, int], wrapped: tuple[int, int], device: torch.device | None, dtype: torch.dtype) -> Tensor:
    """Return the sum of the row mask (Wh, Wh) and the column mask (Ww, Ww), (N, N); not both axes are 0."""
    H, W = window
    axes = [shifted_axis(H, wrapped[0], device)[:, None, :, None]] if wrapped[0] else []
    axes += [shifted_axis(W, wrapped[1], device)[None, :, None, :]] if wrapped[1] else []
    return sum(axes[1:], axes[0]).expand(H, W, H, W).reshape(H * W, -1).to(dtype)


_shared_mask = cached(_mask)
