"""Swin models with this package's attention: ``attn_swin_tiny_patch4_window7_224``, ``attn_swinv2_…``.

timm's stages do not let the user choose their blocks. Therefore timm builds the model, and then the attention of each
block is replaced. Weights are initialized like timm's, and timm's weights load strictly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from timm.layers import register_notrace_module, to_2tuple
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, swin_transformer
from timm.models import swin_transformer_v2 as v2
from torch import Tensor, nn

from ..modules.common.bypass import called_dropout
from ..modules.common.checks import one_of
from ..modules.tokens.window_self_attention import Position, Version, Window, WindowSelfAttention, check_centred
from ..terms.nonlocal_position import Outside, Smoothing
from ..terms.position_table import resize_position_table
from .conventions import transformer_cfg

SHARED = ("qkv", "proj", "relative_position_bias_table", "cpb_mlp", "logit_scale", "q_bias", "v_bias")
TABLES = ("relative_position_bias_table", "cpb_mlp.0.weight", "cpb_mlp.0.bias", "cpb_mlp.2.weight")


class SwinOptions(NamedTuple):
    """Options that timm's Swin does not have; each is an argument of ``timm.create_model``.

    Attributes:
        position: See :class:`attn_plugins.modules.WindowSelfAttention`.
        shift: Shift the windows of every other block; not applied to ``window='centred'``.
        window: ``'partition'`` or ``'centred'``.
        kernel_size: Kernel size of bilateral logits; see :class:`attn_plugins.modules.WindowSelfAttention`.
        outside: See :class:`attn_plugins.modules.WindowSelfAttention`.
        smoothing: See :class:`attn_plugins.modules.WindowSelfAttention`.
    """

    position: Position = "table"
    shift: bool = True
    window: Window = "partition"
    kernel_size: int | None = None
    outside: Outside = "learned"
    smoothing: Smoothing = "zscore"

    @property
    def table(self) -> bool:
        """Whether the layers have Swin's position table."""
        return "table" in self.position.split("+")


class SwinAttention(WindowSelfAttention):
    """:class:`attn_plugins.modules.WindowSelfAttention` in a block of timm's Swin, with a variable window size.

    Args:
        stock: The block's attention, whose linear layers, table and biases are reused.
        shift_size: Shift of rows and columns.
        version: ``'v1'`` or ``'v2'``.
        options: Options that timm's attention does not have.

    Raises:
        ValueError: The heads do not divide the channels (timm's ``head_dim``).
    """

    def __init__(self, stock: Any, shift_size: Sequence[int], version: Version, options: SwinOptions) -> None:
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
            options.position,
            stock.attn_drop.p,
            stock.qkv.bias is not None if version == "v1" else stock.q_bias is not None,
            pretrained if pretrained[0] > 0 and options.table else None,
            options.window,
            options.kernel_size,
            options.outside,
            options.smoothing,
            device=weight.device,
            dtype=weight.dtype,
        )
        for name in SHARED:
            if getattr(self, name) is not None:
                setattr(self, name, getattr(stock, name))
        self.attn_drop, self.proj_drop = stock.attn_drop, stock.proj_drop

    def reset_parameters(self) -> None:
        """Initialize the parameters that timm's rules for linear layers do not cover."""
        self.reset_positions()

    def forward(self, x: Tensor) -> Tensor:
        """Compute window attention, (B, H, W, C) -> (B, H, W, C)."""
        return self.proj_drop(super().forward(x))

    def _dropout(self) -> nn.Module | float:
        return called_dropout(self.attn_drop)

    def set_window_size(self, window_size: Sequence[int]) -> None:
        """Change the window size; a table is interpolated in the same way as in timm."""
        if self.window == "centred":
            check_centred(window_size)
        old, self.window_size = self.window_size, (window_size[0], window_size[1])
        table = self.relative_position_bias_table
        if table is not None:
            with torch.no_grad():
                resized = resize_position_table(table, old, self.window_size)
            self.relative_position_bias_table = nn.Parameter(resized, requires_grad=table.requires_grad)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Skip tables that the layer does not have, so that timm's weights load strictly."""
        if "table" not in self.position_kind.split("+"):
            for name in TABLES:
                state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class _Block:
    """Mixin of Swin blocks of both versions."""

    if TYPE_CHECKING:
        attn: SwinAttention
        shift_size: tuple[int, int]
        target_shift_size: tuple[int, int]

    def exchange(self, version: Version, options: SwinOptions) -> None:
        """Replace timm's attention."""
        if not options.shift or options.window == "centred":
            self.shift_size = self.target_shift_size = (0, 0)
        self.attn = SwinAttention(self.attn, self.shift_size, version, options)
        self.attn_mask = None  # timm's mask would be (N, N) for every window

    def _attn(self, x: Tensor) -> Tensor:
        return self.attn(x)

    def get_attn_mask(self, *args: Any, **kwargs: Any) -> None:
        """Return None: no mask is stored."""

    def set_input_size(self, *args: Any, **kwargs: Any) -> None:
        """Set the input size; see timm."""
        super().set_input_size(*args, **kwargs)  # type: ignore[misc]
        self.attn.shift_size = self.shift_size


@register_notrace_module  # a leaf module for timm's feature extraction by FX
class AttnSwinBlock(_Block, swin_transformer.SwinTransformerBlock):  # type: ignore[misc]
    """Swin block of timm with this package's attention."""


