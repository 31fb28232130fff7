"""TimeSformer in timm: ``timm.create_model('timesformer_base_patch16_224', pattern='divided', num_frames=8)``.

Shapes: B batch, T frames, (H, W) the grid of a frame's patches, P class tokens and registers, C channels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from timm.layers import DropPath, Mlp, register_notrace_function, register_notrace_module
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import Attention, VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..core.axes import unflatten
from ..modules.common.checks import check_tensor, one_of, positive
from ..modules.tokens.parts.space_time_regions import ClipGrid
from ..modules.tokens.space_time_attention import Pattern, SpaceTimeSelfAttention
from .conventions import transformer_cfg
from .timesformer_weights import complete, resized_in_time, unwrap

register_notrace_function(resized_in_time)

WIDTHS = {"small": (384, 6), "base": (768, 12)}  # channels and heads, as in timm's ViTs of the same names


@register_notrace_module  # a leaf for timm's feature extraction by FX, like the functions registered here
class SpaceTimeBlock(SpaceTimeSelfAttention):
    """TimeSformer block: the steps of the attention and an MLP, each with a preceding norm and a residual connection.

    It takes the arguments of timm's ``Block`` and the pattern; ``qk_norm``, ``scale_attn_norm``, ``scale_mlp_norm``,
    ``init_values`` and ``attn_layer`` must have their defaults.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        pattern: Pattern = "divided",
        mlp_ratio: float = 4.0,
        qkv_bias: bool = False,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        drop_path: float = 0.0,
        act_layer: Any = nn.GELU,
        norm_layer: Any = nn.LayerNorm,
        mlp_layer: Any = Mlp,
        attn_layer: Any = Attention,
        depth: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        if attn_layer is not Attention:
            raise ValueError(f"attn_layer must be timm's Attention, which pattern replaces, got {attn_layer!r}")
        for name, value in others.items():
            if value:
                raise ValueError(f"{name} must be left out: TimeSformer's blocks have none, got {value!r}")
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        super().__init__(dim, num_heads, pattern, attn_drop, qkv_bias, proj_bias, norm_layer, **factory)
        given = {name: value for name, value in factory.items() if value is not None}
        self.drop1 = nn.Sequential(nn.Dropout(proj_drop), DropPath(drop_path))
        self.norm2 = norm_layer(dim, **given)
        self.mlp = mlp_layer(dim, int(dim * mlp_ratio), act_layer=act_layer, bias=proj_bias, drop=proj_drop, **given)
        self.drop2 = DropPath(drop_path)

    def init_weights(self) -> None:
        """Set the added steps' ``fc`` to 0 again; timm calls this after initializing all linear layers."""
        self.reset_added()

    def forward(self, x: Tensor, grid: ClipGrid, prefix_tokens: int = 0) -> Tensor:
        """Transform tokens, (B, P + T * H * W, C) -> (B, P + T * H * W, C)."""
        before, result = self.steps(x, grid, prefix_tokens, self.drop1 if self.training else None)
        x = before + result
        return x + self.drop2(self.mlp(self.norm2(x)))


@register_notrace_function
def as_clip(x: Tensor, channels: int) -> Tensor:
    """Check a model's input; an image becomes a clip of one frame."""
    check_tensor("x", x)
    if x.dim() == 4 and x.shape[1] == channels:
        return x.unsqueeze(1)
    if x.dim() != 5 or x.shape[2] != channels or x.shape[1] == 0:
        swapped = "; x.transpose(1, 2) has this shape" if x.dim() == 5 and x.shape[1] == channels else ""
        raise ValueError(
            f"x must have shape (B, T, {channels}, height, width), frames before channels, got {tuple(x.shape)}"
            f"{swapped}"
        )
    return x


