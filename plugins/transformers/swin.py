"""Window attention of transformers' Swin, Swin V2 and relatives: the layers that cut a map into windows.

All modules inside a layer but the attention itself are called as by stock, in the order of windows. The stock code runs
where weights are asked for or dropped; where the attention, its dropout or all modules have hooks, or the first two are
replaced; for Swin on CUDA, and with another ``attn_implementation`` than ``"sdpa"``; and where it was measured to be
faster (``modules.tokens.window_speed``). Masks of shifted windows are -inf instead of -100.

Shapes: B batch, (H, W) the map, C channels, n windows, N tokens of a window, M heads, d width per head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..core.axes import unflatten
from ..modules.common.bypass import has_global_hooks, untouched
from ..modules.tokens.parts.partition import OnWindows, attend_by_cosine, attend_in_segments, on_windows
from ..modules.tokens.parts.window_speed import stock_is_faster
from ..replacement import Place
from ..terms.log_positions import bounded_logits

Stock = Callable[..., Any]
Size = tuple[int, int]


def swin(
    stock: Stock, layer: Any, hidden_states: Tensor, input_dimensions: Size, always_partition: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute ``SwinLayer.forward`` of transformers 5, (B, H * W, C) -> (B, H * W, C), by SDPA's rules: no weights."""
    attn = layer.attention
    asked = any(option is not None and option is not False for option in kwargs.values())
    # On CUDA only attention that is not fused was measured, and stock's is.
    if asked or hidden_states.is_cuda or not _is_idle(layer) or not _uses_sdpa(attn):
        return stock(layer, hidden_states, input_dimensions, always_partition, **kwargs)
    if not always_partition:
        layer.set_shift_and_window_size(input_dimensions)

    def compute(tokens: Tensor, segments: Tensor | None) -> Tensor:
        q, k, v = _heads(tokens, attn.num_attention_heads, attn.q_proj, attn.k_proj, attn.v_proj)
        output = attend_in_segments(q, k, v, attn.relative_position_bias(), segments, attn.scaling)
        return layer.dropout(attn.o_proj(output))

    attended = _in_windows(layer, layer.layernorm_before(hidden_states), input_dimensions, compute)
    residual = hidden_states + layer.drop_path(attended)
    return layer.dropout(layer.mlp(layer.layernorm_after(residual))) + residual, None