@register_notrace_module
class AttnSwinV2Block(_Block, v2.SwinTransformerV2Block):  # type: ignore[misc]
    """Swin V2 block of timm with this package's attention."""


class _Model:
    """Mixin of Swin models of both versions."""

    if TYPE_CHECKING:
        layers: Any
        modules: Any
    version: Version
    blocks: tuple[type[nn.Module], type[nn.Module]]  # timm's class and its replacement

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        options = SwinOptions(**{name: kwargs.pop(name) for name in SwinOptions._fields if name in kwargs})
        one_of(Position, position=options.position)
        one_of(Window, window=options.window)
        if options.window == "centred":  # centred windows keep their size on small maps
            kwargs.setdefault("always_partition", True)
        super().__init__(*args, **kwargs)
        self.options = options
        stock, ours = self.blocks
        for module in list(self.modules()):
            if type(module) is stock:
                module.__class__ = ours
                module.exchange(self.version, options)  # type: ignore[operator]

    def set_input_size(
        self, img_size: Any = None, patch_size: Any = None, window_size: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Set the input size as in timm; centred windows keep their size unless another is given."""
        ratio = args[0] if args else kwargs.get("window_ratio")
        if self.options.window == "centred" and window_size is None and ratio is None:
            window_size = tuple(stage.blocks[0].attn.window_size for stage in self.layers)
        elif self.options.window == "centred" and window_size is not None:  # refused before anything changes
            for size in window_size if isinstance(window_size, Sequence) else [window_size]:
                check_centred(to_2tuple(size))
        super().set_input_size(img_size, patch_size, window_size, *args, **kwargs)  # type: ignore[misc]


class AttnSwinTransformer(_Model, swin_transformer.SwinTransformer):
    """Swin of timm with :class:`attn_plugins.modules.WindowSelfAttention`.

    timm's weights load strictly; a missing table is skipped, and added parameters keep their initialization.

    Args:
        *args: Positional arguments of timm's ``SwinTransformer``.
        **kwargs: Keyword arguments of timm's ``SwinTransformer``, whose ``head_dim`` must be None, and the fields of
            :class:`SwinOptions`.
    """

    version = "v1"
    blocks = (swin_transformer.SwinTransformerBlock, AttnSwinBlock)


class AttnSwinTransformerV2(_Model, v2.SwinTransformerV2):
    """Swin V2 of timm with :class:`attn_plugins.modules.WindowSelfAttention`.

    Its position table comes from the network on log-spaced offsets.

    Args:
        *args: Positional arguments of timm's ``SwinTransformerV2``.
        **kwargs: Keyword arguments of timm's ``SwinTransformerV2``, and the fields of :class:`SwinOptions`.
    """

    version = "v2"
    blocks = (v2.SwinTransformerV2Block, AttnSwinV2Block)


WIDTHS = {  # channels, depths and heads, as in timm's models of the same names
    "tiny": (96, (2, 2, 6, 2), (3, 6, 12, 24)),
    "small": (96, (2, 2, 18, 2), (3, 6, 12, 24)),
    "base": (128, (2, 2, 18, 2), (4, 8, 16, 32)),
}
default_cfgs = generate_default_cfgs(
    {
        **{
            f"attn_swin_{size}_patch4_window7_224": transformer_cfg(pool_size=(7, 7), classifier="head.fc")
            for size in WIDTHS
        },
        **{
            f"attn_swinv2_{size}_window8_256": transformer_cfg(
                input_size=(3, 256, 256), pool_size=(8, 8), classifier="head.fc"
            )
            for size in WIDTHS
        },
    }
)


def _filter(state_dict: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Convert a checkpoint in the same way as timm, without tables that the model does not have."""
    second = isinstance(model, AttnSwinTransformerV2)
    state_dict = state_dict.get("model", state_dict)
    state_dict = state_dict.get("state_dict", state_dict)
    own = model.state_dict()
    kept = {key: value for key, value in state_dict.items() if key in own or not key.endswith(TABLES)}
    return (v2 if second else swin_transformer).checkpoint_filter_fn(kept, model)


def _create(name: str, pretrained: bool, options: dict[str, Any]) -> nn.Module:
    """Create a Swin of timm with this package's attention."""
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
    """Create Swin-T with this package's attention; takes the options of :class:`SwinOptions`."""
    return _create("attn_swin_tiny_patch4_window7_224", pretrained, kwargs)


@register_model
def attn_swin_small_patch4_window7_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Create Swin-S with this package's attention; takes the options of :class:`SwinOptions`."""
    return _create("attn_swin_small_patch4_window7_224", pretrained, kwargs)


@register_model
def attn_swin_base_patch4_window7_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Create Swin-B with this package's attention; takes the options of :class:`SwinOptions`."""
    return _create("attn_swin_base_patch4_window7_224", pretrained, kwargs)


@register_model
def attn_swinv2_tiny_window8_256(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Create Swin V2-T with this package's attention; takes the options of :class:`SwinOptions`."""
    return _create("attn_swinv2_tiny_window8_256", pretrained, kwargs)


@register_model
def attn_swinv2_small_window8_256(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Create Swin V2-S with this package's attention; takes the options of :class:`SwinOptions`."""
    return _create("attn_swinv2_small_window8_256", pretrained, kwargs)


@register_model
def attn_swinv2_base_window8_256(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Create Swin V2-B with this package's attention; takes the options of :class:`SwinOptions`."""
    return _create("attn_swinv2_base_window8_256", pretrained, kwargs)
