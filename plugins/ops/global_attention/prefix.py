"""Prefix keys, such as class tokens and registers, added to a map as further cells.

If no logits depend on rows or columns, the map is treated as a sequence, and the prefix precedes it. Otherwise the map
grows by a rows and b columns, the prefix fills the new corner, and the other new cells are masked:

    keys | -inf
    -----+-------
    -inf | prefix

Row and column logits are 0 in the corner, since prefix keys have no position. (H + a) * (W + b) cells are computed for
H * W + P keys: 14 % more for 14 x 14 and a class token, and 14 % more for 37 x 37 and 5 tokens.

Shapes: B batch, M heads, (H, W) keys of the map, P prefix keys, d and dv widths.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...core.arguments import check_tensors
from ...core.axes import unflatten
from .operands import Terms


def with_prefix(terms: Terms, prefix_key: Tensor | None, prefix_value: Tensor | None) -> Terms:
    """Add prefix keys to the map.

    Args:
        terms: Terms of the map, already checked.
        prefix_key: (B, M, P, d); None without a content term.
        prefix_value: (B, M, P, dv).

    Raises:
        ValueError: A shape or a device does not match, or one of the two is missing.
        TypeError: Their dtype is not that of the value.
    """
    query, key, value, row_logits, column_logits, key_logits = terms
    _check(query, value, prefix_key, prefix_value)
    assert prefix_value is not None
    P = prefix_value.shape[2]
    if P == 0:
        return terms
    if row_logits is None and column_logits is None:
        return terms._replace(
            key=None if key is None or prefix_key is None else _line(prefix_key, key),
            value=_line(prefix_value, value),
            key_logits=None if key_logits is None else pad(key_logits.flatten(2), (P, 0)).unsqueeze(2),
        )
    H, W = value.shape[2:4]
    a, b = corner(H, W, P)
    row, column = torch.arange(H + a, device=value.device).unsqueeze(1), torch.arange(W + b, device=value.device)
    inside, place = (row >= H) & (column >= W), (row - H) * b + column - W
    hidden = torch.logical_xor(row >= H, column >= W) | (inside & (place >= P))
    mask = torch.zeros(1, 1, H + a, W + b, dtype=value.dtype, device=value.device).masked_fill(hidden, -math.inf)
    return terms._replace(
        key=None if key is None or prefix_key is None else _square(prefix_key, key, a, b),
        value=_square(prefix_value, value, a, b),
        row_logits=None if row_logits is None else pad(row_logits, (0, a)),
        column_logits=None if column_logits is None else pad(column_logits, (0, b)),
        key_logits=mask if key_logits is None else pad(key_logits, (0, b, 0, a)) + mask,
    )


def corner(H: int, W: int, P: int) -> tuple[int, int]:
    """Return the numbers of rows and columns to add for P keys that make the smallest map."""
    best = (1, P)
    for a in range(2, P + 1):  # `min` with a key would break the graph of `torch.compile`
        b = -(-P // a)
        if (H + a) * (W + b) < (H + best[0]) * (W + best[1]):
            best = (a, b)
    return best


def _line(prefix: Tensor, cells: Tensor) -> Tensor:
    """Join (B, M, P, width) and (B, M, H, W, width) to (B, M, 1, P + H * W, width)."""
    return torch.cat((prefix, cells.flatten(2, 3)), 2).unsqueeze(2)


def _square(prefix: Tensor, cells: Tensor, a: int, b: int) -> Tensor:
    """Join (B, M, P, width) and (B, M, H, W, width) to (B, M, H + a, W + b, width), with 0 in cells without a key."""
    B, M, H, W, width = cells.shape
    square = unflatten(pad(prefix, (0, 0, 0, a * b - prefix.shape[2])), 2, (a, b))
    right, below = cells.new_zeros(()).expand(B, M, H, b, width), cells.new_zeros(()).expand(B, M, a, W, width)
    return torch.cat((torch.cat((cells, right), 3), torch.cat((below, square), 3)), 2)


def _check(query: Tensor | None, value: Tensor, prefix_key: Tensor | None, prefix_value: Tensor | None) -> None:
    if prefix_value is None or (prefix_key is None) != (query is None):
        raise ValueError(
            "prefix_key and prefix_value must be given together, but prefix_key must be None where query and key are"
        )
    check_tensors("value", value=value, prefix_key=prefix_key, prefix_value=prefix_value)
    B, M, _, _, dv = value.shape
    P = prefix_value.shape[2] if prefix_value.dim() == 4 else 0
    if prefix_value.shape != (B, M, P, dv):
        raise ValueError(
            f"prefix_value must have shape (B, M, P, dv), ({B}, {M}, P, {dv}) of value, got {tuple(prefix_value.shape)}"
        )
    if query is not None and prefix_key is not None and prefix_key.shape != (B, M, P, query.shape[4]):
        raise ValueError(
            f"prefix_key must have shape {(B, M, P, query.shape[4])} = (B, M, P, d) of prefix_value and query, "
            f"got {tuple(prefix_key.shape)}"
        )
