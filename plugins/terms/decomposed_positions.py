"""Decomposed relative positions: q·R_h + q·R_w, with tables over row and column offsets (Li et al. 2022, MViTv2).

SAM, ViTDet and MViTv2 use them. The products are row and column logits, so ``global_attention`` adds them without a
tensor of pairs. The index order follows these models: entry L - 1 + q - k of a table, not k - q. The query is unscaled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .map_size import check_size
from .size_cache import cached


def decomposed_logits(
    query: Tensor, row_table: Tensor, column_table: Tensor, key_size: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the products of queries with the table entries of all rows and all columns of keys.

    Args:
        query: (B, M, H, W, d), before the content term's scale.
        row_table: (2L - 1, d), shared by the heads; interpolated if L differs from the larger of H and Hk.
        column_table: (2L - 1, d), likewise for W and Wk.
        key_size: (Hk, Wk), the size of pooled keys; (H, W) if None.

    Returns:
        ``row_logits`` (B, M, H, W, Hk) and ``column_logits`` (B, M, H, W, Wk).

    Raises:
        ValueError: ``query`` does not have five axes, a table does not have its width or an odd number of rows, or
            ``key_size`` is not two ints of at least 1.
    """
    if query.dim() != 5:
        raise ValueError(f"query must have shape (B, M, H, W, d), got {tuple(query.shape)}")
    for name, table in (("row_table", row_table), ("column_table", column_table)):
        if table.dim() != 2 or table.shape[1] != query.shape[4] or table.shape[0] % 2 == 0:
            raise ValueError(f"{name} must have shape (2L - 1, {query.shape[4]}), got {tuple(table.shape)}")
    H, W = query.shape[2:4]
    Hk, Wk = check_size("key_size", key_size) if key_size is not None else (H, W)
    rows = torch.einsum("bmhwd,hkd->bmhwk", query, axis_embeddings(row_table, H, Hk))
    columns = torch.einsum("bmhwd,wkd->bmhwk", query, axis_embeddings(column_table, W, Wk))
    return rows, columns


def axis_embeddings(table: Tensor, queries: int, keys: int) -> Tensor:
    """Look up the table entry of every pair of a query and a key along one axis.

    The axis with fewer positions is stretched to the other one. If the factor is not an integer, an offset between
    two entries uses the lower one, as the published code does.

    Args:
        table: (2L - 1, d); interpolated if L differs from the larger of ``queries`` and ``keys``.
        queries: Q, rows or columns of queries.
        keys: K, rows or columns of keys.

    Returns:
        (Q, K, d).
    """
    table = resize_offsets(table, max(queries, keys))
    return table.index_select(0, _flat_index(queries, keys, table.device)).unflatten(0, (queries, keys))


@cached
def _flat_index(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return the table entry of every pair, (Q * K,)."""
    places = max(queries, keys)
    # float32 as in the published code, so that offsets are truncated alike.
    q = torch.arange(queries, device=device, dtype=torch.float32) * (places / queries)
    stretch = places / keys
    k = torch.arange(keys, device=device, dtype=torch.float32) * stretch
    return (q.unsqueeze(1) - k + (keys - 1) * stretch).long().flatten()


def resize_offsets(table: Tensor, length: int) -> Tensor:
    """Interpolate a table over offsets to another axis length, as in the code of SAM and ViTDet.

    Interpolation is linear between the centres of entries; ``relative_table.resize_table`` keeps the first and the
    last entry instead.

    Args:
        table: (2L - 1, d).
        length: The new axis length L'.

    Returns:
        (2L' - 1, d), in the table's dtype; ``table`` itself if L' = L.
    """
    rows = 2 * length - 1
    if table.shape[0] == rows:
        return table
    wide = table.float() if table.dtype in (torch.float16, torch.bfloat16) else table
    return F.interpolate(wide.t().unsqueeze(0), rows, mode="linear").squeeze(0).t().to(table.dtype)
