"""Attention layers for timm's ViTs: ``timm.create_model('vit_small_patch16_224', attn_layer='attn1111')``.

timm accepts ``attn_layer`` for every model of its classes ``VisionTransformer`` and ``NaFlexVit`` without rotary
positions: ViT, DeiT, DINOv2 with registers, SigLIP, CLIP and more. The names are ``attn0000`` to ``attn1111``,
``attn_bilateral`` and ``attn_range7``; :func:`vit_attention` creates classes for other settings.
"""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import torch
from timm.layers import register_notrace_module
from timm.models.vision_transformer import ATTN_LAYERS
from torch import Tensor, nn

from ..core.axes import unflatten
from ..modules.common.bypass import called_dropout
from ..modules.common.capture import softmax_over_keys
from ..modules.common.checks import check_heads, check_sequence
from ..modules.common.tracing import one_node
from ..modules.common.weights import checked_queries, weights_of
from ..modules.tokens.parts.grid_attention import GridAttention, check_grid
from ..modules.tokens.parts.grid_terms import Grid
from ..terms.nonlocal_position import Outside, Smoothing
from .token_grids import SEVERAL, Places


@register_notrace_module
class ViTAttention(GridAttention):
    """``Attention`` of timm, with its keys and interface, and additional terms in its logits.

    The terms are those of :class:`attn_plugins.modules.SpatialSelfAttention`; class tokens and registers have no
    position. With the initial gate 0 and a type with the content term, the layer equals timm's.

    The model provides the positions of tokens to its layers: see :mod:`.vit_places`. Other arguments are those of
    timm's ``Attention``; ``gated`` and other head widths are not supported.

    Args:
        attention_type: Four bits, ε1 to ε4.
        spatial_range: n_k of the keys' range, odd; -1: all keys.
        kernel_size: k of the predicted position logits, odd; None: no such logits.
        outside: Value of the predicted logits outside their window.
        smoothing: Divisor of the predicted logits.
        gate_init: Initial gate of the added terms.

    Shapes:
        (B, P + H * W, C) -> (B, P + H * W, C)

    Raises:
        ValueError: An argument is out of range or inconsistent with others.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        attention_type: str = "1111",
        spatial_range: int = -1,
        kernel_size: int | None = None,
        outside: Outside = "learned",
        smoothing: Smoothing = "zscore",
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Any = None,
        gate_init: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_heads(dim, num_heads, attn_drop)
        super().__init__(dim, num_heads, attention_type, spatial_range, kernel_size, outside, smoothing)
        if (qk_norm or scale_norm) and norm_layer is None:
            raise ValueError("norm_layer must be given for qk_norm and scale_norm, got None")
        self.gate_init = gate_init
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        width = dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, **factory)
        self.q_norm, self.k_norm = (norm_layer(width, **factory) if qk_norm else nn.Identity() for _ in range(2))
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm = norm_layer(dim, **factory) if scale_norm else nn.Identity()
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **factory)
        self.proj_drop = nn.Dropout(proj_drop)
        self.make_terms(**factory)
        self.places: Places | None = None  # set by the model that contains the layer
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the added parameters: see :meth:`reset_terms`. timm's rule initializes the projections."""
        self.reset_terms()

    init_weights = reset_parameters  # timm calls this after its rule for all linear layers, the tables among them

    @one_node
    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attend from every token to all others.

        Args:
            x: (B, T, C): class tokens and registers, then the patches, row by row.
            attn_mask: (T, T) or (B, 1 or M, T, T): bool (False excludes a key) or added to the logits; a mask makes the
                layer compute explicit weights.
            is_causal: Must be False: tokens of a map have no order.

        Returns:
            (B, T, C).

        Raises:
            ValueError: A shape does not match, or the positions of the tokens are unknown.
            TypeError: ``x`` is not a Tensor, or does not have the module's dtype.
        """
        q, k, v, grid, prefix, mask = self._prepared(x, attn_mask, is_causal)
        output = self.attend(x, q, k, v, grid, prefix, mask=mask, dropout=called_dropout(self.attn_drop))
        B, T, C = x.shape
        output = output.expand(B, -1, T, -1).transpose(1, 2).reshape(B, T, C)  # one query if all are equal
        return self.proj_drop(self.proj(self.norm(output)))

    def _prepared(
        self, x: Tensor, attn_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Tensor, Tensor, Grid, int, Tensor | None]:
        """Check the arguments; return scaled query, key and value (B, M, T, d), grid, prefix, and the mask of keys."""
        if is_causal:
            raise ValueError("is_causal must be False: patches of an image have no order, got True")
        check_sequence("x", x, self.embed_dim, self.qkv)
        q, k, v = unflatten(self.qkv(x), 2, [3, self.num_heads, -1]).permute(2, 0, 3, 1, 4).unbind(0)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = ~attn_mask
        grid, prefix = self._checked_places(x) if self.needs_grid else ((1, x.shape[1]), 0)
        return self.q_norm(q) * self.scale, self.k_norm(k), v, grid, prefix, attn_mask

    def token_weights(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Return the attention weights of all tokens, without dropout.

        Args:
            x: (B, T, C), as for :meth:`forward`.
            attn_mask: See :meth:`forward`.
            is_causal: Must be False.

        Returns:
            (B, M, T, T), class tokens and registers first.

        Raises:
            ValueError: See :meth:`forward`.
        """
        q, k, v, grid, prefix, mask = self._prepared(x, attn_mask, is_causal)
        return weights_of(self.written_out(x, q, k, v, grid, prefix, mask=mask))

    def token_logits(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> dict[str, Tensor]:
        """Return the logits of every term, gated; the softmax of their sum is :meth:`token_weights`.

        Args:
            x: (B, T, C), as for :meth:`forward`.
            attn_mask: See :meth:`forward`.
            is_causal: Must be False.

        Returns:
            (B, M, T, T) by the names of :meth:`.GridAttention.term_logits`.

        Raises:
            ValueError: See :meth:`forward`.
        """
        q, k, _, grid, prefix, mask = self._prepared(x, attn_mask, is_causal)
        return self.term_logits(x, q, k, grid, prefix, mask=mask)

    def map_size(self, x: Tensor) -> Grid:
        """Return the grid (H, W) of the layer's input ``x``."""
        return self._checked_places(x)[0]

    def attention_maps(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, queries: Tensor | None = None
    ) -> Tensor:
        """Return the weights from patches to patches, which sum to 1 with those of class tokens and registers.

        Args:
            x: (B, T, C), as for :meth:`forward`.
            attn_mask: See :meth:`forward`.
            is_causal: Must be False.
            queries: (Q, 2), rows and columns of patches; None for all.

        Returns:
            (B, M, H, W, H, W), or (B, M, Q, H, W) of ``queries``.

        Raises:
            ValueError: See :meth:`forward`, or ``queries`` are outside the grid.
        """
        return _of_patches(self.token_weights(x, attn_mask, is_causal), *self._checked_places(x), queries)

    def attention_parts(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, queries: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the weights of every term alone: the softmax of its own logits.

        Returns:
            As :meth:`attention_maps`, by the names of :meth:`token_logits`; empty for a layer with one term.
        """
        grid, prefix = self._checked_places(x)
        logits = self.token_logits(x, attn_mask, is_causal)
        if len(logits) < 2:
            return {}
        return {name: _of_patches(softmax_over_keys(part), grid, prefix, queries) for name, part in logits.items()}

    def _checked_places(self, x: Tensor) -> tuple[Grid, int]:
        """Return the grid of the tokens ``x`` and the number of tokens before it."""
        if self.places is None:
            raise ValueError(
                f"{self.described()} needs the positions of tokens, which a layer of timm's VisionTransformer or "
                "NaFlexVit gets from its model; this layer is in no such model. Elsewhere use attn_plugins.modules."
                "SpatialSelfAttention"
            )
        grid, prefix = self.places.grid(x), self.places.prefix
        if grid is None:
            raise ValueError(
                f"{self.described()} needs the positions of tokens, but the grid of x {tuple(x.shape)} is unknown: x "
                "must be the tensor that the model passed to the layer. Gradient checkpointing that copies its inputs "
                "needs use_reentrant=False"
            )
        if grid == SEVERAL:
            raise ValueError(
                f"{self.described()} needs one grid for all images of a batch, but patch_coord gives several"
            )
        check_grid(grid, prefix, x.shape[1])
        return grid, prefix


def _of_patches(pairs: Tensor, grid: Grid, prefix: int, queries: Tensor | None) -> Tensor:
    """Select values from patches to patches of (B, M, T, T): (B, M, H, W, H, W), or (B, M, Q, H, W) of ``queries``."""
    maps = unflatten(pairs[:, :, prefix:, prefix:], 3, grid)
    if queries is None:
        return unflatten(maps, 2, grid)
    row, column = checked_queries(queries, grid, pairs.device)
    return maps[:, :, row * grid[1] + column]


def vit_attention(name: str, **options: Any) -> type[ViTAttention]:
    """Create a class with other defaults for ``attn_layer``, for which timm accepts a class and no options.

    ::

        wide = vit_attention("Range13", attention_type="1000", spatial_range=13)
        timm.create_model("vit_small_patch16_224", attn_layer=wide)

    Args:
        name: Name of the class.
        **options: Options of :class:`ViTAttention`: ``attention_type`` to ``smoothing``, and ``gate_init``.
    """
    for option in options:
        if option not in OPTIONS:
            raise ValueError(f"options must be of {', '.join(OPTIONS)}, got {option!r}")
    return _vit_attention(name, tuple(sorted(options.items())))


@functools.cache
def _vit_attention(name: str, given: tuple[tuple[str, Any], ...]) -> type[ViTAttention]:
    """Return one class for equal arguments, so that copies and pickles of its layers find it again."""

    def __init__(self: ViTAttention, dim: int, num_heads: int = 8, **kwargs: Any) -> None:
        ViTAttention.__init__(self, dim, num_heads, **{**dict(given), **kwargs})

    def __reduce_ex__(self: ViTAttention, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = ViTAttention.__reduce_ex__(self, max(protocol, 2))  # which leaves out compiled code
        return _blank, (name, given), *reduced[2:]

    members = {"__init__": __init__, "__reduce_ex__": __reduce_ex__, "__doc__": ViTAttention.__doc__}
    return type(name, (ViTAttention,), {**members, "__module__": __name__})


def _blank(name: str, given: tuple[tuple[str, Any], ...]) -> ViTAttention:
    layer = _vit_attention(name, given)
    return layer.__new__(layer)


OPTIONS = ("attention_type", "spatial_range", "kernel_size", "outside", "smoothing", "gate_init")
LAYERS: dict[str, dict[str, Any]] = {
    **{f"attn{bits}": dict(attention_type=bits) for bits in map("".join, product("01", repeat=4))},
    "attn_bilateral": dict(attention_type="1000", kernel_size=13),
    "attn_range7": dict(attention_type="1000", spatial_range=7),
}
for _name, _options in LAYERS.items():
    ATTN_LAYERS[_name] = vit_attention("ViTAttention_" + _name.removeprefix("attn").removeprefix("_"), **_options)
