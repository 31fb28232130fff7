"""What ``attention_logits`` of every module shows: the names of its terms, and the parameters that they depend on."""

from __future__ import annotations

from typing import Any

# Terms of the logits by class, and of the variants that have others.
BOTH, ALL = "content position", "content content_position saliency position"
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
    **dict.fromkeys(("DynamicConv2d", "GeneralizedAttention2d, strides"), "position"),
    **dict.fromkeys(("GeneralizedAttention2d, 0010", "MultiheadSpatialAttention, 0010"), "saliency"),
    **dict.fromkeys(("GeneralizedAttention2d", "MultiheadSpatialAttention"), ALL),
    "GeneralizedAttention2d, 0110": "content_position saliency",
    "GeneralizedAttention2d, 1101": "content content_position position",
    "LocalBilateralConv2d": "content geometric",
    "LocalBilateralConv2d, geometric": "geometric",
    "MultiheadSpatialAttention, range": "content_position saliency position",
}  # fmt: skip
# Parameters without which there is no such term. An augmented convolution has keys among others.
SILENT = {
    "content": ("phi", "key_conv", "key.", "k_proj"),
    "position": ("position", "height_rel", "width_rel", "key_table", "rpb"),
}
SILENT["geometric"] = SILENT["position"]


def entry(table: dict[str, Any], name: str) -> Any:
    return table.get(name, table.get(name.split(",")[0]))
