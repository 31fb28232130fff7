"""State of step-by-step decoding: keys and values of previous steps.

Shapes: B batch, M heads, S keys, d width per head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class SequenceCache:
    """Keys and values of previous steps, initially empty and filled by the attention module.

    A cache belongs to one module and one batch. Beam search calls ``reorder`` between steps.

    Attributes:
        key: Projected keys, (B, M, S, d); None if the module has no key projection.
        value: Projected values, (B, M, S, d); None before the first step.
        key_padding_mask: (B, S) bool; None without padding.
        shift: (B,), number of leading padding keys that were moved to the end; None if keys were not moved.
        table: Projected encodings of offsets, kept for later steps.
        steps: Number of queries so far, which is the absolute position of the next one.
    """

    key: Tensor | None = None
    value: Tensor | None = None
    key_padding_mask: Tensor | None = None
    shift: Tensor | None = None
    table: Tensor | None = None
    steps: int = 0

    def reorder(self, order: Tensor) -> SequenceCache:
        """Replace row i of the batch by row ``order[i]``.

        Args:
            order: (B',) integers; B' becomes the batch size.

        Returns:
            This cache.
        """
        for name in ("key", "value", "key_padding_mask", "shift"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, order))
        return self

    def append(self, key: Tensor | None, value: Tensor, key_padding_mask: Tensor | None) -> None:
        """Append the keys and values of a step."""
        if self.value is not None:
            if key_padding_mask is not None or self.key_padding_mask is not None:
                old, new = _mask(self.key_padding_mask, self.value), _mask(key_padding_mask, value)
                key_padding_mask = torch.cat((old, new), 1)
            if key is not None and self.key is not None:
                key = torch.cat((self.key, key), 2)
            value = torch.cat((self.value, value), 2)
        self.key, self.value, self.key_padding_mask = key, value, key_padding_mask

    def keep(self, number: int) -> None:
        """Keep only the last ``number`` keys."""
        if self.value is not None and self.value.shape[2] > number:
            first = self.value.shape[2] - number
            self.key = None if self.key is None else self.key[:, :, first:]
            self.value = self.value[:, :, first:]
            self.key_padding_mask = None if self.key_padding_mask is None else self.key_padding_mask[:, first:]


def _mask(mask: Tensor | None, value: Tensor) -> Tensor:
    B, _, S, _ = value.shape
    return torch.zeros(B, S, dtype=torch.bool, device=value.device) if mask is None else mask


def reordered(state: Any, order: Tensor) -> Any:
    """Return the state of a recurrent or convolutional decoder with row i taken from row ``order[i]``.

    Args:
        state: A tensor whose first axis is the batch, or a (named) tuple of such states.
        order: (B',) integers.
    """
    if isinstance(state, Tensor):
        return state.index_select(0, order)
    parts = [reordered(part, order) for part in state]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def check_cache(cache: SequenceCache, B: int) -> None:
    """Check that ``cache`` is a SequenceCache of batch size B."""
    if not isinstance(cache, SequenceCache):
        raise TypeError(f"cache must be a SequenceCache, got {type(cache).__name__}")
    if cache.value is not None and cache.value.shape[0] != B:
        raise ValueError(
            f"cache must be of query's batch size {B}, got one of {cache.value.shape[0]}; reorder changes it"
        )
