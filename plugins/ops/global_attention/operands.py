"""Operands of global attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Terms(NamedTuple):
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

    def logits(self, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor | None]:
        """Expand row and column logits to ``shape``, (B, M, Hq, Wq), and their keys; key logits to (B, M, Hk * Wk)."""
        _, _, value, row, column, key = self
        Hk, Wk = value.shape[2:4]
        return [
            None if row is None else row.to(dtype).expand(*shape, Hk),
            None if column is None else column.to(dtype).expand(*shape, Wk),
            None if key is None else key.to(dtype).flatten(2).contiguous().expand(*shape[:2], Hk * Wk),
        ]


class Options(NamedTuple):
    """Arguments of global attention other than tensors."""

    scale: float
