"""Swin with our attention under names of its own: ``attn_swin_tiny_patch4_window7_224``, ``attn_swinv2_…``.

timm's stages name their blocks themselves. The models are therefore built as timm builds them, and then the attention
of each block is exchanged; weights are drawn as timm's are, and timm's load strictly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from timm.layers import register_notrace_module
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, swin_transformer
from timm.models import swin_transformer_v2 as v2
from torch import Tensor, nn

from ..modules.checks import one_of
from ..modules.window_self_attention import Position, Version, WindowSelfAttention
from ..terms.position_table import resize_position_table
from .conventions import imagenet_cfg

SHARED = ("qkv", "proj", "relative_position_bias_table", "cpb_mlp", "logit_scale", "q_bias", "v_bias")
TABLES = ("relative_position_bias_table", "cpb_mlp.0.weight", "cpb_mlp.0.bias", "cpb_mlp.2.weight")


class SwinAttention(WindowSelfAttention):
    """:class:`attn_plugins.modules.WindowSelfAttention` in a block of timm's Swin, whose window may change.

    Args:
        stock: The block's own attention, whose linear layers, table and biases become ours.
        shift_size: Rows and columns.
        version: ``'v1'`` or ``'v2'``.
        position: ``'table'``, ``'relative'`` or ``'none'``.

    Raises:
        ValueError: heads do not divide the channels among them (timm's ``head_dim``).
    """

    def __init__(self, stock: Any, shift_size: Sequence[int], version: Version, position: Position) -> None:
        if stock.qkv.out_features != 3 * stock.dim:
            raise ValueError(
                f"head_dim must be None: the {stock.num_heads} heads share the {stock.dim} channels, got a width of "
                f"{stock.qkv.out_features // 3 // stock.num_heads}"
            )
        pretrained = getattr(stock, "pretrained_window_size", (0, 0))
        weight = stock.qkv.weight
        super().__init__(
            stock.dim,
            stock.num_heads,
            stock.window_size,
            shift_size,
            version,
            position,
            stock.attn_drop.p,
            stock.qkv.bias is not None if version == "v1" else stock.q_bias is not None,
            pretrained if pretrained[0] > 0 and position == "table" else None,
            device=weight.device,
            dtype=weight.dtype,
        )
        for name in SHARED:
            if getattr(self, name) is not None:
                setattr(self, name, getattr(stock, name))
        self.proj_drop = stock.proj_drop

    def reset_parameters(self) -> None:
        """Draw what timm's rules for linear layers do not."""
        self.reset_positions()

    def forward(self, x: Tensor) -> Tensor:
        """Attend from every token of (B, H, W, C) to those of its window."""
        return self.proj_drop(super().forward(x))

    def set_window_size(self, window_size: Sequence[int]) -> None:
        """Change the window, to which a table is interpolated as timm does it."""
        old, self.window_size = self.window_size, (window_size[0], window_size[1])
        table = self.relative_position_bias_table
        if table is not None:
            with torch.no_grad():
                resized = resize_position_table(table, old, self.window_size)
            self.relative_position_bias_table = nn.Parameter(resized, requires_grad=table.requires_grad)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Leave a table out where the layer has none, so that timm's weights load strictly."""
        if self.position_kind != "table":
            for name in TABLES:
                state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class _Block:
    """What our blocks change in timm's of either version."""

    if TYPE_CHECKING:
        attn: SwinAttention
        shift_size: tuple[int, int]
        target_shift_size: tuple[int, int]

    def exchange(self, version: Version, position: Position, shift: bool) -> None:
        """Put our attention in the place of timm's."""
        if not shift:
            self.shift_size = self.target_shift_size = (0, 0)
        self.attn = SwinAttention(self.attn, self.shift_size, version, position)
        self.attn_mask = None  # one (N, N) for every window

    def _attn(self, x: Tensor) -> Tensor:
        return self.attn(x)

    def get_attn_mask(self, *args: Any, **kwargs: Any) -> None:
        """No mask is kept."""

    def set_input_size(self, *args: Any, **kwargs: Any) -> None:
        """See timm's."""
        super().set_input_size(*args, **kwargs)  # type: ignore[misc]
        self.attn.shift_size = self.shift_size

    def __prepare_scriptable__(self) -> Any:
        """Become timm's own block with our weights, which TorchScript compiles."""
        ours, block = self.attn, cast(Any, self)
        if ours.position_kind != "table":
            raise NotImplementedError(f"TorchScript needs position='table', got {ours.position_kind!r}")
        weight = ours.qkv.weight
        arguments: dict[str, Any] = dict(dim=ours.embed_dim, num_heads=ours.num_heads, window_size=ours.window_size)
        arguments |= dict(attn_drop=ours.dropout, device=weight.device, dtype=weight.dtype)
        if ours.version == "v1":
            block.__class__ = swin_transformer.SwinTransformerBlock
            block.attn = swin_transformer.WindowAttention(**arguments)
        else:
            block.__class__ = v2.SwinTransformerV2Block
            arguments |= dict(qkv_bias=ours.q_bias is not None)
            block.attn = v2.WindowAttention(**arguments, pretrained_window_size=ours.pretrained_window_size or (0, 0))
        for name in SHARED:
            if hasattr(block.attn, name):
                setattr(block.attn, name, getattr(ours, name))
        block.attn.proj_drop = ours.proj_drop
        block._init_buffers()
        return block.train(ours.training)


@register_notrace_module  # a leaf to timm's feature extraction by FX
class AttnSwinBlock(_Block, swin_transformer.SwinTransformerBlock):  # type: ignore[misc]
    """timm's block of Swin with our attention."""


@register_notrace_module
class AttnSwinV2Block(_Block, v2.SwinTransformerV2Block):  # type: ignore[misc]
    """timm's block of Swin V2 with our attention."""


class AttnSwinTransformer(swin_transformer.SwinTransformer):
    """timm's Swin with :class:`attn_plugins.modules.WindowSelfAttention`.

    Args:
        position: ``'table'``, Swin's; ``'relative'``, ε2 and ε4 behind a gate of zeros; or ``'none'``. timm's
            weights load strictly into each, without the table where there is none.
        shift: Whether the windows of every other block are shifted.
        args, kwargs: Those of timm's ``SwinTransformer``; ``head_dim`` must be None.
    """

    def __init__(self, *args: Any, position: Position = "table", shift: bool = True, **kwargs: Any) -> None:
        one_of(Position, position=position)
        super().__init__(*args, **kwargs)
        _exchange(self, swin_transformer.SwinTransformerBlock, AttnSwinBlock, ("v1", position, shift))


class AttnSwinTransformerV2(v2.SwinTransformerV2):
    """timm's Swin V2 likewise.

    Args:
        position: As :class:`AttnSwinTransformer`'s; ``'table'`` is V2's net of log-spaced offsets.
        shift: Likewise.
        args, kwargs: Those of timm's ``SwinTransformerV2``.
    """

    def __init__(self, *args: Any, position: Position = "table", shift: bool = True, **kwargs: Any) -> None:
        one_of(Position, position=position)
        super().__init__(*args, **kwargs)
        _exchange(self, v2.SwinTransformerV2Block, AttnSwinV2Block, ("v2", position, shift))


def _exchange(model: nn.Module, stock: type[nn.Module], ours: type[nn.Module], options: tuple[Any, ...]) -> None:
    for module in list(model.modules()):
        if type(module) is stock:
            module.__class__ = ours
            module.exchange(*options)  # type: ignore[operator]


WIDTHS = {  # channels, depths and heads, as in timm's models of these names
    "tiny": (96, (2, 2, 6, 2), (3, 6, 12, 24)),
    "small": (96, (2, 2, 18, 2), (3, 6, 12, 24)),
    "base": (128, (2, 2, 18, 2), (4, 8, 16, 32)),
}
SWIN = dict(crop_pct=0.9, interpolation="bicubic", fixed_input_size=True)
SWIN |= dict(first_conv="patch_embed.proj", classifier="head.fc")
default_cfgs = generate_default_cfgs(
    {
        **{f"attn_swin_{size}_patch4_window7_224": imagenet_cfg(**SWIN) for size in WIDTHS},
        **{
            f"attn_swinv2_{size}_window8_256": imagenet_cfg(**SWIN, input_size=(3, 256, 256), pool_size=(8, 8))
            for size in WIDTHS
        },
    }
)


def _filter(state_dict: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """timm's conversion of a checkpoint, without the table where the model has none."""
    second = isinstance(model, AttnSwinTransformerV2)
    state_dict = state_dict.get("model", state_dict)
    state_dict = state_dict.get("state_dict", state_dict)
    own = model.state_dict()
    kept = {key: value for key, value in state_dict.items() if key in own or not key.endswith(TABLES)}
    return (v2 if second else swin_transformer).checkpoint_filter_fn(kept, model)


def _create(name: str, pretrained: bool, options: dict[str, Any]) -> nn.Module:
    """A Swin of timm with our attention."""
    _, version, size = name.split("_")[:3]
    width, depths, heads = WIDTHS[size]
    second = version == "swinv2"
    arguments: dict[str, Any] = dict(embed_dim=width, depths=depths, num_heads=heads, window_size=8 if second else 7)
    arguments.update(options)
    out_indices = arguments.pop("out_indices", tuple(range(len(arguments["depths"]))))
    return build_model_with_cfg(
        AttnSwinTransformerV2 if second else AttnSwinTransformer,
        name,
        pretrained,
        pretrained_filter_fn=_filter,
        feature_cfg=dict(flatten_sequential=True, out_indices=out_indices),
        **arguments,
    )


@register_model
def attn_swin_tiny_patch4_window7_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Swin-T on our operator; ``position`` and ``shift`` are options."""
    return _create("attn_swin_tiny_patch4_window7_224", pretrained, kwargs)


@register_model
def attn_swin_small_patch4_window7_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Swin-S likewise."""
    return _create("attn_swin_small_patch4_window7_224", pretrained, kwargs)


@register_model
def attn_swin_base_patch4_window7_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Swin-B likewise."""
    return _create("attn_swin_base_patch4_window7_224", pretrained, kwargs)


@register_model
def attn_swinv2_tiny_window8_256(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Swin V2-T on our operator; ``position`` and ``shift`` are options."""
    return _create("attn_swinv2_tiny_window8_256", pretrained, kwargs)


@register_model
def attn_swinv2_small_window8_256(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Swin V2-S likewise."""
    return _create("attn_swinv2_small_window8_256", pretrained, kwargs)


@register_model
def attn_swinv2_base_window8_256(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Swin V2-B likewise."""
    return _create("attn_swinv2_base_window8_256", pretrained, kwargs)
