"""TimeSformer's patterns, one after another in turn: forward passes and training steps of a small model."""

from __future__ import annotations

from functools import partial

import timm
import torch

import attn_plugins.timm  # noqa: F401 - registers the models
from attn_plugins.modules.tokens.space_time_attention import STEPS

from ..case import Case, Run, prepare

MODEL, DEPTH = "timesformer_small_patch16_224", 2  # all blocks are alike: two take a sixth of the time
PATTERNS = tuple(STEPS)
# (frames, pixels of a side)
CLIPS = ((4, 224), (8, 224), (16, 224), (32, 224), (4, 336), (4, 448))
KINDS = ("forward", "training")


def step(pattern: str, clip: tuple[int, int], kind: str, depth: int = DEPTH) -> Run:
    """Create a model and a clip, and return the function to time."""
    frames, size = clip
    torch.manual_seed(0)
    model = timm.create_model(MODEL, pattern=pattern, num_frames=frames, img_size=size, depth=depth)
    x = torch.randn(1, frames, 3, size, size)
    if kind == "forward":
        return prepare(model.eval(), [x])
    parameters = list(model.parameters())
    return lambda: torch.autograd.grad(model(x).sum(), parameters)


def cases(device: str) -> list[Case]:
    if device != "cpu":
        return []
    rows = []
    for kind in KINDS:
        for clip in CLIPS:
            first, *others = (partial(step, pattern, clip, kind) for pattern in PATTERNS)
            name = f"{clip[0]} frames of {clip[1]}², {kind}"
            rows.append(Case(name, first, dict(zip(PATTERNS[1:], others)), heavy=True))
    return rows
