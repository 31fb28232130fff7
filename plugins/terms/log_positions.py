"""Log-spaced continuous relative positions: a small network predicts their logits (Liu et al. 2022, Eq. 3 and 4).

coordinates = log_coordinates(size)                  the network's input, (2 Wh - 1, 2 Ww - 1, 2)
table = bounded_logits(net(coordinates).flatten(0, 1))
logits = table_logits(table, size)                   of ``position_table``: (M, N, N)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .map_size import check_size


def log_coordinates(
    size: Sequence[int], pretrained: Sequence[int] | None = None, *, device: torch.device | str | None = None
) -> Tensor:
    """Compute the offsets of a window as sign(x) * log2(1 + |x|) / 3, where x = 8 Δ / (W - 1).

    In pretraining x is from -8 to 8. The paper's Eq. 4 has neither this range nor the divisor log2(8) = 3; they come
    from the published code, as in timm.

    Args:
        size: (Wh, Ww).
        pretrained: Window of pretraining, whose sides W scale the offsets; ``size`` if None. The only offset of a
            side of 1 is 0.
        device: Device of the result.

    Returns:
        (2 Wh - 1, 2 Ww - 1, 2), float32: offsets of rows, then of columns, in the order of a table's entries.

    Raises:
        ValueError: ``size`` or ``pretrained`` is not two ints of at least 1.
    """
    H, W = check_size("size", size)
    largest = check_size("pretrained", pretrained) if pretrained is not None else (H, W)
    axes = []
    for length, scale in zip((H, W), largest):
        x = torch.arange(1 - length, length, device=device).float() / max(scale - 1, 1) * 8
        axes.append(x.sign() * torch.log2(x.abs() + 1.0) / math.log2(8))
    return torch.stack((axes[0].unsqueeze(1).expand(-1, 2 * W - 1), axes[1].unsqueeze(0).expand(2 * H - 1, -1)), dim=-1)


def bounded_logits(table: Tensor) -> Tensor:
    """Return 16 * sigmoid(table), which keeps position logits from dominating the content term (published code)."""
    return 16 * torch.sigmoid(table)
