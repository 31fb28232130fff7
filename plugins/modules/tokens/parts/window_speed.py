"""Where a toolkit's own window attention is faster on a GPU than this package's, as measured on whole models.

``accelerate`` of timm and the drop-in for mmdet and mmseg keep stock's code in these cases. What was not measured
runs on our operators.
"""

from __future__ import annotations

import os
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ....core.arguments import autocast_dtype, tf32_is_allowed
from ....core.gradients import traced

SWITCH = "ATTN_PLUGINS_STOCK_IF_FASTER"  # 0: our operators in all cases

Version = Literal["Swin", "Swin V2"]
Arithmetic = Literal["TF32", "half"]


class Speedup(NamedTuple):
    """Time of the stock model over that of ours; below 1 stock is faster."""

    training: float
    prediction: float


# Eager calls on an H200 with torch 2.11 on 2026-11-27: timm's swin_tiny (224x224, batch 64) and swinv2_tiny (256x256,
# batch 32), half precision being bfloat16 (benchmarks/gpu-eager-first.md). timm's attention was not fused, as in mmdet.
SPEEDUPS: dict[tuple[Version, Arithmetic], Speedup] = {
    ("Swin", "TF32"): Speedup(0.70, 0.87),
    ("Swin", "half"): Speedup(1.05, 1.68),
    ("Swin V2", "TF32"): Speedup(0.89, 0.73),
    ("Swin V2", "half"): Speedup(0.85, 1.26),
}


def stock_is_faster(version: Version, x: Tensor, attn: nn.Module) -> bool:
    """Return whether the toolkit's own code was measured to compute a window attention faster than ours.

    False for all but eager calls on CUDA, and if ``ATTN_PLUGINS_STOCK_IF_FASTER=0`` is in the environment.

    Args:
        version: What the layer computes.
        x: The layer's input.
        attn: The layer, which may train, or whose parameters may ask for gradients.
    """
    if x.device.type != "cuda" or traced() or os.environ.get(SWITCH, "1") == "0":
        return False
    return is_slower(version, arithmetic(x), _trains(x, attn))


def is_slower(version: Version, arithmetic: Arithmetic | None, training: bool) -> bool:
    """Return whether ours was measured to be slower than stock, in a training step or in a prediction."""
    speedup = None if arithmetic is None else SPEEDUPS.get((version, arithmetic))
    return speedup is not None and (speedup.training if training else speedup.prediction) < 1


def arithmetic(x: Tensor) -> Arithmetic | None:
    """Return how CUDA multiplies ``x`` by weights, under autocast too; None for float32 without TF32, and float64."""
    dtype = x.dtype if x.dtype == torch.float64 else autocast_dtype(x.device.type) or x.dtype
    if dtype in (torch.float16, torch.bfloat16):
        return "half"
    return "TF32" if dtype == torch.float32 and tf32_is_allowed() else None


def _trains(x: Tensor, attn: nn.Module) -> bool:
    """Return whether the call is part of a training step, recorded or not.

    A checkpoint may call the layer without gradients first: both calls must draw their dropout alike.
    """
    if attn.training:
        return True
    return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in attn.parameters()))
