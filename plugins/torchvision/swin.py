"""Window attention of torchvision's Swin and Swin V2 on this package's operator.

torchvision computes with the weights of ``qkv`` and ``proj`` and does not call these layers, so neither does our code.
Its own code runs while attention weights are dropped and where it was measured to be faster
(``modules.tokens.window_speed``). Masks of shifted windows are -inf instead of -100.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..modules.tokens.parts.partition import attend_by_cosine, attend_in_segments, on_windows
from ..modules.tokens.parts.token_moves import grouped_qkv
from ..modules.tokens.parts.window_speed import stock_is_faster
from ..replacement import Place

Stock = Callable[..., Tensor]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, "Tensor | None"], Tensor]


def swin(stock: Stock, attn: Any, x: Tensor) -> Tensor:
    """Compute ``ShiftedWindowAttention.forward``: (B, H, W, C) -> (B, H, W, C)."""
    if _drops_weights(attn) or stock_is_faster("Swin", x, attn):
        return stock(attn, x)
    scale = (x.shape[3] // attn.num_heads) ** -0.5

    def attend(q: Tensor, k: Tensor, v: Tensor, logits: Tensor, segments: Tensor | None) -> Tensor:
        return attend_in_segments(q, k, v, logits, segments, scale)

    return _in_windows(attn, x, attn.qkv.bias, attend)


def swin_v2(stock: Stock, attn: Any, x: Tensor) -> Tensor:
    """Compute ``ShiftedWindowAttentionV2.forward``: (B, H, W, C) -> (B, H, W, C)."""
    if _drops_weights(attn) or stock_is_faster("Swin V2", x, attn):
        return stock(attn, x)
    bias = attn.qkv.bias
    if bias is not None:  # keys have none
        query_bias, key_bias, value_bias = bias.chunk(3)
        bias = torch.cat((query_bias, torch.zeros_like(key_bias), value_bias))

    def attend(q: Tensor, k: Tensor, v: Tensor, logits: Tensor, segments: Tensor | None) -> Tensor:
        return attend_by_cosine(q, k, v, logits, segments, attn.logit_scale)

    return _in_windows(attn, x, bias, attend)


def _drops_weights(attn: Any) -> bool:
    return attn.training and attn.attention_dropout > 0


def _in_windows(attn: Any, x: Tensor, bias: Tensor | None, attend: Attend) -> Tensor:
    """Attend from queries, keys and values (n, M, N, d) of all windows with the layer's position logits."""
    logits = attn.get_relative_position_bias()

    def compute(tokens: Tensor, segments: Tensor | None) -> Tensor:
        projected = F.linear(tokens, attn.qkv.weight, bias)
        ((q, k, v),) = grouped_qkv(projected, (tokens.shape[0],), attn.num_heads)
        output = F.linear(attend(q, k, v, logits, segments), attn.proj.weight, attn.proj.bias)
        return F.dropout(output, attn.dropout, attn.training)  # in the order of windows, so that it draws as stock does

    (h, w), (H, W) = attn.window_size, x.shape[1:3]
    shift = (attn.shift_size[0] if h < H else 0, attn.shift_size[1] if w < W else 0)
    return on_windows(x, (h, w), shift, compute)


MODULE = "torchvision.models.swin_transformer"
PLACES = (Place(MODULE, "ShiftedWindowAttention", swin), Place(MODULE, "ShiftedWindowAttentionV2", swin_v2))
