"""Conversion of weights for TimeSformer, from a ViT or from the official checkpoints.

The official files (``TimeSformer_divST_8x32_224_K400.pyth`` and others) hold ``model_state``, whose names begin with
``model.``. Weights without the added attention, such as a ViT's, are completed as in ``load_pretrained`` of the
official code: the added attention starts with the spatial attention's weights, followed by an ``fc`` of zeros, and the
time embedding starts with zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

WRAPPED = "model."


def resized_in_time(time_embed: Tensor, frames: int) -> Tensor:
    """Resize a time embedding (1, T, C) to another number of frames by nearest neighbors, as in the official code."""
    if time_embed.shape[1] == frames:
        return time_embed
    return F.interpolate(time_embed.transpose(1, 2), size=frames, mode="nearest").transpose(1, 2)


def unwrap(state_dict: dict[str, Any], prefix: str = "") -> None:
    """Rename the keys of an official checkpoint to those of this model, in place.

    Args:
        state_dict: State of the whole model, whose names begin with ``prefix``.
        prefix: Prefix of the TimeSformer.
    """
    if isinstance(weights := state_dict.get(f"{prefix}model_state"), dict):
        for key in [key for key in state_dict if key.startswith(prefix)]:  # epoch, optimizer and settings
            del state_dict[key]
        state_dict.update({prefix + key: value for key, value in weights.items()})
    for key in [key for key in state_dict if key.startswith(prefix + WRAPPED)]:
        state_dict[prefix + key.removeprefix(prefix + WRAPPED)] = state_dict.pop(key)


def complete(
    state_dict: dict[str, Any], prefix: str, time_embed: Tensor | None, blocks: int, added: Iterable[str]
) -> None:
    """Add the parameters that a ViT's weights lack, in place.

    Args:
        state_dict: State of the whole model, whose names begin with ``prefix``.
        prefix: Prefix of the TimeSformer.
        time_embed: The model's time embedding (1, T, C), or None.
        blocks: Number of blocks.
        added: Name prefixes of the added attention in each block.
    """
    if time_embed is not None:
        stored = state_dict.get(f"{prefix}time_embed")
        if stored is None:
            state_dict[f"{prefix}time_embed"] = torch.zeros_like(time_embed)
        elif stored.dim() == 3 and stored.shape[::2] == time_embed.shape[::2]:
            state_dict[f"{prefix}time_embed"] = resized_in_time(stored, time_embed.shape[1])
    for block in (f"{prefix}blocks.{number}." for number in range(blocks)):
        for name in added:
            if any(key.startswith(block + name) for key in state_dict):
                continue
            for key in [key for key in state_dict if key.startswith((f"{block}attn.", f"{block}norm1."))]:
                state_dict[block + name + key.removeprefix(block)] = state_dict[key]
            weight = state_dict.get(f"{block}attn.proj.weight")
            if weight is not None:
                state_dict[f"{block}{name}fc.weight"] = torch.zeros_like(weight)
                state_dict[f"{block}{name}fc.bias"] = weight.new_zeros(len(weight))
