"""Overhead of calls: every operator on 4 × 4 maps (16 positions), one thread."""

from __future__ import annotations

from typing import Any

import torch

from attn_plugins import ops

from ..case import Case, Run

CALLS = 100  # in one timed sample
S, C, M, D, K = 4, 8, 2, 8, 3  # side of the map, channels, heads, width of a head, kernel size
HEADS, SEQUENCE, ROW = [(1, M, S, S, D)] * 3, [(1, M, S * S, D)] * 3, (1, M, S, S, S)
# Operator: shapes of the tensors, and the call.
OPERATORS: dict[str, tuple[list[tuple[int, ...]], Any]] = {
    "deform_conv2d": (
        [(1, C, S, S), (1, 2 * K * K, S, S), (C, C, K, K), (1, K * K, S, S)],
        lambda x, offset, weight, mask: ops.deform_conv2d(x, offset, weight, padding=1, mask=mask),
    ),
    "deform_conv1d": (
        [(1, C, S * S), (1, K, S * S), (C, C, K), (1, K, S * S)],
        lambda x, offset, weight, mask: ops.deform_conv1d(x, offset, weight, padding=1, mask=mask),
    ),
    "deformable_attention": (
        [(1, S * S, M, D), (1, S * S, M, 1, 4, 2), (1, S * S, M, 1, 4)],
        lambda value, locations, weights: ops.deformable_attention(value, ((S, S),), locations, weights),
    ),
    "global_attention": (
        [*HEADS, ROW, ROW],
        lambda q, k, v, row, column: ops.global_attention(q, k, v, row_logits=row, column_logits=column),
    ),
    "sequence_attention": (
        [*SEQUENCE, (1, M, S * S, K)], lambda q, k, v, band: ops.sequence_attention(q, k, v, band_logits=band),
    ),
    "window_attention": (
        [*HEADS, (1, M, S, S, K * K)], lambda q, k, v, logits: ops.window_attention(q, k, v, logits, K),
    ),
    "criss_cross_attention": ([*HEADS, (1, M, S, S, 2 * S)], ops.criss_cross_attention),
}  # fmt: skip


def cases(device: str) -> list[Case]:
    """Return two rows for each operator: without gradients, and with the graph for them recorded."""
    rows = []
    for name, (shapes, call) in OPERATORS.items():
        for recorded in (False, True):

            def prepare(shapes: Any = shapes, call: Any = call, recorded: bool = recorded) -> Run:
                tensors = [torch.rand(shape, device=device).requires_grad_(recorded) for shape in shapes]

                def run() -> Any:
                    with torch.set_grad_enabled(recorded):
                        return call(*tensors)

                return run

            kind = "gradients recorded" if recorded else "forward"
            rows.append(Case(f"{name}, 1 thread, {kind}", prepare, calls=CALLS, threads=1, main=False))
    return rows
