"""Learned tables over the relative positions of one axis (Bello et al. 2019, Eq. 3), also on maps of another size."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def resize_table(table: Tensor, size: int) -> Tensor:
    """Resize a table over the offsets of one axis to another axis length.

    Interpolation is linear between neighboring offsets; the first, middle (offset 0) and last entries are kept.

    Args:
        table: (2L - 1, d), rows at offsets -(L - 1) ... L - 1.
        size: The new axis length L'.

    Returns:
        (2L' - 1, d); ``table`` itself if L' = L.
    """
    rows = 2 * size - 1
    if table.shape[0] == rows:
        return table
    if rows == 1:  # only offset 0 remains
        middle = table.shape[0] // 2
        return table[middle : middle + 1]
    return F.interpolate(table.t().unsqueeze(0), rows, mode="linear", align_corners=True).squeeze(0).t()
