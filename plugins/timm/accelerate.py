"""Acceleration of timm models by this package's operators, with the same parameters, keys and outputs.

::

    model = timm.create_model("swin_tiny_patch4_window7_224", pretrained=True)
    attn_plugins.timm.accelerate(model)

timm's Swin, SAM and MViTv2 do not let the user choose their attention layers. Therefore the class of existing layers is
replaced by a derived class; parameters, hooks and methods such as ``set_input_size`` stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from timm.layers import register_notrace_module
from timm.models import mvitv2, swin_transformer, swin_transformer_v2, vision_transformer_sam
from torch import Tensor, nn

from ..modules.tokens.window_speed import stock_is_faster
from ..modules.tokens.windows import Fill, TableAttention, in_windows, needs_weights, predicted_logits, project_v2
from ..ops import global_attention, sequence_attention, use_onednn
from ..ops.common.axes import unflatten
from ..terms.decomposed import decomposed_logits
from ..terms.position_table import table_logits


def accelerate(model: nn.Module, *, onednn: bool = True) -> list[str]:
    """Replace the attention of a timm model by this package's operators, in place.

    Supported are blocks of Swin and Swin V2 (``swin_*``, ``swinv2_*`` except ``swinv2_cr_*``) and the attention with
    decomposed positions of SAM (``samvit_*``) and MViTv2 (``mvitv2_*``). Outputs and gradients equal timm's up to
    rounding, in training and evaluation, except that masks of shifted windows are -inf instead of -100. timm's own code
    runs where others take part in what is replaced: dropout of weights, also in evaluation; hooks of any kind on a
    window attention, its ``softmax`` or ``attn_drop``, or on all modules; and replacements of these modules or of their
    ``forward``. So it does in eager calls of Swin and Swin V2 on CUDA where it was measured to be faster
    (``modules.tokens.window_speed``), unless ``ATTN_PLUGINS_STOCK_IF_FASTER=0`` is in the environment.
    ``torch.compile(fullgraph=True, dynamic=True)`` supports Swin with symbolic sizes, and recompiles for another image
    size as it does for timm's layers.

    Args:
        model: A model of timm, or a module that contains one.
        onednn: Also call :func:`attn_plugins.ops.use_onednn` for the float32 products of the process.

    Returns:
        The names of the replaced modules, which are the blocks in case of Swin. Empty if all were replaced before.

    Raises:
        ValueError: ``model`` contains no supported module.
        RuntimeError: Other code has modified one of the modules; nothing is replaced.
    """
    supported: dict[str, tuple[nn.Module, type[nn.Module]]] = {}
    known = False
    for name, module in model.named_modules():
        known = known or isinstance(module, tuple(kind.ours for kind in KINDS))
        for kind in KINDS:
            if type(module) is kind.stock and kind.serves(module):
                _check(name, module, kind)
                supported[name] = module, kind.ours
    if not supported and not known:
        raise ValueError(
            "model must contain blocks of timm's Swin or Swin V2, or attention with relative positions of its SAM or "
            f"MViTv2, but {type(model).__name__} has none"
        )
    for module, ours in supported.values():
        module.__class__ = ours
    if onednn:
        use_onednn()
    return list(supported)


class AcceleratedSwinBlock(swin_transformer.SwinTransformerBlock):
    """Swin block of timm whose window attention uses this package's operator."""

    def _attn(self, x: Tensor) -> Tensor:
        attn = self.attn
        if needs_weights(attn, swin_transformer.WindowAttention) or stock_is_faster("Swin", x, attn):
            return super()._attn(x)
        logits = table_logits(attn.relative_position_bias_table, attn.window_size)
        return _attend_windows(self, x, attn.qkv, TableAttention(logits, attn.scale))


class AcceleratedSwinV2Block(swin_transformer_v2.SwinTransformerV2Block):
    """Swin V2 block of timm whose window attention uses this package's operator."""

    def _attn(self, x: Tensor) -> Tensor:
        attn = self.attn
        if needs_weights(attn, swin_transformer_v2.WindowAttention) or stock_is_faster("Swin V2", x, attn):
            return super()._attn(x)
        pretrained = attn.pretrained_window_size if attn.pretrained_window_size[0] > 0 else None
        logits = predicted_logits(attn.cpb_mlp, attn.window_size, pretrained, x)
        attend = TableAttention(logits, logit_scale=attn.logit_scale)

        def project(tokens: Tensor) -> Tensor:
            return project_v2(tokens, attn.qkv, attn.q_bias, attn.v_bias)

        return _attend_windows(self, x, project, attend)


