"""Positions of the tokens of timm's vision transformers.

timm passes only tokens to an attention layer: neither the grid that they come from nor the number of preceding class
tokens and registers. Therefore a model with layers of this package gets a :class:`Places` once it is built, by wrapping
the constructors of ``VisionTransformer`` and ``NaFlexVit``, which are otherwise unchanged.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn


class Places:
    """Grid of a model's current input, and its number of tokens without a position."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.seen: tuple[int, int] | None = None
        self.watched = False
        if isinstance(model, NaFlexVit):  # its grid always depends on the image
            model.embeds.register_forward_hook(self._note_embeds)
            self.watched = True
        elif model.dynamic_img_size:
            model.patch_embed.register_forward_hook(self._note_patches)  # type: ignore[union-attr]
            self.watched = True
        for block in model.blocks if self.watched else ():  # type: ignore[union-attr]
            block.register_forward_pre_hook(self._keep)

    @property
    def prefix(self) -> int:
        """Number of class tokens and registers."""
        return self.model.num_prefix_tokens  # type: ignore[return-value]

    @property
    def grid(self) -> tuple[int, int] | None:
        """(H, W), or None if every image of the batch has its own grid."""
        if self.watched:
            return self.seen
        H, W = self.model.patch_embed.grid_size  # type: ignore[union-attr, misc]
        return H, W

    def _keep(self, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Restore the grid that the block's input came with, where gradient checkpointing repeats the block."""
        if not torch.compiler.is_compiling():
            x = inputs[0]
            self.seen = x._attn_plugins_grid = getattr(x, "_attn_plugins_grid", self.seen)

    def _note_embeds(self, module: nn.Module, inputs: Any, output: tuple[Tensor, tuple[int, int] | None]) -> None:
        self.seen = None if output[1] is None else (output[1][0], output[1][1])

    def _note_patches(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.seen = (output.shape[1], output.shape[2])  # (B, H, W, C)


def set_places(model: nn.Module) -> None:
    """Set the ``places`` of those layers of ``model`` that need the positions of tokens."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "places")]
    if layers:
        places = Places(model)
        for layer in layers:
            layer.places = places


def _wrap(model_class: Any) -> None:
    original = model_class.__init__
    if hasattr(original, "_attn_plugins"):
        return

    @functools.wraps(original)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        set_places(self)

    __init__._attn_plugins = True  # type: ignore[attr-defined]
    model_class.__init__ = __init__


_wrap(VisionTransformer)
_wrap(NaFlexVit)
