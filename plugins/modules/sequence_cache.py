"""What attention on sequences shares: heads, checks, dropout, and what decoding step by step keeps.

Shapes: B batch, C channels, M heads, T queries, S keys, d width per head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops import reference
from ..ops import sequence_attention as attend
from .checks import check_fits, check_tensor, positive


@dataclass
class SequenceCache:
    """Keys and values of the steps before: made empty, and filled by the attention module that is given it.

    One cache belongs to one module and one batch. Beam search calls ``reorder`` between two steps.

    Attributes:
        key: (B, M, S, d), projected; None where the module has no key projection.
        value: (B, M, S, d), projected; None before the first step.
        key_padding_mask: (B, S) bool, or None where nothing is padding.
        shift: (B,), by how much the keys were moved to begin with the first that is not padding; None: not at all.
        table: Projected encodings of offsets, so that a step does not project them again.
        steps: How many queries were answered: the absolute position of the next one.
    """

    key: Tensor | None = None
    value: Tensor | None = None
    key_padding_mask: Tensor | None = None
    shift: Tensor | None = None
    table: Tensor | None = None
    steps: int = 0

    def reorder(self, order: Tensor) -> SequenceCache:
        """Let row i of the batch go on from what was row ``order[i]``; as many rows as ``order`` has. Returns itself.

        Args:
            order: (B',) integers.
        """
        for name in ("key", "value", "key_padding_mask", "shift"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, order))
        return self

    def append(self, key: Tensor | None, value: Tensor, key_padding_mask: Tensor | None) -> None:
        """Put the keys of a step behind those before."""
        if self.value is not None:
            if key_padding_mask is not None or self.key_padding_mask is not None:
                old, new = _mask(self.key_padding_mask, self.value), _mask(key_padding_mask, value)
                key_padding_mask = torch.cat((old, new), 1)
            if key is not None and self.key is not None:
                key = torch.cat((self.key, key), 2)
            value = torch.cat((self.value, value), 2)
        self.key, self.value, self.key_padding_mask = key, value, key_padding_mask

    def keep(self, number: int) -> None:
        """Forget all keys but the last ``number``."""
        if self.value is not None and self.value.shape[2] > number:
            first = self.value.shape[2] - number
            self.key = None if self.key is None else self.key[:, :, first:]
            self.value = self.value[:, :, first:]
            self.key_padding_mask = None if self.key_padding_mask is None else self.key_padding_mask[:, first:]


def _mask(mask: Tensor | None, value: Tensor) -> Tensor:
    B, _, S, _ = value.shape
    return torch.zeros(B, S, dtype=torch.bool, device=value.device) if mask is None else mask


def split_heads(projected: Tensor, num_heads: int) -> Tensor:
    """(B, T, M * d) as (B, M, T, d), a view."""
    return projected.unflatten(2, (num_heads, -1)).transpose(1, 2)


def attended(arguments: dict[str, Any], dropout: float) -> Tensor:
    """``sequence_attention`` with a share of its weights dropped; with the heads side by side, (B, T, M * d)."""
    if dropout == 0.0:
        output = attend(**arguments)
    else:
        value = arguments["value"]
        output = torch.matmul(F.dropout(weights_of(arguments).to(value.dtype), dropout), value)
    return output.transpose(1, 2).flatten(2)


def weights_of(arguments: dict[str, Any]) -> Tensor:
    """The weights that ``sequence_attention`` gives its keys, (B, M, T, S), written out."""
    value, outside, start = arguments["value"], arguments.get("outside_logits"), arguments["start"]
    if isinstance(outside, float):
        outside = value.new_full((1, 1, 1), outside)
    return reference.sequence_attention_probabilities(
        arguments["query"],
        arguments["key"],
        value,
        arguments["band_logits"],
        outside,
        arguments.get("position_logits"),
        arguments["key_padding_mask"],
        start,
        arguments["causal"],
        1.0,
    )


def check_heads(embed_dim: int, num_heads: int, dropout: float) -> None:
    """Check the arguments that all attention on sequences takes."""
    positive(embed_dim=embed_dim, num_heads=num_heads)
    if embed_dim % num_heads:
        raise ValueError(f"num_heads must divide embed_dim = {embed_dim}, got {num_heads}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout!r}")


def check_sequence(name: str, x: Tensor, channels: int, weight: Tensor, batch: int | None = None) -> None:
    """Check that ``x`` is (B, T, channels) with a token, on ``weight``'s device and of its dtype."""
    check_tensor(name, x)
    if x.dim() != 3 or x.shape[2] != channels or x.shape[1] == 0:
        raise ValueError(f"{name} must have shape (B, T, {channels}) with at least one token, got {tuple(x.shape)}")
    if batch is not None and x.shape[0] != batch:
        raise ValueError(f"{name} must have query's batch size {batch}, got {x.shape[0]}")
    check_fits(name, x, weight)


def check_padding_mask(mask: Tensor | None, B: int, S: int, device: torch.device) -> None:
    """Check that ``mask`` is (B, S), bool."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = getattr(mask, "dtype", type(mask).__name__)
        raise TypeError(f"key_padding_mask must be a bool Tensor, True for padding, got {kind}")
    if mask.shape != (B, S):
        raise ValueError(f"key_padding_mask must have shape {(B, S)}, one for each key, got {tuple(mask.shape)}")
    if mask.device != device:
        raise ValueError(f"key_padding_mask must be on the module's device {device}, got {mask.device}")


def check_cache(cache: SequenceCache, B: int) -> None:
    """Check that ``cache`` is one, and of a batch of B."""
    if not isinstance(cache, SequenceCache):
        raise TypeError(f"cache must be a SequenceCache, got {type(cache).__name__}")
    if cache.value is not None and cache.value.shape[0] != B:
        raise ValueError(
            f"cache must be of query's batch size {B}, got one of {cache.value.shape[0]}; reorder changes it"
        )
