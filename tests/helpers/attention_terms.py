"""The names of the terms that ``attention_logits`` of every module shows."""

from __future__ import annotations

from typing import Any

# Of modules without an attention_type, by class, and of the variants that have others.
BOTH = "content position"
NAMES = {
    **dict.fromkeys(
        ("AAConv2d", "BilateralCrissCross2d", "BilateralNonLocal2d", "BilateralSelfAttention", "NonLocal2d, both",
         "CrissCrossAttention2d, relative", "CrissCrossAttention2d, resized", "NonLocal2d, relative",
         "NeighborhoodAttention1d", "NeighborhoodAttention2d", "RelativeSelfAttention"), BOTH,
    ),
    **dict.fromkeys(
        ("AAConv2d, no convolution", "AAConv2d, sine", "CrissCrossAttention2d", "LocalBilateralConv2d, content",
         "MultiheadAttention", "NeighborhoodAttention2d, content", "NonLocal2d"), "content",
    ),
    "DynamicConv2d": "position",
    "LocalBilateralConv2d": "content geometric",
    "LocalBilateralConv2d, geometric": "geometric",
}  # fmt: skip


def entry(table: dict[str, Any], name: str) -> Any:
    return table.get(name, table.get(name.split(",")[0]))
