"""Vision transformers of timm's kind in backbones: tokens of pictures of any size, blocks one by one.

Shapes: B batch, C width of the transformer, P class tokens and registers, (H, W) the grid of patches.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ....core.axes import unflatten
from ...common.checks import check_map

Size = tuple[int, int]
_PARTS = ("patch_embed", "norm_pre", "blocks", "embed_dim")
_OF_TOKENS = ("_pos_embed", "num_prefix_tokens", "dynamic_img_size")
_OF_MAPS = ("pos_embed", "pos_drop")


class ViTBackbone(nn.Module):
    """Base of backbones that run the blocks of a vision transformer.

    Args:
        vit: The transformer, with the attributes ``patch_embed``, ``norm_pre``, ``blocks`` and ``embed_dim`` of timm's,
            and either ``_pos_embed``, ``num_prefix_tokens`` and ``dynamic_img_size``, which must be True, of
            ``VisionTransformer`` and ``Eva``; or ``pos_embed``, (1, H, W, C) or None, and ``pos_drop`` of
            ``VisionTransformerSAM``, whose blocks compute maps (B, H, W, C), in windows too. Its ``norm``, neck and
            head are not used.
        with_cp: Use activation checkpointing in training.

    Raises:
        TypeError: ``vit`` is no such transformer.
        ValueError: ``vit`` accepts pictures of one size only, or drops patches.
    """

    def __init__(self, vit: nn.Module, with_cp: bool = False) -> None:
        super().__init__()
        self.on_maps = on_maps(vit)
        parts = _PARTS if self.on_maps else (*_PARTS, *_OF_TOKENS)
        missing = ", ".join(name for name in parts if not hasattr(vit, name))
        if missing:
            raise TypeError(f"vit must be like timm's VisionTransformer, got {type(vit).__name__} without {missing}")
        self.vit = cast(Any, vit)
        if not (self.on_maps or self.vit.dynamic_img_size):
            raise ValueError("vit must accept pictures of any size: create it with dynamic_img_size=True")
        if not isinstance(getattr(self.vit, "patch_drop", None), (nn.Identity, type(None))):
            raise ValueError("vit must keep all patches: create it with patch_drop_rate=0")
        self.with_cp = with_cp
        self.embed_dim: int = self.vit.embed_dim
        self.num_prefix_tokens: int = 0 if self.on_maps else self.vit.num_prefix_tokens
        self.in_channels: int = getattr(self.vit, "in_chans", 3)
        size = self.vit.patch_embed.patch_size
        self.patch_size: Size = (size, size) if isinstance(size, int) else tuple(size)

    def embed(self, x: Tensor) -> tuple[Tensor, Size, Tensor | None]:
        """Compute the tokens (B, P + H * W, C) of pictures; return them, (H, W), and rotary positions for :meth:`run`.

        The pictures are padded with zeros, below and at the right, to whole patches.
        """
        check_map(x, self.in_channels, getattr(self.vit.patch_embed, "proj", self.vit.patch_embed))
        H, W = cells(x, self.patch_size)
        patches = self.vit.patch_embed(_padded(x, H * self.patch_size[0], W * self.patch_size[1]))
        if patches.dim() != 4 or patches.shape[1:3] != (H, W):
            raise ValueError(f"vit.patch_embed must return (B, {H}, {W}, C), got {tuple(patches.shape)}")
        if self.on_maps:
            return self.vit.norm_pre(self.vit.pos_drop(self._with_positions(patches))).flatten(1, 2), (H, W), None
        tokens = self.vit._pos_embed(patches)
        tokens, rotary = tokens if isinstance(tokens, tuple) else (tokens, None)
        return self.vit.norm_pre(tokens), (H, W), rotary

    def _with_positions(self, patches: Tensor) -> Tensor:
        """Add absolute positions to (B, H, W, C), interpolated as timm does."""
        positions = self.vit.pos_embed
        if positions is None:
            return patches
        if positions.shape[1:3] != patches.shape[1:3]:
            moved = positions.float().permute(0, 3, 1, 2)
            moved = F.interpolate(moved, size=patches.shape[1:3], mode="bicubic", antialias=True)
            positions = moved.permute(0, 2, 3, 1).to(positions.dtype)
        return patches + positions

    def run(self, tokens: Tensor, grid: Size, first: int, last: int, rotary: Tensor | None) -> Tensor:
        """Apply the blocks from number ``first`` to number ``last``."""
        if self.on_maps:
            x = unflatten(tokens, 1, grid)
            for number in range(first, last + 1):
                x = self.checkpointed(self.vit.blocks[number], x)
            return x.flatten(1, 2)
        for number in range(first, last + 1):
            options = {}
            if rotary is not None:
                options["rope"] = rotary[number] if getattr(self.vit, "rope_mixed", False) else rotary
            tokens = self.checkpointed(self.vit.blocks[number], tokens, **options)
        return tokens

    def checkpointed(self, function: Any, *args: Any, **options: Any) -> Any:
        """Call a function; ``with_cp``, training keeps its inputs alone for the backward pass."""
        if self.with_cp and self.training:
            return checkpoint(function, *args, use_reentrant=False, **options)
        return function(*args, **options)

    def patches(self, tokens: Tensor, grid: Size) -> Tensor:
        """Return the map (B, C, H, W) of tokens, without class tokens and registers."""
        return to_map(tokens[:, self.num_prefix_tokens :], grid)


def on_maps(vit: nn.Module) -> bool:
    """Return whether a transformer's blocks compute maps, as those of timm's ``VisionTransformerSAM`` do."""
    return not hasattr(vit, "_pos_embed") and all(hasattr(vit, name) for name in _OF_MAPS)


def cells(x: Tensor, stride: Size) -> Size:
    """Return the size of a map of pictures ``x`` at ``stride``, rounded up."""
    return _ceil(x.shape[2], stride[0]), _ceil(x.shape[3], stride[1])


def to_map(tokens: Tensor, size: Size) -> Tensor:
    """View tokens (B, H * W, C) as (B, C, H, W)."""
    return unflatten(tokens, 1, size).permute(0, 3, 1, 2)


def to_tokens(x: Tensor) -> Tensor:
    """View a map (B, C, H, W) as tokens (B, H * W, C)."""
    return x.flatten(2).transpose(1, 2)


def resample(x: Tensor, stride: Size, to: int, size: Size) -> Tensor:
    """Interpolate a map bilinearly to another stride; pixels stay where they are in the picture.

    Args:
        x: (B, C, H, W), which starts at the picture's upper left corner.
        stride: Pixels of the picture per row and column of ``x``.
        to: Stride of the result, a power of 2.
        size: (H', W') of the result. What lies beyond ``x`` repeats its border.
    """
    if stride != (to, to):
        x = _padded(x, _ceil(size[0] * to, stride[0]), _ceil(size[1] * to, stride[1]), mode="replicate")
        scale = (stride[0] / to, stride[1] / to)
        x = F.interpolate(x, scale_factor=scale, mode="bilinear", align_corners=False)
    return x[..., : size[0], : size[1]]


def _ceil(number: int, divisor: int) -> int:
    return (number + divisor - 1) // divisor  # of positive numbers, which ONNX's integer division rounds as Python's


def _padded(x: Tensor, height: int, width: int, mode: str = "constant") -> Tensor:
    below, right = max(height - x.shape[2], 0), max(width - x.shape[3], 0)
    return F.pad(x, (0, right, 0, below), mode=mode) if below or right else x
