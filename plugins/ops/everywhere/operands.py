"""What calls of the operators of this region work on, whichever backend serves them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class GlobalTerms(NamedTuple):
    """The tensors of global attention that have gradients."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor
    row_logits: Tensor | None
    column_logits: Tensor | None
    key_logits: Tensor | None

    def grid(self) -> tuple[int, int]:
        """Return the queries' (Hq, Wq): the query's, else those of the logits that have them, or 1."""
        if self.query is not None:
            return self.query.shape[2], self.query.shape[3]
        Hq = Wq = 1
        for tensor in (self.row_logits, self.column_logits):
            if tensor is not None:
                Hq = tensor.shape[2] if Hq == 1 else Hq
                Wq = tensor.shape[3] if Wq == 1 else Wq
        return Hq, Wq


class GlobalOptions(NamedTuple):
    """What of global attention is no tensor."""

    scale: float


class SequenceTerms(NamedTuple):
    """The tensors of sequence attention that have gradients."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor
    band_logits: Tensor | None
    outside_logits: Tensor | None
    position_logits: Tensor | None

    def queries(self) -> int:
        """T, of the tensors that have it, or 1."""
        if self.query is not None:
            return self.query.shape[2]
        T = 1
        for logits in (self.band_logits, self.outside_logits, self.position_logits):
            T = logits.shape[2] if logits is not None and T == 1 else T
        return T


class SequenceOptions(NamedTuple):
    """Which keys a query sees, and the scale."""

    key_padding_mask: Tensor | None
    start: int
    causal: bool
    scale: float