def donut(
    stock: Stock, layer: Any, hidden_states: Tensor, input_dimensions: Size, output_attentions: bool | None = False,
    always_partition: bool | None = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute ``DonutSwinLayer.forward`` and ``ClapAudioLayer.forward``, (B, H * W, C) -> (B, H * W, C)."""
    if output_attentions or _stock_serves("Swin", layer, hidden_states):
        return stock(layer, hidden_states, input_dimensions, output_attentions, always_partition)
    if not always_partition:
        layer.set_shift_and_window_size(input_dimensions)
    return (_normed_first(layer, hidden_states, input_dimensions),)


def maskformer(
    stock: Stock, layer: Any, hidden_states: Tensor, input_dimensions: Size, output_attentions: bool | None = False
) -> tuple[Tensor, ...]:
    """Compute ``MaskFormerSwinLayer.forward``, (B, H * W, C) -> (B, H * W, C)."""
    if output_attentions or _stock_serves("Swin", layer, hidden_states):
        return stock(layer, hidden_states, input_dimensions, output_attentions)
    return (_normed_first(layer, hidden_states, input_dimensions),)


def swin_v2(
    stock: Stock, layer: Any, hidden_states: Tensor, input_dimensions: Size, output_attentions: bool | None = False
) -> tuple[Tensor, ...]:
    """Compute ``Swinv2Layer.forward`` and ``Swin2SRLayer.forward``, (B, H * W, C) -> (B, H * W, C)."""
    if output_attentions or _stock_serves("Swin V2", layer, hidden_states):
        return stock(layer, hidden_states, input_dimensions, output_attentions)
    attn = layer.attention
    inner = attn.self

    def compute(tokens: Tensor, segments: Tensor | None) -> Tensor:
        q, k, v = _heads(tokens, inner.num_attention_heads, inner.query, inner.key, inner.value)
        table = inner.continuous_position_bias_mlp(inner.relative_coords_table).flatten(0, 2)
        logits = _laid_out(bounded_logits(table), inner)
        return attn.output(attend_by_cosine(q, k, v, logits, segments, inner.logit_scale), tokens)

    attended = layer.layernorm_before(_in_windows(layer, hidden_states, input_dimensions, compute))
    residual = hidden_states + layer.drop_path(attended)
    output = layer.output(layer.intermediate(residual))
    return (residual + layer.drop_path(layer.layernorm_after(output)),)


def _normed_first(layer: Any, hidden_states: Tensor, size: Size) -> Tensor:
    """Compute a layer as Swin's were before transformers 5: its attention, then its perceptron."""
    attn = layer.attention
    inner = attn.self

    def compute(tokens: Tensor, segments: Tensor | None) -> Tensor:
        q, k, v = _heads(tokens, inner.num_attention_heads, inner.query, inner.key, inner.value)
        logits = _laid_out(inner.relative_position_bias_table, inner)
        return attn.output(attend_in_segments(q, k, v, logits, segments, q.shape[3] ** -0.5), tokens)

    attended = _in_windows(layer, layer.layernorm_before(hidden_states), size, compute)
    residual = hidden_states + layer.drop_path(attended)
    return residual + layer.output(layer.intermediate(layer.layernorm_after(residual)))


def _heads(tokens: Tensor, M: int, *projections: nn.Module) -> list[Tensor]:
    """Project tokens (n, N, C) to heads (n, M, N, d)."""
    return [unflatten(project(tokens), 2, (M, -1)).transpose(1, 2) for project in projections]


def _laid_out(table: Tensor, inner: Any) -> Tensor:
    """Return position logits (1, M, N, N) from a table over offsets, by the layer's own index."""
    index = inner.relative_position_index
    return table.t().index_select(1, index.flatten()).view(1, -1, *index.shape)


def _in_windows(layer: Any, x: Tensor, size: Size, compute: OnWindows) -> Tensor:
    n, shift = layer.window_size, layer.shift_size
    return on_windows(unflatten(x, 1, size), (n, n), (shift, shift), compute).flatten(1, 2)


# --- whether the stock code must run ----------------------------------------------------------------------------------


def _stock_serves(version: Any, layer: Any, x: Tensor) -> bool:
    """Return whether the stock code computes a layer whose attention is a module ``self`` and one for its output."""
    attn = layer.attention
    if not _is_idle(layer) or not _is_own(layer, attn.self, "SelfAttention"):
        return True
    drop = attn.self.dropout
    return not untouched(drop, nn.Dropout) or (drop.training and drop.p > 0) or stock_is_faster(version, x, attn)


def _is_idle(layer: Any) -> bool:
    """Return whether the attention, which our code does not call, is stock's, and no hook on all modules fires."""
    return not has_global_hooks() and _is_own(layer, layer.attention, "Attention")


def _is_own(layer: Any, part: nn.Module, name: str) -> bool:
    """Return whether a part has the class that its layer makes it of, with this name after the family's."""
    kind, owner = type(part), type(layer)
    own = (owner.__module__, owner.__name__.removesuffix("Layer") + name)
    return (kind.__module__, kind.__name__) == own and untouched(part, kind)


def _uses_sdpa(attn: Any) -> bool:
    """Return whether transformers would compute by PyTorch's attention, without dropping weights."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if attn.training and attn.attention_dropout > 0:
        return False
    return ALL_ATTENTION_FUNCTIONS.get(attn.config._attn_implementation) is sdpa_attention_forward


def _place(family: str, prefix: str, ours: Callable[..., Any]) -> Place:
    """Return the place of a family's layer, for versions of transformers in which it has the arguments of ``ours``."""
    arguments = tuple(inspect.signature(ours).parameters)[2:]
    child = "attention", f"{prefix}Attention"
    return Place(f"transformers.models.{family}", f"{prefix}Layer", ours, child=child, arguments=arguments)


PLACES = (
    _place("swin.modeling_swin", "Swin", swin),
    _place("donut.modeling_donut_swin", "DonutSwin", donut),
    _place("clap.modeling_clap", "ClapAudio", donut),
    _place("maskformer.modeling_maskformer_swin", "MaskFormerSwin", maskformer),
    _place("swinv2.modeling_swinv2", "Swinv2", swin_v2),
    _place("swin2sr.modeling_swin2sr", "Swin2SR", swin_v2),
)
