"""Operands of deformable attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import SymInt, Tensor


class Terms(NamedTuple):
    """Tensors, all with gradients: (B, S, M, d), (B, Q, M, P, 2) and (B, Q, M, P), where P may be several axes."""

    value: Tensor
    locations: Tensor
    weights: Tensor


class Options(NamedTuple):
    """Rows and columns of the levels that make up the S values, and how many of the P points sample each.

    ``propagates_nan``: locations that are not finite read NaN, not 0.
    """

    shapes: Sequence[SymInt]
    points: Sequence[int]
    propagates_nan: bool = False

    def levels(self) -> list[tuple[Any, Any, int]]:
        """Return rows, columns and number of points of every level."""
        return [(h, w, n) for h, w, n in zip(self.shapes[::2], self.shapes[1::2], self.points)]
