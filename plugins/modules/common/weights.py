"""Weights and logits of an attention, written out for inspection and dropout; shapes as in :mod:`.logits`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.axes import unflatten
from ...ops import reference
from .logits import Kind, Logits, MapLogits, SequenceLogits, WindowLogits, defined

# What is added to the content of each kind.
_ADDED: dict[type, tuple[str, ...]] = {
    MapLogits: ("row_logits", "column_logits", "key_logits"),
    WindowLogits: ("position_logits",),
    SequenceLogits: ("band_logits", "outside_logits", "position_logits"),
}


def summed(logits: Logits) -> Tensor:
    """Write out the sum of all logits, -inf at masked keys: (B, M, *queries, keys).

    Keys, or the taps of a window, are one axis; prefix keys come first.
    """
    query, key, value = logits.query, logits.key, logits.value
    if isinstance(logits, MapLogits):
        written = reference.global_attention_logits(
            query, key, value, logits.row_logits, logits.column_logits, logits.key_logits, logits.scale
        ).flatten(4)
        if logits.prefix_value is None:
            return written
        size = *written.shape[:4], logits.prefix_value.shape[2]
        if query is None or logits.prefix_key is None:
            prefix = written.new_zeros(1)
        else:
            prefix = logits.scale * query @ logits.prefix_key.unsqueeze(2).mT
        return torch.cat((prefix.expand(size), written), 4)
    if isinstance(logits, WindowLogits):
        logits = defined(logits)
        written = reference.window_attention_logits(
            query, key, logits.position_logits, _windows(logits), logits.border, logits.scale
        )
        return written.expand(*value.shape[:2], -1, -1, -1)
    logits = defined(logits)
    outside = logits.outside_logits
    if isinstance(outside, (int, float)):
        outside = value.new_full((1, 1, 1), outside)
    return reference.sequence_attention_logits(
        query, key, value, logits.band_logits, outside, logits.position_logits, logits.key_padding_mask, logits.start,
        logits.causal, logits.scale, logits.segment_ids,
    )  # fmt: skip


def weights_of(logits: Logits) -> Tensor:
    """Write out the attention weights, shaped like :func:`summed`; 0 for fully masked queries."""
    return reference.masked_softmax(summed(logits))


def mixed(logits: Logits, weights: Tensor) -> Tensor:
    """Sum the values with ``weights``, shaped like :func:`summed`."""
    if isinstance(logits, WindowLogits):
        return (weights.unsqueeze(4) @ _windows(defined(logits)).gather(logits.value)).squeeze(4)
    if isinstance(logits, SequenceLogits):
        return weights @ logits.value
    value = logits.value.flatten(2, 3)
    value = value if logits.prefix_value is None else torch.cat((logits.prefix_value, value), 2)
    return weights @ value.unsqueeze(2)


def parts(logits: Kind) -> dict[str, Kind]:
    """Split into ``content`` and ``position`` by what is there; masks apply to both."""
    added = _ADDED[type(logits)]
    absent: dict[str, Any] = dict.fromkeys(added)
    found: dict[str, Any] = {}
    if logits.query is not None:
        found["content"] = logits._replace(**absent)
    if any(getattr(logits, name) is not None for name in added):
        found["position"] = logits._replace(query=None, key=None)
    return found


def map_weights(logits: Logits, size: Sequence[int], queries: Tensor | None = None) -> Tensor:
    """Write out the weights of some queries of a map on the map of keys, 0 outside their windows.

    The weights of prefix keys are not part of the map.

    Args:
        logits: Of a map or of windows.
        size: (Hq, Wq).
        queries: (Q, 2), rows and columns; None for all.

    Returns:
        (B, M, Hq, Wq, Hk, Wk), or (B, M, Q, Hk, Wk) with ``queries``.

    Raises:
        ValueError: ``queries`` are not positions on the map.
    """
    return _on_map(logits, True, size, queries)


def map_logits(logits: Logits, size: Sequence[int], queries: Tensor | None = None) -> Tensor:
    """Write out the sum of logits, -inf outside the windows; otherwise like :func:`map_weights`."""
    return _on_map(logits, False, size, queries)


def sequence_weights(logits: SequenceLogits, T: int, queries: Tensor | None = None) -> Tensor:
    """Write out the weights of some queries of a sequence, with keys in their original order.

    Args:
        logits: Of a sequence.
        T: Number of queries.
        queries: (Q,), positions among them; None for all.

    Returns:
        (B, M, T, S), or (B, M, Q, S) with ``queries``.
    """
    return _in_order(logits, weights_of(logits), T, queries)


def sequence_logits(logits: SequenceLogits, T: int, queries: Tensor | None = None) -> Tensor:
    """Write out the sum of logits, -inf at masked keys; otherwise like :func:`sequence_weights`."""
    return _in_order(logits, summed(logits), T, queries)


def checked_queries(queries: Tensor, size: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rows and columns of ``queries``, (Q, 2), on a map of ``size``.

    Raises:
        ValueError: ``queries`` are not positions on the map.
    """
    H, W = size
    if queries.dim() != 2 or queries.shape[1] != 2 or queries.is_floating_point():
        raise ValueError(f"queries must be whole numbers of shape (Q, 2), got {queries.dtype} {tuple(queries.shape)}")
    y, x = queries.to(device).unbind(1)
    if len(queries) and (min(y.min(), x.min()) < 0 or y.max() >= H or x.max() >= W):
        raise ValueError(f"queries must lie on the map of {H} rows and {W} columns, got {queries.tolist()}")
    return y, x


