"""Operands of global and of sequence attention."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class GlobalTerms(NamedTuple):
    """Tensors of global attention that have gradients."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor
    row_logits: Tensor | None
    column_logits: Tensor | None
    key_logits: Tensor | None

    def grid(self) -> tuple[int, int]:
        """Return (Hq, Wq), of ``query`` if there is one, else of the logits, where 1 broadcasts."""
        if self.query is not None:
            return self.query.shape[2], self.query.shape[3]
        Hq = Wq = 1
        for tensor in (self.row_logits, self.column_logits):
            if tensor is not None:
                Hq = tensor.shape[2] if Hq == 1 else Hq
                Wq = tensor.shape[3] if Wq == 1 else Wq
        return Hq, Wq


class GlobalOptions(NamedTuple):
    """Arguments of global attention other than tensors."""

    scale: float


class SequenceTerms(NamedTuple):
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


class SequenceOptions(NamedTuple):
    """Arguments of sequence attention that have no gradients."""

    key_padding_mask: Tensor | None
    start: int
    causal: bool
    scale: float
    segment_ids: Tensor | None = None
