"""What an attention adds up, as records: a map's, a window's and a sequence's, with the arguments of their operators.

Modules and terms fill them; :func:`.attend` computes what they describe, and :mod:`.weights` writes it out.

Shapes: B batch, M heads, T or (Hq, Wq) queries, S or (Hk, Wk) keys, d and dv widths, P prefix keys, n taps of a window.
Size 1 is allowed where the operator allows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ...ops.window_attention.window_attention import Border


class MapLogits(NamedTuple):
    """Arguments of ``global_attention``: all keys of a map.

    Attributes:
        query: (B, M, Hq, Wq, d); None, together with ``key``, for no content.
        key: (B, M, Hk, Wk, d).
        value: (B, M, Hk, Wk, dv).
        row_logits: (B, M, Hq, Wq, Hk).
        column_logits: (B, M, Hq, Wq, Wk).
        key_logits: (B, M, Hk, Wk), the same for all queries.
        prefix_key: (B, M, P, d), keys without a place before those of the map.
        prefix_value: (B, M, P, dv).
        scale: Factor of the content term.
    """

    query: Tensor | None
    key: Tensor | None
    value: Tensor
    row_logits: Tensor | None = None
    column_logits: Tensor | None = None
    key_logits: Tensor | None = None
    prefix_key: Tensor | None = None
    prefix_value: Tensor | None = None
    scale: float = 1.0


class WindowLogits(NamedTuple):
    """Arguments of ``window_attention``: the keys of a map around each query.

    Attributes:
        query: (B, M, Hq, Wq, d); None, together with ``key``, for no content.
        key: (B, M, Hk, Wk, d).
        value: (B, M, Hk, Wk, dv).
        position_logits: (B, M, Hq, Wq, n); without content as well, None for the mean of every window.
        kernel_size: Taps of rows and of columns.
        dilation: Distance of neighboring taps in rows and columns.
        scale: Factor of the content term.
        stride: Distance of neighboring queries in rows and columns.
        padding: Rows and columns before the map at which the first window starts; None to centre the windows.
        border: ``'exclude'`` for keys outside the map, or ``'zero'``; ``'inside'`` for windows that have none.
    """

    query: Tensor | None
    key: Tensor | None
    value: Tensor
    position_logits: Tensor | None
    kernel_size: Sequence[int]
    dilation: Sequence[int] = (1, 1)
    scale: float = 1.0
    stride: Sequence[int] = (1, 1)
    padding: Sequence[int] | None = None
    border: Border = "exclude"


class SequenceLogits(NamedTuple):
    """Arguments of ``sequence_attention``: all keys of a sequence.

    Attributes:
        query: (B, M, T, d); None, together with ``key``, for no content.
        key: (B, M, S, d).
        value: (B, M, S, dv).
        band_logits: (B, M, T, K), around each query.
        outside_logits: (B, M, T) or a number, outside the band.
        position_logits: (B, M, T, S).
        causal: Whether keys after the query are left out.
        key_padding_mask: (B, S) bool, True at keys to leave out.
        scale: Factor of the content term.
        start: Position of the first query among the keys.
        segment_ids: (·, S) int32.
        shift: (B,), number of leading keys that were moved to the end, for :mod:`.weights`.
    """

    query: Tensor | None
    key: Tensor | None
    value: Tensor
    band_logits: Tensor | None = None
    outside_logits: Tensor | float | None = None
    position_logits: Tensor | None = None
    causal: bool = False
    key_padding_mask: Tensor | None = None
    scale: float = 1.0
    start: int = 0
    segment_ids: Tensor | None = None
    shift: Tensor | None = None


Logits = MapLogits | WindowLogits | SequenceLogits
Filled = TypeVar("Filled", WindowLogits, SequenceLogits)
Kind = TypeVar("Kind", bound=Logits)


def defined(logits: Filled) -> Filled:
    """Add zeros where an operator needs a term that has queries, and none has."""
    if logits.query is not None or logits.position_logits is not None:
        return logits
    value = logits.value
    if isinstance(logits, WindowLogits):
        Hk, Wk = value.shape[2:4]
        taps = logits.kernel_size[0] * logits.kernel_size[1]
        return logits._replace(position_logits=value.new_zeros(1).expand(1, 1, Hk, Wk, taps))
    if logits.band_logits is not None:
        return logits
    return logits._replace(position_logits=value.new_zeros(1, 1, 1, value.shape[2]))


def as_content(key_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return key logits (B, M, ·) as query and key: a product with 1, for operators without an argument for them."""
    return torch.ones_like(key_logits).unsqueeze(-1), key_logits.unsqueeze(-1)
