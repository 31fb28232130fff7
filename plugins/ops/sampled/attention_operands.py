"""What a call of deformable attention works on, whichever backend serves it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import SymInt, Tensor


class Terms(NamedTuple):
    """The tensors, all of which have gradients: (B, S, M, d), (B, Q, M, P, 2) and (B, Q, M, P)."""

    value: Tensor
    locations: Tensor
    weights: Tensor


class Options(NamedTuple):
    """The maps that the S values are: rows and columns of each, and how many of the P points sample it."""

    shapes: Sequence[SymInt]
    points: Sequence[int]

    def levels(self) -> list[tuple[int, int, int]]:
        """Rows, columns and points of every level."""
        return [(int(h), int(w), n) for h, w, n in zip(self.shapes[::2], self.shapes[1::2], self.points)]
