"""timm's attention on this package's operators: the places of its Swin, SAM and MViTv2.

::

    model = timm.create_model("swin_tiny_patch4_window7_224", pretrained=True)
    attn_plugins.timm.accelerate(model)

timm does not let the user choose the attention layers of these models. Outputs and gradients equal timm's up to
rounding, in training and evaluation, except that masks of shifted windows are -inf instead of -100. timm's own code
runs where others take part in what is replaced: dropout of weights, also in evaluation; hooks of any kind on a window
attention, its ``softmax`` or ``attn_drop``, or on all modules; and replacements of these modules or of their
``forward``. So it does in eager calls of Swin and Swin V2 on CUDA where it was measured to be faster
(``modules.tokens.window_speed``), unless ``ATTN_PLUGINS_STOCK_IF_FASTER=0`` is in the environment.
``torch.compile(fullgraph=True, dynamic=True)`` supports Swin with symbolic sizes, and recompiles for another image size
as it does for timm's layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timm.models import mvitv2, swin_transformer, swin_transformer_v2
from torch import Tensor

from ..core.axes import unflatten
from ..modules.tokens.parts.window_speed import stock_is_faster
from ..modules.tokens.parts.windows import (
    Fill,
    TableAttention,
    in_windows,
    needs_weights,
    on_tokens,
    predicted_logits,
    project_v2,
)
from ..ops import global_attention, sequence_attention
from ..replacement import Place, accelerate
from ..terms.decomposed_positions import decomposed_logits
from ..terms.position_table import table_logits

__all__ = ["accelerate"]

Stock = Callable[..., Any]


def swin_windows(stock: Stock, block: Any, x: Tensor) -> Tensor:
    """Compute ``SwinTransformerBlock._attn``: (B, H, W, C) -> (B, H, W, C)."""
    attn = block.attn
    if needs_weights(attn, swin_transformer.WindowAttention) or stock_is_faster("Swin", x, attn):
        return stock(block, x)
    logits = table_logits(attn.relative_position_bias_table, attn.window_size)
    return _attend_windows(block, x, attn.qkv, TableAttention(logits, attn.scale))


def swin_v2_windows(stock: Stock, block: Any, x: Tensor) -> Tensor:
    """Compute ``SwinTransformerV2Block._attn``: (B, H, W, C) -> (B, H, W, C)."""
    attn = block.attn
    if needs_weights(attn, swin_transformer_v2.WindowAttention) or stock_is_faster("Swin V2", x, attn):
        return stock(block, x)
    pretrained = attn.pretrained_window_size if attn.pretrained_window_size[0] > 0 else None
    logits = predicted_logits(attn.cpb_mlp, attn.window_size, pretrained, x)
    attend = TableAttention(logits, logit_scale=attn.logit_scale)

    def project(tokens: Tensor) -> Tensor:
        return project_v2(tokens, attn.qkv, attn.q_bias, attn.v_bias)

    return _attend_windows(block, x, project, attend)


def _attend_windows(block: Any, x: Tensor, project: Callable[[Tensor], Tensor], fill: Fill) -> Tensor:
    attn = block.attn
    output = in_windows(x, block.window_size, block.shift_size, attn.num_heads, project, fill)
    return attn.proj_drop(on_tokens(attn.proj, output))


def sam_attention(stock: Stock, attn: Any, x: Tensor) -> Tensor:
    """Compute SAM's ``Attention.forward``, (B, H, W, C) -> (B, H, W, C), with logits of rows and of columns."""
    if needs_weights(attn):
        return stock(attn, x)
    q, k, v = unflatten(on_tokens(attn.qkv, x), 3, (3, attn.num_heads, -1)).permute(3, 0, 4, 1, 2, 5).unbind(0)
    q, k = attn.q_norm(q), attn.k_norm(k)
    rows, columns = decomposed_logits(q, attn.rel_pos_h, attn.rel_pos_w)
    output = global_attention(q, k, v, row_logits=rows, column_logits=columns, scale=attn.scale)
    return attn.proj_drop(on_tokens(attn.proj, output.permute(0, 2, 3, 1, 4).flatten(3)))


def mvit_attention(stock: Stock, attn: Any, x: Tensor, feat_size: list[int]) -> tuple[Tensor, list[int]]:
    """Compute ``MultiScaleAttention.forward``, pooled attention with logits of rows and of columns."""
    B, N, _ = x.shape
    tokens = attn.qkv(x).reshape(B, N, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    (q, size), (k, key_size), (v, _) = (
        _pooled(attn, part, pool, norm, feat_size)
        for part, pool, norm in zip(
            tokens, (attn.pool_q, attn.pool_k, attn.pool_v), (attn.norm_q, attn.norm_k, attn.norm_v)
        )
    )
    P = int(attn.has_cls_token)
    query, key, value = unflatten(q[:, :, P:], 2, size), unflatten(k[:, :, P:], 2, key_size), v[:, :, P:]
    row_table, column_table = (
        table[: 2 * max(n, m) - 1]  # for a smaller map timm takes the first entries and does not interpolate
        for table, n, m in zip((attn.rel_pos_h, attn.rel_pos_w), size, key_size)
    )
    rows, columns = decomposed_logits(query, row_table, column_table, key_size)
    output = global_attention(
        query,
        key,
        unflatten(value, 2, key_size),
        row_logits=rows,
        column_logits=columns,
        prefix_key=k[:, :, :P] if P else None,
        prefix_value=v[:, :, :P] if P else None,
        scale=attn.scale,
    ).flatten(2, 3)
    if P:
        output = torch.cat((sequence_attention(q[:, :, :P], k, v, scale=attn.scale), output), 2)
    if attn.residual_pooling:
        output = output + q
    return attn.proj(output.transpose(1, 2).reshape(B, -1, attn.dim_out)), size


def _pooled(attn: Any, x: Tensor, pool: Any, norm: Any, size: list[int]) -> tuple[Tensor, list[int]]:
    """Pool the map of tokens (B, M, T, d) in the same way as timm."""
    if pool is not None:
        on_map, cls_token = mvitv2.reshape_pre_pool(x, size, attn.has_cls_token)
        x, size = mvitv2.reshape_post_pool(pool(on_map), attn.num_heads, cls_token)
    return (x if norm is None else norm(x)), size


SWIN, SWIN_V2 = "timm.models.swin_transformer", "timm.models.swin_transformer_v2"
WINDOWS: dict[str, Any] = dict(method="_attn", child=("attn", "WindowAttention"))
PLACES = (
    Place(SWIN, "SwinTransformerBlock", swin_windows, **WINDOWS),
    Place(SWIN_V2, "SwinTransformerV2Block", swin_v2_windows, **WINDOWS),
    Place(
        "timm.models.vision_transformer_sam", "Attention", sam_attention, supports=lambda attn: attn.use_rel_pos
    ),
    Place(
        "timm.models.mvitv2", "MultiScaleAttention", mvit_attention,
        supports=lambda attn: attn.rel_pos_type == "spatial",
    ),
)  # fmt: skip
_BY_CLASS = {(place.module, place.layer): place for place in PLACES}


def place_of(layer: type) -> Place | None:
    """Return the place of a class of timm, or None."""
    return _BY_CLASS.get((layer.__module__, layer.__name__))
