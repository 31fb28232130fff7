"""Time that the host takes for Triton's operators and for layers that use them, on one thread, without a GPU.

Tensors are tiny and on the CPU, and Triton's launches do nothing: what remains is Python, the dispatcher and autograd.
The peer launches every kernel as Triton does, by looking at all arguments again. PyTorch's own operations in a layer,
and its attention, compute on the CPU: their times are only upper bounds of the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import timm
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from attn_plugins import ops
from attn_plugins.modules import AAConv2d, CrissCrossAttention2d
from attn_plugins.ops.common import triton_launch

from ..case import PASSES, Case, Run, prepare
from ..idle_device import idle_device, new_device

CALLS = 50  # in one timed sample
ROUTE = "Triton's route"


def swin(block: int, prefix: str = "attn_") -> nn.Module:
    name = f"{prefix}swin_tiny_patch4_window7_224"
    return timm.create_model(name, img_size=56, window_size=7).layers[0].blocks[block]


SEQUENCE, MAPS, SWIN = [(2, 2, 16, 16)] * 3, [(1, 2, 4, 4, 16)] * 3, [(1, 14, 14, 96)]
# Functions or makers of layers, shapes of their inputs, and peers that do not launch Triton's kernels.
CALLED: dict[str, tuple[Any, Sequence[tuple[int, ...]], dict[str, Any]]] = {
    "sequence_attention, content": (ops.sequence_attention, SEQUENCE, {"SDPA": scaled_dot_product_attention}),
    "sequence_attention, logits of pairs": (
        lambda q, k, v, logits: ops.sequence_attention(q, k, v, position_logits=logits),
        [*SEQUENCE, (1, 2, 16, 16)], {},
    ),
    "global_attention, rows and columns": (
        lambda q, k, v, row, column: ops.global_attention(q, k, v, row_logits=row, column_logits=column),
        [*MAPS, (1, 2, 4, 4, 4), (1, 2, 4, 4, 4)], {},
    ),
    "criss_cross_attention, content": (ops.criss_cross_attention, MAPS, {}),
    "AAConv2d": (lambda: AAConv2d(16, 16, 3, dk=16, dv=8, num_heads=2, input_size=7), [(1, 16, 7, 7)], {}),
    "CrissCrossAttention2d": (lambda: CrissCrossAttention2d(64), [(1, 64, 7, 7)], {}),
    "Swin layer": (lambda: swin(0), SWIN, {"timm": lambda: swin(0, "")}),
    "Swin layer, shifted": (lambda: swin(1), SWIN, {"timm": lambda: swin(1, "")}),
}  # fmt: skip


def prepared(function: Any, shapes: Sequence[tuple[int, ...]], passes: str, known: bool | None) -> Callable[[], Run]:
    """Return a preparation by our launches (``known``), by Triton's, or without a device that launches nothing."""

    def make() -> Run:
        called = function() if len(shapes) == 1 else function
        if isinstance(called, nn.Module):
            called = called.bfloat16().eval()
        tensors = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
        device = new_device()

        def idle() -> ExitStack:
            stack = ExitStack()
            if known is not None:
                stack.enter_context(idle_device(device=device))
                stack.enter_context(patch.object(triton_launch, "_launches_are_known", lambda: known))
            return stack

        with idle():
            run = prepare(called, tensors, passes=passes)

        def calls() -> None:
            with idle():
                for _ in range(CALLS):
                    run()

        return calls

    return make


def cases(device: str) -> list[Case]:
    if triton_launch.interpreted():
        raise RuntimeError("TRITON_INTERPRET must not be set: nothing is launched in Triton's interpreter")
    rows = []
    for name, (function, shapes, others) in CALLED.items():
        for passes in PASSES:
            peers = {ROUTE: prepared(function, shapes, passes, False)}
            peers |= {peer: prepared(other, shapes, passes, None) for peer, other in others.items()}
            case = Case(
                f"{name}, 1 thread, {passes}", prepared(function, shapes, passes, True), peers, repeats=CALLS, threads=1
            )
            rows.append(case)
    return rows if device == "cpu" else []
