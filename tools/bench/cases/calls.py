"""Overhead of calls: every operator on 4 × 4 maps (16 positions), one thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_plugins import ops

from ..case import Case, Run

CALLS = 100  # in one timed sample
S, C, M, D, K = 4, 8, 2, 8, 3  # side of the map, channels, heads, width of a head, kernel size


def arguments(device: str) -> dict[str, tuple[tuple[Tensor, ...], Callable[..., Tensor]]]:
    """Return, by operator, the tensors of a small call and the call."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    heads, sequence = [draw(1, M, S, S, D) for _ in range(3)], [draw(1, M, S * S, D) for _ in range(3)]
    row, column = draw(1, M, S, S, S), draw(1, M, S, S, S)
    return {
        "deform_conv2d": (
            (draw(1, C, S, S), draw(1, 2 * K * K, S, S), draw(C, C, K, K), draw(1, K * K, S, S)),
            lambda x, offset, weight, mask: ops.deform_conv2d(x, offset, weight, padding=1, mask=mask),
        ),
        "deform_conv1d": (
            (draw(1, C, S * S), draw(1, K, S * S), draw(C, C, K), draw(1, K, S * S)),
            lambda x, offset, weight, mask: ops.deform_conv1d(x, offset, weight, padding=1, mask=mask),
        ),
        "deformable_attention": (
            (draw(1, S * S, M, D), draw(1, S * S, M, 1, 4, 2).sigmoid(), draw(1, S * S, M, 1, 4)),
            lambda value, locations, weights: ops.deformable_attention(value, ((S, S),), locations, weights),
        ),
        "global_attention": (
            (*heads, row, column),
            lambda q, k, v, row, column: ops.global_attention(q, k, v, row_logits=row, column_logits=column),
        ),
        "sequence_attention": (
            (*sequence, draw(1, M, S * S, K)),
            lambda q, k, v, band: ops.sequence_attention(q, k, v, band_logits=band),
        ),
        "window_attention": (
            (*heads, draw(1, M, S, S, K * K)),
            lambda q, k, v, logits: ops.window_attention(q, k, v, logits, K),
        ),
        "criss_cross_attention": ((*heads, draw(1, M, S, S, 2 * S)), ops.criss_cross_attention),
    }


def cases(device: str) -> list[Case]:
    """Return two rows for each operator: without gradients, and with the graph for them recorded."""
    found = []
    for name in arguments("meta"):
        for recorded in (False, True):

            def prepare(name: str = name, recorded: bool = recorded) -> Run:
                tensors, call = arguments(device)[name]
                leaves = [t.requires_grad_(recorded) for t in tensors]

                def run() -> Any:
                    with torch.set_grad_enabled(recorded):
                        return call(*leaves)

                return run

            kind = "gradients recorded" if recorded else "forward"
            found.append(Case(f"{name}, 1 thread, {kind}", prepare, calls=CALLS, threads=1, main=False))
    return found