class TimeSformer(VisionTransformer):
    """``VisionTransformer`` of timm for clips (Bertasius et al. 2021).

    Frames are split into patches and embedded like images; patches also get the time embedding of their frame. The
    blocks use :class:`attn_plugins.modules.SpaceTimeSelfAttention`. With ``pattern='space'`` frames are processed as
    separate images, without a time embedding, and averaged before the last norm.

    A ViT's weights load strictly. The model then initially equals the ViT: for one image with every pattern except
    'local_global' and 'axial', and for a clip of equal frames with 'divided' and 'space'. The official checkpoints also
    load strictly ('divided', 'space' and 'joint'; :mod:`.timesformer_weights`). The time embedding is resized for
    checkpoints and clips with another number of frames. As in the official code, ``drop_path_rate`` is 0.1, and drops
    the attention of single groups (frames, tracks) and the MLP of whole clips.

    Args:
        *args: Positional arguments of ``VisionTransformer``.
        num_frames: Length T of the time embedding.
        pattern: Pattern of the attention.
        **kwargs: Keyword arguments of ``VisionTransformer``.

    Shapes:
        (B, T, 3, H * 16, W * 16), frames before channels, or an image (B, 3, H * 16, W * 16), a clip of one frame ->
        (B, num_classes)

    Raises:
        ValueError: An argument is out of range or not supported.
    """

    def __init__(self, *args: Any, num_frames: int = 8, pattern: Pattern = "divided", **kwargs: Any) -> None:
        positive(num_frames=num_frames)
        one_of(Pattern, pattern=pattern)
        if kwargs.get("patch_drop_rate"):
            raise ValueError(f"patch_drop_rate must be 0: groups need all patches, got {kwargs['patch_drop_rate']}")
        if "block_fn" in kwargs:
            raise ValueError(f"block_fn must be left out: pattern replaces it, got {kwargs['block_fn']!r}")
        given = {"drop_path_rate": 0.1, **kwargs, "block_fn": partial(SpaceTimeBlock, pattern=pattern)}
        super().__init__(*args, **given)
        self.pattern, self.num_frames = pattern, num_frames
        factory: dict[str, Any] = {name: kwargs.get(name) for name in ("device", "dtype")}
        timeless = pattern == "space"
        self.time_embed = None if timeless else nn.Parameter(torch.zeros(1, num_frames, self.embed_dim, **factory))
        self.time_drop = nn.Dropout(kwargs.get("pos_drop_rate", 0.0))

    def init_weights(self, *args: Any, **kwargs: Any) -> None:
        """Initialize all weights by timm's rule; the time embedding and the added steps' ``fc`` are 0."""
        super().init_weights(*args, **kwargs)
        time_embed = getattr(self, "time_embed", None)  # it does not exist yet when timm's constructor calls this
        if time_embed is not None:
            nn.init.zeros_(time_embed)

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters exempt from weight decay."""
        return {*super().no_weight_decay(), "time_embed"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns that group parameters by depth."""
        groups = super().group_matcher(coarse)
        return {**groups, "stem": groups["stem"] + "|time_embed"}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        unwrap(state_dict, prefix)
        added = {name for block in self._blocks for name in block.added}
        complete(state_dict, prefix, self.time_embed, len(self._blocks), added)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @property
    def _blocks(self) -> list[SpaceTimeBlock]:
        return list(self.blocks)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Classify clips, (B, T, 3, H * 16, W * 16) -> (B, num_classes)."""
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Compute the normalized tokens of the last block, (B, T, 3, H * 16, W * 16) -> (B, P + T * H * W, C).

        With ``pattern='space'`` the result is the mean over frames, (B, P + H * W, C).
        """
        clip = as_clip(x, self.in_chans)
        x, grid = self._embed(clip)
        for block in self._blocks:
            x = self._run(block, x, grid)
        return self.norm(self._mean_of_frames(x, clip.shape[0]))

    def forward_intermediates(  # type: ignore[override]
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: None = None,
    ) -> Any:
        """Compute the tokens after blocks, as timm's ``VisionTransformer`` returns them.

        Args:
            x: A clip (B, T, 3, H * 16, W * 16) or an image.
            indices: Block indices, or n for the last n blocks; None for all.
            return_prefix_tokens: Also return class tokens and registers.
            norm: Normalize intermediate tokens.
            stop_early: Skip the blocks after the last requested one.
            output_fmt: ``'NCHW'``: maps, (B, T, C, H, W) of a clip and (B, C, H, W) of an image; ``'NLC'``:
                (B, T * H * W, C).
            intermediates_only: Omit the final tokens.
            output_dict: Return a dictionary.
            attn_mask: Must be None.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt must be NCHW or NLC, got {output_fmt!r}")
        if attn_mask is not None:
            raise ValueError("attn_mask must be None: the pattern determines the keys of a query")
        indices_taken, last = feature_take_indices(len(self._blocks), indices)
        clip = as_clip(x, self.in_chans)
        (B, T), picture, P = clip.shape[:2], x.dim() == 4, self.num_prefix_tokens
        x, grid = self._embed(clip)
        maps, prefixes = [], []
        for number, block in enumerate(self._blocks[: last + 1] if stop_early else self._blocks):
            x = self._run(block, x, grid)
            if number in indices_taken:
                tokens = self.norm(x) if norm else x
                patches = tokens[:, P:].reshape(B, T, *grid[1:], self.embed_dim)
                if output_fmt == "NLC":
                    maps.append(patches.flatten(1, 3))
                else:
                    patches = patches.permute(0, 1, 4, 2, 3).contiguous()
                    maps.append(patches.squeeze(1) if picture else patches)
                prefixes.append(self._mean_of_frames(tokens[:, :P], B))
        final = None if intermediates_only else self.norm(self._mean_of_frames(x, B))
        if output_dict:
            outputs: dict[str, Any] = dict(image_intermediates=maps)
            if P and return_prefix_tokens:
                outputs["image_intermediates_prefix"] = prefixes
            return outputs if final is None else {**outputs, "image_features": final}
        taken = list(zip(maps, prefixes)) if P and return_prefix_tokens else maps
        return taken if final is None else (final, taken)

    def _embed(self, clip: Tensor) -> tuple[Tensor, ClipGrid]:
        """Return the blocks' input, (B, P + T * H * W, C) or (B * T, P + H * W, C) of separate frames, and its grid."""
        B, T = clip.shape[:2]
        H, W = self.patch_embed.dynamic_feat_size((clip.shape[3], clip.shape[4]))
        x = self._pos_embed(self.patch_embed(clip.flatten(0, 1)))
        if self.time_embed is None:
            return self.norm_pre(x), (1, H, W)
        P = self.num_prefix_tokens
        x = unflatten(x, 0, (B, T))
        patches = self.time_drop(x[:, :, P:] + resized_in_time(self.time_embed, T).unsqueeze(2))
        return self.norm_pre(torch.cat((x[:, 0, :P], patches.flatten(1, 2)), 1)), (T, H, W)

    def _run(self, block: nn.Module, x: Tensor, grid: ClipGrid) -> Tensor:
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, x, grid, self.num_prefix_tokens, use_reentrant=False)
        return block(x, grid, self.num_prefix_tokens)

    def _mean_of_frames(self, x: Tensor, B: int) -> Tensor:
        """Average separate frames, so that each clip has one sequence of tokens."""
        return unflatten(x, 0, (B, x.shape[0] // B)).mean(1) if self.time_embed is None else x


default_cfgs = generate_default_cfgs(
    {
        # Kinetics-400, with the mean and standard deviation of the official settings.
        f"timesformer_{size}_patch16_224": transformer_cfg(
            num_classes=400, mean=(0.45, 0.45, 0.45), std=(0.225, 0.225, 0.225)
        )
        for size in WIDTHS
    }
)


def _filtered(state_dict: dict[str, Any], model: TimeSformer) -> dict[str, Any]:
    """Convert a checkpoint, also one for another image size, by timm's rule."""
    state_dict = dict(state_dict)
    unwrap(state_dict)
    return checkpoint_filter_fn(state_dict, model)


def _create(name: str, pretrained: bool, options: dict[str, Any]) -> TimeSformer:
    width, heads = WIDTHS[name.split("_")[1]]
    arguments: dict[str, Any] = dict(patch_size=16, embed_dim=width, depth=12, num_heads=heads)
    return build_model_with_cfg(
        TimeSformer,
        name,
        pretrained,
        pretrained_filter_fn=_filtered,
        feature_cfg=dict(out_indices=options.pop("out_indices", 3), feature_cls="getter"),
        **{**arguments, **options},
    )


@register_model
def timesformer_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> TimeSformer:
    """Create TimeSformer with ViT-Small's width; takes ``pattern`` and ``num_frames`` of :class:`TimeSformer`."""
    return _create("timesformer_small_patch16_224", pretrained, kwargs)


@register_model
def timesformer_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> TimeSformer:
    """Create the paper's TimeSformer (ViT-Base's width): 8 frames of 224²; -HR: 16 of 448² (``img_size``); -L: 96."""
    return _create("timesformer_base_patch16_224", pretrained, kwargs)