def rotation(shift: Tensor, length: int) -> Tensor:
    """Return the positions from ``shift`` on, followed by those before it, for every row: (B, length)."""
    return (torch.arange(length, device=shift.device) + shift.unsqueeze(1)) % length


def _in_order(logits: SequenceLogits, written: Tensor, T: int, queries: Tensor | None) -> Tensor:
    written = written.expand(-1, -1, T, -1)
    if logits.shift is not None:
        written = written.gather(3, rotation(-logits.shift, written.shape[3])[:, None, None].expand_as(written))
    return written if queries is None else written[:, :, queries]


def _on_map(logits: Logits, softmax: bool, size: Sequence[int], queries: Tensor | None) -> Tensor:
    H, W = size
    keys, device = logits.value.shape[2:4], logits.value.device
    index = torch.arange(H * W, device=device)
    if queries is not None:
        y, x = checked_queries(queries, size, device)
        index = y * W + x
        logits = _of(logits, y, x) if isinstance(logits, MapLogits) else logits
    values = weights_of(logits) if softmax else summed(logits)
    if isinstance(logits, WindowLogits):
        of_queries = values.flatten(2, 3)[:, :, index]
        values = _laid_out(of_queries, _windows(defined(logits)), keys, index, 0.0 if softmax else -math.inf)
    else:
        assert isinstance(logits, MapLogits)
        grid = (H, W) if queries is None else (len(index), 1)
        prefix = 0 if logits.prefix_value is None else logits.prefix_value.shape[2]
        values = values.expand(-1, -1, *grid, -1).flatten(2, 3)[..., prefix:]
    values = unflatten(values, 3, keys)
    return unflatten(values, 2, (H, W)) if queries is None else values


def _of(logits: MapLogits, y: Tensor, x: Tensor) -> MapLogits:
    """Select the queries at rows ``y`` and columns ``x`` of a map, as a column."""

    def chosen(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return tensor[:, :, y if tensor.shape[2] > 1 else 0 * y, x if tensor.shape[3] > 1 else 0 * x].unsqueeze(3)

    query, row, column = map(chosen, (logits.query, logits.row_logits, logits.column_logits))
    return logits._replace(query=query, row_logits=row, column_logits=column)


def _windows(logits: WindowLogits) -> reference.Windows:
    leader = logits.position_logits if logits.query is None else logits.query
    assert leader is not None
    kernel, dilation, padding = logits.kernel_size, logits.dilation, logits.padding
    if padding is None:
        padding = [size // 2 * step for size, step in zip(kernel, dilation)]
    queries, keys = leader.shape[2:4], logits.value.shape[2:4]
    return reference.Windows(
        queries, keys, kernel, logits.stride, padding, dilation, logits.value.device, logits.border
    )


def _laid_out(taps: Tensor, windows: reference.Windows, keys: Sequence[int], queries: Tensor, beyond: float) -> Tensor:
    """Lay out values of the windows of ``queries``, (B, M, Q, n), on the map, (B, M, Q, Hk * Wk), else ``beyond``."""
    number = keys[0] * keys[1]
    index = windows.rows[:, None, :, None] * keys[1] + windows.columns[:, None, :]
    index = torch.where(windows.inside, index, number).flatten(2).flatten(0, 1)[queries]  # outside: one extra entry
    maps = taps.new_full((*taps.shape[:3], number + 1), beyond).scatter(3, index.expand_as(taps), taps)
    return maps[..., :number]
