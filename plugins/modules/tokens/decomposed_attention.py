"""Attention of a map to itself with decomposed relative positions, as layers of SAM and ViTDet compute it.

Shapes: B batch, (H, W) the map, C channels, M heads, d width per head.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...core.axes import unflatten
from ...ops import global_attention
from ...terms.decomposed_positions import decomposed_logits


def decomposed_attention(
    x: Tensor,
    qkv: Callable[[Tensor], Tensor],
    proj: Callable[[Tensor], Tensor],
    tables: tuple[Tensor, Tensor],
    num_heads: int,
    scale: float | None = None,
) -> Tensor:
    """Attend from every token of a map to all of them, with q·R_h + q·R_w added to the logits.

    Args:
        x: (B, H, W, C); the windows of a map are a batch.
        qkv: Projection to queries, keys and values, in this order: (B, H, W, C) -> (B, H, W, 3 * M * d).
        proj: Projection of the heads' outputs, from (B, H, W, M * d).
        tables: Entries of row and of column offsets, (2L - 1, d) each (:func:`decomposed_logits`).
        num_heads: M.
        scale: Factor of the content term; d ** -0.5 if None.

    Returns:
        What ``proj`` returns.
    """
    q, k, v = unflatten(qkv(x), 3, (3, num_heads, -1)).permute(3, 0, 4, 1, 2, 5).unbind(0)
    rows, columns = decomposed_logits(q, *tables)
    scale = q.shape[4] ** -0.5 if scale is None else scale
    output = global_attention(q, k, v, row_logits=rows, column_logits=columns, scale=scale)
    return proj(output.permute(0, 2, 3, 1, 4).flatten(3))