class AcceleratedSAMAttention(vision_transformer_sam.Attention):
    """SAM attention of timm, with decomposed positions as logits of rows and of columns."""

    def forward(self, x: Tensor) -> Tensor:
        if needs_weights(self):
            return super().forward(x)
        q, k, v = unflatten(self.qkv(x), 3, (3, self.num_heads, -1)).permute(3, 0, 4, 1, 2, 5).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        rows, columns = decomposed_logits(q, self.rel_pos_h, self.rel_pos_w)
        output = global_attention(q, k, v, row_logits=rows, column_logits=columns, scale=self.scale)
        return self.proj_drop(self.proj(output.permute(0, 2, 3, 1, 4).flatten(3)))


class AcceleratedMViTAttention(mvitv2.MultiScaleAttention):
    """Pooled attention of timm's MViTv2, with decomposed positions as logits of rows and of columns."""

    def forward(self, x: Tensor, feat_size: list[int]) -> tuple[Tensor, list[int]]:
        B, N, _ = x.shape
        tokens = self.qkv(x).reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        (q, size), (k, key_size), (v, _) = (
            self._pooled(part, pool, norm, feat_size)
            for part, pool, norm in zip(
                tokens, (self.pool_q, self.pool_k, self.pool_v), (self.norm_q, self.norm_k, self.norm_v)
            )
        )
        P = int(self.has_cls_token)
        query, key, value = unflatten(q[:, :, P:], 2, size), unflatten(k[:, :, P:], 2, key_size), v[:, :, P:]
        row_table, column_table = (
            table[: 2 * max(n, m) - 1]  # for a smaller map timm takes the first entries and does not interpolate
            for table, n, m in zip((self.rel_pos_h, self.rel_pos_w), size, key_size)
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
            scale=self.scale,
        ).flatten(2, 3)
        if P:
            output = torch.cat((sequence_attention(q[:, :, :P], k, v, scale=self.scale), output), 2)
        if self.residual_pooling:
            output = output + q
        return self.proj(output.transpose(1, 2).reshape(B, -1, self.dim_out)), size

    def _pooled(self, x: Tensor, pool: Any, norm: Any, size: list[int]) -> tuple[Tensor, list[int]]:
        """Pool the map of tokens (B, M, T, d) in the same way as timm."""
        if pool is not None:
            on_map, cls_token = mvitv2.reshape_pre_pool(x, size, self.has_cls_token)
            x, size = mvitv2.reshape_post_pool(pool(on_map), self.num_heads, cls_token)
        return (x if norm is None else norm(x)), size


def _attend_windows(block: Any, x: Tensor, project: Callable[[Tensor], Tensor], fill: Fill) -> Tensor:
    attn = block.attn
    output = in_windows(x, block.window_size, block.shift_size, attn.num_heads, project, fill)
    return attn.proj_drop(attn.proj(output))


class Kind(NamedTuple):
    """Supported class of timm, its replacement, and a predicate that selects the supported modules."""

    stock: type[nn.Module]
    ours: type[nn.Module]
    serves: Callable[[Any], bool]
    attention: type[nn.Module] | None = None  # required class of the module's ``attn``


KINDS = (
    Kind(
        swin_transformer.SwinTransformerBlock,
        AcceleratedSwinBlock,
        lambda block: True,
        swin_transformer.WindowAttention,
    ),
    Kind(
        swin_transformer_v2.SwinTransformerV2Block,
        AcceleratedSwinV2Block,
        lambda block: True,
        swin_transformer_v2.WindowAttention,
    ),
    Kind(vision_transformer_sam.Attention, AcceleratedSAMAttention, lambda attn: attn.use_rel_pos),
    Kind(mvitv2.MultiScaleAttention, AcceleratedMViTAttention, lambda attn: attn.rel_pos_type == "spatial"),
)


# Leaf modules for timm's feature extraction by FX, as in ``conventions``.
for _kind in KINDS:
    register_notrace_module(_kind.ours)


def _check(name: str, module: Any, kind: Kind) -> None:
    """Raise an error if other code has modified the parts to be replaced."""
    parts = [(name, module)]
    if kind.attention is not None:
        parts.append((f"{name}.attn", module.attn))
        if type(module.attn) is not kind.attention:
            raise RuntimeError(f"{name}.attn is {type(module.attn).__name__}, not timm's; nothing was replaced")
    for part, owner in parts:
        for method in ("forward", "_attn"):
            if method in vars(owner):
                raise RuntimeError(f"{part} has a {method} of its own, not timm's; nothing was replaced")
