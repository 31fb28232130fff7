"""Attention with decomposed relative positions in transformers' SAM, ViTDet and relatives: its places.

The stock code runs where attention weights are asked for or may be read, where they are dropped, where the layer has no
relative positions, and where other code computes the positions. Stock's eager SAM returns its weights in every call,
which its model drops; ours returns None instead, as stock's SDPA layer does. Hooks on an eager layer and a ``forward``
of its own may read the weights, so that the stock code runs under them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..modules.common.bypass import has_global_hooks
from ..modules.tokens.decomposed_attention import decomposed_attention
from ..replacement import Place

Stock = Callable[..., Any]
CAPTURING = "transformers.utils.output_capturing"


def eager(
    stock: Stock, attn: Any, hidden_states: Tensor, output_attentions: bool | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute SAM's eager attention, (B, H, W, C) -> (B, H, W, C), without weights."""
    if output_attentions or weights_are_read(attn) or (attn.training and attn.dropout > 0):
        return stock(attn, hidden_states, output_attentions)
    return sdpa(stock, attn, hidden_states, output_attentions, attn.scale)


def sdpa(
    stock: Stock, attn: Any, hidden_states: Tensor, output_attentions: bool | None = False, scale: float | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute SAM's attention by SDPA, which drops no weights and scales by the width of a head."""
    if output_attentions or not attn.use_rel_pos or has_own_positions(attn):
        return stock(attn, hidden_states, output_attentions)
    tables = attn.rel_pos_h, attn.rel_pos_w
    return decomposed_attention(hidden_states, attn.qkv, attn.proj, tables, attn.num_attention_heads, scale), None


def vitdet(stock: Stock, attn: Any, hidden_state: Tensor, output_attentions: bool = False) -> tuple[Tensor, ...]:
    """Compute ViTDet's attention, which returns weights only if they are asked for."""
    if output_attentions or not attn.use_relative_position_embeddings:
        return stock(attn, hidden_state, output_attentions)
    tables = attn.rel_pos_h, attn.rel_pos_w
    return (decomposed_attention(hidden_state, attn.qkv, attn.proj, tables, attn.num_heads, attn.scale),)


def seggpt(
    stock: Stock, attn: Any, hidden_states: Tensor, output_attentions: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Compute SegGPT's attention."""
    if output_attentions or not attn.use_relative_position_embeddings or has_own_positions(attn):
        return stock(attn, hidden_states, output_attentions)
    tables, heads = (attn.rel_pos_h, attn.rel_pos_w), attn.num_attention_heads
    return decomposed_attention(hidden_states, attn.qkv, attn.proj, tables, heads, attn.scale), None


def weights_are_read(attn: Any) -> bool:
    """Return whether somebody may read the weights that an eager layer returns in every call."""
    if has_global_hooks() or "forward" in vars(attn):
        return True
    return any(_reads(hook) for hook in attn._forward_hooks.values())


def _reads(hook: Any) -> bool:
    """Return whether a hook reads weights now: transformers' own stay after the first ``output_attentions=True``."""
    if torch.compiler.is_compiling() or getattr(hook, "__module__", None) != CAPTURING:
        return True
    recorded = hook.__globals__["_active_collector"].get()
    return recorded is not None and any("attentions" in key for key in recorded)


def has_own_positions(attn: Any) -> bool:
    """Return whether other code, such as a derived class, computes the positions of a layer."""
    return any(_is_foreign(attn, name) for name in POSITIONS)


def _is_foreign(attn: Any, name: str) -> bool:
    method = getattr(type(attn), name, None)
    return name in vars(attn) or (method is not None and not method.__module__.startswith("transformers."))


POSITIONS = ("get_rel_pos", "get_decomposed_rel_pos", "add_decomposed_rel_pos")


def _place(family: str, layer: str, ours: Callable[..., Any], positions: str = "use_rel_pos") -> Place:
    module = f"transformers.models.{family}.modeling_{family}"
    return Place(module, layer, ours, supports=lambda attn: getattr(attn, positions))


EMBEDDINGS = "use_relative_position_embeddings"
PLACES = (
    _place("sam", "SamVisionAttention", eager),
    _place("sam", "SamVisionSdpaAttention", sdpa),
    _place("sam_hq", "SamHQVisionAttention", eager),
    _place("sam_hq", "SamHQVisionSdpaAttention", sdpa),
    _place("deepseek_ocr2", "DeepseekOcr2SamVisionAttention", eager),
    _place("deepseek_ocr2", "DeepseekOcr2SamVisionSdpaAttention", sdpa),
    _place("unlimited_ocr", "UnlimitedOcrSamVisionAttention", eager),
    _place("unlimited_ocr", "UnlimitedOcrSamVisionSdpaAttention", sdpa),
    _place("got_ocr2", "GotOcr2VisionAttention", eager),
    _place("pp_formulanet", "PPFormulaNetVisionAttention", eager),
    _place("slanext", "SLANeXtVisionAttention", eager),
    _place("vitdet", "VitDetAttention", vitdet, EMBEDDINGS),
    _place("seggpt", "SegGptAttention", seggpt, EMBEDDINGS),
)
