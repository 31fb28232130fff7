"""The tensors of one call of each operator, in the operator's order."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# query, key, value, row, column and key logits
GlobalTerms = tuple[Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]


class SequenceTerms(NamedTuple):
    """The tensors of one call, in the operator's order."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor
    band_logits: Tensor | None
    outside_logits: Tensor | None
    position_logits: Tensor | None
