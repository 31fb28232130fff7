"""Log-spaced continuous relative positions, whose logits a small net predicts (Liu et al. 2022, Swin V2, Eq. 3 and 4).

coordinates = log_coordinates(size)                  the net's input, (2 Wh - 1, 2 Ww - 1, 2)
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
    """The offsets of a window as sign(x) * log2(1 + |x|) / 3, where x is 8 Δ / (W - 1): from -8 to 8 in pretraining.

    The paper's Eq. 4 has no factor; log2(8) = 3 and the range of 8 are the published code's, in which timm follows.

    Args:
        size: (Wh, Ww).
        pretrained: The window of pretraining, whose W scales the offsets; ``size`` if None. A window of 1 has no
            offset but 0.
        device: Of the result.

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
    """16 * sigmoid(table): between 0 and 16, so that they cannot drown the content term (published code)."""
    return 16 * torch.sigmoid(table)
