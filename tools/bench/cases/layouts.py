"""Operators on maps in NCHW memory beside themselves on channels-last maps."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_plugins.modules import CrissCrossAttention2d
from attn_plugins.ops import deform_conv2d, global_attention, window_attention

from ..case import Case, Maker, normal, problem
from .window_attention import heads, maps, ours

GOAL = 1 / 1.2  # NCHW takes at most a fifth longer
LAST = "channels-last"
S = 56


def convolution() -> Maker:
    weight = torch.randn(256, 256, 3, 3) / 48

    def run(x: Tensor, offset: Tensor, mask: Tensor) -> Tensor:
        return deform_conv2d(x, offset, weight, None, padding=1, mask=mask)

    return run


def everywhere(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return maps(global_attention(*(heads(t, 8) for t in (query, key, value))))


def windows(k: int) -> Maker:
    return lambda: ours(k, 8, "exclude")


def dynamic(value: Tensor, logits: Tensor) -> Tensor:
    return maps(window_attention(None, None, heads(value, 16), heads(logits, 16), 7, border="zero"))


def cases(device: str) -> list[Case]:
    content = normal(*[(1, 256, S, S)] * 3, None)
    problems = {
        "deform_conv2d, 3x3": (normal((1, 256, 50, 68), (1, 18, 50, 68), (1, 9, 50, 68)), convolution),
        "window_attention, content, 3x3": (content, windows(3)),
        "window_attention, content, 7x7": (content, windows(7)),
        "window_attention, logits, 3x3": (normal(None, None, (1, 256, S, S), (1, 8 * 9, S, S)), predicted(3)),
        "window_attention, logits, 7x7": (normal(None, None, (1, 256, S, S), (1, 8 * 49, S, S)), predicted(7)),
        "dynamic convolution, 7x7, 16 groups": (normal((1, 256, S, S), (1, 16 * 49, S, S)), lambda: dynamic),
        "global_attention, 28x28, 8 heads x 20": (normal(*[(2, 160, 28, 28)] * 3), lambda: everywhere),
        "CrissCrossAttention2d, 97x97": (normal((1, 512, 97, 97)), lambda: CrissCrossAttention2d(512)),
    }
    return [
        row
        for title, (inputs, make) in problems.items()
        for row in problem(title, device, inputs, make, {LAST: make}, goals=(GOAL, GOAL), channels_last=(LAST,))
    ]


def predicted(k: int) -> Maker:
    def run(query: None, key: None, value: Tensor, logits: Tensor) -> Tensor:
        return maps(window_attention(None, None, heads(value, 8), heads(logits, 8), k))

    return lambda: run
