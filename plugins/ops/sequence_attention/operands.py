"""Operands of sequence attention."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Terms(NamedTuple):
    """Tensors of sequence attention that have gradients."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor
    band_logits: Tensor | None
    outside_logits: Tensor | None
    position_logits: Tensor | None

    def queries(self) -> int:
        """Return T, of ``query`` if there is one, else of the logits, where 1 broadcasts."""
        if self.query is not None:
            return self.query.shape[2]
        T = 1
        for logits in (self.band_logits, self.outside_logits, self.position_logits):
            T = logits.shape[2] if logits is not None and T == 1 else T
        return T


class Options(NamedTuple):
    """Arguments of sequence attention that have no gradients."""

    key_padding_mask: Tensor | None
    start: int
    causal: bool
    scale: float
    segment_ids: Tensor | None = None
