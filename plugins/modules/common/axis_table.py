"""Tables of relative positions along one axis: sine encodings of the offsets, projected by a layer."""

from __future__ import annotations

from torch import Tensor, nn

from ...core.axes import unflatten
from .bypass import untouched


def axis_table(projection: nn.Module, encoding: Tensor, num_heads: int) -> Tensor:
    """Project the encodings of D offsets, (D, width), to a table of M heads, (M, d, D).

    The layer is called, not its weight read: it may be quantized, offloaded, adapted or observed.
    """
    if not untouched(projection, nn.Linear):
        encoding = encoding.clone()  # encodings are cached, and code of others may write to its input
    return unflatten(projection(encoding), 1, (num_heads, -1)).permute(1, 2, 0)
