"""What timm's vision transformers attend with: ``timm.create_model('vit_small_patch16_224', attn_layer='attn1111')``.

timm takes ``attn_layer`` for every model of its classes ``VisionTransformer`` and ``NaFlexVit`` without rotary
positions: ViT, DeiT, DINOv2 with registers, SigLIP, CLIP and more. Names: ``attn0000`` to ``attn1111``,
``attn_bilateral`` and ``attn_range7``; any other setting by a class from :func:`vit_attention`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from timm.layers import register_notrace_module
from timm.models.vision_transformer import ATTN_LAYERS
from torch import Tensor, nn

from ..modules.capture import checked_queries, softmax_over_keys
from ..modules.checks import check_heads, check_sequence
from ..modules.grid_attention import GridAttention, check_grid
from ..terms.nonlocal_position import Outside, Smoothing
from .vit_places import Places


@register_notrace_module
class ViTAttention(GridAttention):
    """timm's ``Attention``, its keys and call, with more terms in its logits.

    The terms are those of :class:`attn_plugins.modules.SpatialSelfAttention`; class tokens and registers have no place.
    With the gate at 0, where it starts, and a type with the content term the layer is timm's.

    The model tells its layers where their tokens lie: see :mod:`.vit_places`. Other arguments are those of timm's
    ``Attention``; ``gated`` and other widths of heads are not supported.

    Args:
        attention_type: Four bits, ε1 to ε4.
        spatial_range: n_k of the keys' range, odd; -1: all keys.
        kernel_size: k of the predicted position logits, odd; None: none.
        outside: What these are beyond their window.
        smoothing: What they are divided by.

    Shapes:
        (B, P + H * W, C) -> (B, P + H * W, C)

    Raises:
        ValueError: an argument is out of its range, or does not fit the others.
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_heads(dim, num_heads, attn_drop)
        super().__init__(dim, num_heads, attention_type, spatial_range, kernel_size, outside, smoothing)
        if (qk_norm or scale_norm) and norm_layer is None:
            raise ValueError("norm_layer must be given for qk_norm and scale_norm, got None")
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        width = dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, **factory)
        self.q_norm, self.k_norm = (norm_layer(width, **factory) if qk_norm else nn.Identity() for _ in range(2))
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm = norm_layer(dim, **factory) if scale_norm else nn.Identity()
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **factory)
        self.proj_drop = nn.Dropout(proj_drop)
        self.make_terms(**factory)
        self.places: Places | None = None  # of the model that the layer is part of
        self.script_grid, self.script_prefix = (1, 1), 0  # what TorchScript sees of it
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw what is added: see :meth:`reset_terms`. Projections draw themselves, and then timm's rule does."""
        self.reset_terms()

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attend from every token to all others.

        Args:
            x: (B, T, C): class tokens and registers, then the patches, row by row.
            attn_mask: (T, T) or (B, 1 or M, T, T): bool (False leaves out) or added to the logits; weights are written
                out then.
            is_causal: Must be False: tokens of a map have no order.

        Returns:
            (B, T, C).

        Raises:
            ValueError: a shape does not fit, or the layer does not know where the tokens lie.
            TypeError: ``x`` is no Tensor, or not of the module's dtype.
        """
        if is_causal:
            raise ValueError("is_causal must be False: patches of a picture have no order, got True")
        if not torch.jit.is_scripting():
            check_sequence("x", x, self.embed_dim, self.qkv.weight)
        B, T, C = x.shape
        q, k, v = self._projected(x)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = ~attn_mask
        if torch.jit.is_scripting():
            output = self.scripted_attend(
                q, k, v, self.script_grid[0], self.script_grid[1], self.script_prefix, attn_mask
            )
        else:
            grid, prefix = self._places(T)
            dropout = self.attn_drop.p if self.training else 0.0
            output = self.attend(x, q, k, v, grid, prefix, mask=attn_mask, dropout=dropout)
        output = output.expand(B, -1, T, -1).transpose(1, 2).reshape(B, T, C)  # one query, where none differs
        return self.proj_drop(self.proj(self.norm(output)))

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, multiplied by the scale, key and value: (B, M, T, d)."""
        q, k, v = self.qkv(x).unflatten(2, [3, self.num_heads, -1]).permute(2, 0, 3, 1, 4).unbind(0)
        return self.q_norm(q) * self.scale, self.k_norm(k), v

    def token_weights(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Return the attention weights of all tokens, without dropout.

        They are read off what the layer attends with: its outputs for values that are 1 at one key and 0 elsewhere, d
        keys at a time.

        Args:
            x: (B, T, C), as for :meth:`forward`, and what follows likewise.

        Returns:
            (B, M, T, T), class tokens and registers first.

        Raises:
            ValueError: as :meth:`forward`.
        """
        if is_causal:
            raise ValueError("is_causal must be False: patches of a picture have no order, got True")
        check_sequence("x", x, self.embed_dim, self.qkv.weight)
        B, T, _ = x.shape
        q, k, v = self._projected(x)
        grid, prefix = self._places(T)
        mask = ~attn_mask if attn_mask is not None and attn_mask.dtype == torch.bool else attn_mask
        found = []
        for one in torch.eye(T, dtype=v.dtype, device=v.device).split(v.shape[3], 1):
            value = one.expand(B, self.num_heads, -1, -1)
            found.append(self.attend(x, q, k, value, grid, prefix, mask=mask).expand(B, -1, T, -1))
        return torch.cat(found, -1)

    def token_logits(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> dict[str, Tensor]:
        """Return the logits of every term, gated; the softmax of their sum is :meth:`token_weights`.

        Args:
            x: (B, T, C), as for :meth:`forward`, and what follows likewise.

        Returns:
            (B, M, T, T) by the names of :meth:`.GridAttention.term_logits`.

        Raises:
            ValueError: as :meth:`forward`.
        """
        if is_causal:
            raise ValueError("is_causal must be False: patches of a picture have no order, got True")
        check_sequence("x", x, self.embed_dim, self.qkv.weight)
        q, k, _ = self._projected(x)
        grid, prefix = self._places(x.shape[1])
        mask = ~attn_mask if attn_mask is not None and attn_mask.dtype == torch.bool else attn_mask
        return self.term_logits(x, q, k, grid, prefix, mask=mask)

    def attention_size(self, size: Sequence[int]) -> tuple[int, int]:
        """(H, W), the patches of the model's present input; ``size`` does not say it."""
        return self._model_places()[0]

    def attention_maps(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, queries: Tensor | None = None
    ) -> Tensor:
        """Return the weights from patches to patches; with those of class tokens and registers they sum to 1.

        Args:
            x: (B, T, C), as for :meth:`forward`, and what follows likewise.
            queries: (Q, 2), rows and columns of patches; None for all.

        Returns:
            (B, M, H, W, H, W), or (B, M, Q, H, W) of ``queries``.

        Raises:
            ValueError: as :meth:`forward`, or ``queries`` are no patches.
        """
        (H, W), prefix = self._model_places()
        check_grid((H, W), prefix, x.shape[1])
        return _of_patches(self.token_weights(x, attn_mask, is_causal), (H, W), prefix, queries)

    def attention_parts(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, queries: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the weights that every term would give alone: the softmax of its own logits.

        Returns:
            As :meth:`attention_maps`, by the names of :meth:`token_logits`; nothing of a layer with one term.
        """
        grid, prefix = self._model_places()
        check_grid(grid, prefix, x.shape[1])
        logits = self.token_logits(x, attn_mask, is_causal)
        if len(logits) < 2:
            return {}
        return {name: _of_patches(softmax_over_keys(part), grid, prefix, queries) for name, part in logits.items()}

    def __prepare_scriptable__(self) -> ViTAttention:
        """Write down where tokens lie, for ``torch.jit.script``: models of one picture size alone can be scripted."""
        if self.predictor is not None or self.attn_drop.p:
            raise ValueError("TorchScript takes no predicted position logits (kernel_size) and no attn_drop")
        if self.needs_grid:
            if self.places is None or self.places.watched:
                raise ValueError(
                    f"TorchScript takes {self.described()} in a VisionTransformer of one picture size alone"
                )
            grid = self.places.grid
            assert grid is not None
            self.script_grid, self.script_prefix = grid, self.places.prefix
        return self

    def _places(self, T: int) -> tuple[tuple[int, int], int]:
        """The grid of T tokens, and how many come before it; a line where no term needs places."""
        if not self.needs_grid:
            return (1, T), 0
        grid, prefix = self._model_places()
        check_grid(grid, prefix, T)
        return grid, prefix

    def _model_places(self) -> tuple[tuple[int, int], int]:
        """The grid of the model's present input, and how many tokens come before it."""
        if self.places is None:
            raise ValueError(
                f"{self.described()} needs tokens with places, which a layer of timm's VisionTransformer or NaFlexVit "
                "knows from its model; this layer is in none. Outside of them use attn_plugins.modules."
                "SpatialSelfAttention"
            )
        grid, prefix = self.places.grid, self.places.prefix
        if grid is None:
            raise ValueError(
                f"{self.described()} needs one grid for all pictures of a batch, and patch_coord gives many"
            )
        return grid, prefix


def _of_patches(pairs: Tensor, grid: tuple[int, int], prefix: int, queries: Tensor | None) -> Tensor:
    """Values (B, M, T, T) from patches to patches: all, (B, M, H, W, H, W), or of ``queries``, (B, M, Q, H, W)."""
    maps = pairs[:, :, prefix:, prefix:].unflatten(3, grid)
    if queries is None:
        return maps.unflatten(2, grid)
    row, column = checked_queries(queries, grid, pairs.device)
    return maps[:, :, row * grid[1] + column]


def vit_attention(name: str, **options: Any) -> type[ViTAttention]:
    """Make a class for ``attn_layer`` that has other defaults, since timm takes a class and no options.

    ::

        wide = vit_attention("Range13", attention_type="1000", spatial_range=13)
        timm.create_model("vit_small_patch16_224", attn_layer=wide)

    Args:
        name: The class's.
        **options: Of :class:`ViTAttention`, ``attention_type`` and those behind it.
    """
    for option in options:
        if option not in OPTIONS:
            raise ValueError(f"options must be of {', '.join(OPTIONS)}, got {option!r}")
    return _vit_attention(name, tuple(sorted(options.items())))


@functools.cache
def _vit_attention(name: str, given: tuple[tuple[str, Any], ...]) -> type[ViTAttention]:
    """One class for equal arguments, which copies and pickles of its layers find again."""

    def __init__(self: ViTAttention, dim: int, num_heads: int = 8, **kwargs: Any) -> None:
        ViTAttention.__init__(self, dim, num_heads, **{**dict(given), **kwargs})

    def __reduce__(self: ViTAttention) -> tuple[Any, ...]:
        return _blank, (name, given), self.__dict__

    own = {"__init__": __init__, "__reduce__": __reduce__, "__doc__": ViTAttention.__doc__, "__module__": __name__}
    return type(name, (ViTAttention,), own)


def _blank(name: str, given: tuple[tuple[str, Any], ...]) -> ViTAttention:
    layer = _vit_attention(name, given)
    return layer.__new__(layer)


OPTIONS = ("attention_type", "spatial_range", "kernel_size", "outside", "smoothing")
LAYERS: dict[str, dict[str, Any]] = {
    **{f"attn{bits}": dict(attention_type=bits) for bits in map("".join, product("01", repeat=4))},
    "attn_bilateral": dict(attention_type="1000", kernel_size=13),
    "attn_range7": dict(attention_type="1000", spatial_range=7),
}
for _name, _options in LAYERS.items():
    ATTN_LAYERS[_name] = vit_attention("ViTAttention_" + _name.removeprefix("attn").removeprefix("_"), **_options)
