"""Learned biases over the relative positions of windows that stay inside the map (Hassani et al. 2023, section 3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.axes import unflatten
from ..ops.window_attention.operands import first_keys


def neighborhood_logits(
    table: Tensor, size: Sequence[int], kernel_size: Sequence[int], dilation: Sequence[int] = (1, 1)
) -> Tensor:
    """Look up the position logits of ``window_attention(border='inside')``, whose taps are at other distances by query.

    Args:
        table: (M, 2K - 1, 2L - 1), of which entry (K - 1 + y, L - 1 + x) is for keys y dilations below a query and x to
            its right.
        size: (H, W) of the map.
        kernel_size: Taps along both axes, at most (K, L).
        dilation: Distance of neighboring taps along both axes.

    Returns:
        (1, M, H, W, taps), which all images share.
    """
    for axis in range(2):
        n, taps, step = size[axis], kernel_size[axis], dilation[axis]
        keys, query = first_keys(n, taps, step, table.device), torch.arange(n, device=table.device)
        first = torch.div(keys - query, step, rounding_mode="floor") + table.shape[1 + axis] // 2
        index = first.unsqueeze(1) + torch.arange(taps, device=table.device)
        table = table.index_select(1 + axis, index.flatten())
        # (M, H * Ky, ·), then (M, H * Ky, W * Kx)
    (H, W), (Ky, Kx) = size, kernel_size
    laid_out = unflatten(unflatten(table, 2, (W, Kx)), 1, (H, Ky))
    return laid_out.transpose(2, 3).flatten(3).unsqueeze(0)
