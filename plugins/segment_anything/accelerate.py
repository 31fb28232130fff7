"""segment_anything's image encoder on this package's operator, with and without windows, as in Cellpose's.

Outputs and gradients equal the stock ones up to rounding. Layers without relative positions keep the stock code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..modules.tokens.decomposed_attention import decomposed_attention
from ..replacement import Place, accelerate

__all__ = ["accelerate"]


def attention(stock: Callable[..., Tensor], attn: Any, x: Tensor) -> Tensor:
    """Compute ``Attention.forward``: (B, H, W, C) -> (B, H, W, C)."""
    if not attn.use_rel_pos:
        return stock(attn, x)
    tables = attn.rel_pos_h, attn.rel_pos_w
    return decomposed_attention(x, attn.qkv, attn.proj, tables, attn.num_heads, attn.scale)


PLACES = (
    Place("segment_anything.modeling.image_encoder", "Attention", attention, supports=lambda attn: attn.use_rel_pos),
)


def place_of(layer: type) -> Place | None:
    """Return the place of a class of segment_anything, or None."""
    return PLACES[0] if (layer.__module__, layer.__name__) == (PLACES[0].module, PLACES[0].layer) else None
