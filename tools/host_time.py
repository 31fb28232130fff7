"""Time that the host takes for calls of Triton's operators and for layers that use them, on one thread, without a GPU.

::

    python -m tools.host_time                # a table in Markdown
    python -m tools.host_time --write        # to benchmarks/host-time.md as well

Tensors are tiny and on the CPU, Triton's launches do nothing (``tools/idle_device.py``): what remains is Python, the
dispatcher and autograd. *Triton's route* launches every kernel as Triton does, by looking at all arguments anew.
PyTorch's own operations in a layer, and its attention, compute on the CPU: their times are only upper bounds of the
host's. ``TRITON_INTERPRET`` must not be set.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import timm
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attn_plugins import ops
from attn_plugins.modules import AAConv2d, CrissCrossAttention2d
from attn_plugins.ops import triton_launch

from .benchmark import report
from .files import write_text
from .idle_device import idle_device

PAGE = Path("benchmarks/host-time.md")
ROUNDS = 15
Case = tuple[Callable[..., Tensor], list[Tensor]]


def cases() -> dict[str, Case]:
    """Return functions and their arguments, by name."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16)

    sequence, maps = [draw(2, 2, 16, 16) for _ in range(3)], [draw(1, 2, 4, 4, 16) for _ in range(3)]
    found: dict[str, Case] = {
        "sequence_attention, content": (ops.sequence_attention, sequence),
        "sequence_attention, logits of pairs": (
            lambda q, k, v, logits: ops.sequence_attention(q, k, v, position_logits=logits),
            [*sequence, draw(1, 2, 16, 16)],
        ),
        "global_attention, rows and columns": (
            lambda q, k, v, row, column: ops.global_attention(q, k, v, row_logits=row, column_logits=column),
            [*maps, draw(1, 2, 4, 4, 4), draw(1, 2, 4, 4, 4)],
        ),
        "criss_cross_attention, content": (ops.criss_cross_attention, maps),
        "SDPA": (scaled_dot_product_attention, sequence),
        "AAConv2d": (AAConv2d(16, 16, 3, dk=16, dv=8, num_heads=2, input_size=7), [draw(1, 16, 7, 7)]),
        "CrissCrossAttention2d": (CrissCrossAttention2d(64), [draw(1, 64, 7, 7)]),
    }
    for name in ("attn_swin_tiny_patch4_window7_224", "swin_tiny_patch4_window7_224"):
        blocks = timm.create_model(name, img_size=56, window_size=7).layers[0].blocks
        whose = "" if name.startswith("attn") else ", timm's"
        found[f"Swin layer{whose}"] = blocks[0], [draw(1, 14, 14, 96)]
        found[f"Swin layer, shifted{whose}"] = blocks[1], [draw(1, 14, 14, 96)]
    for function, _ in found.values():
        if isinstance(function, torch.nn.Module):
            function.bfloat16().eval()
    return found


def measure(function: Callable[..., Tensor], tensors: list[Tensor], calls: int) -> tuple[float, float]:
    """Return the least seconds of a call without gradients, and of one with its backward."""
    leaves = [t.detach().requires_grad_() for t in tensors]

    def forward() -> None:
        with torch.no_grad():
            function(*tensors)

    def both() -> None:
        output = function(*leaves)
        output.backward(torch.ones_like(output))

    best = []
    for run in (forward, both):
        for _ in range(min(calls, 5)):
            run()
        times = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            for _ in range(calls):
                run()
            times.append((time.perf_counter() - began) / calls)
        best.append(min(times))
    return best[0], best[1]


def table(calls: int) -> list[str]:
    """Return the lines of the table."""
    lines = [
        "| what | forward, µs | forward+backward, µs | Triton's route: forward | forward+backward |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, (function, tensors) in cases().items():
        cells = []
        for ours in (True, False):
            with idle_device(), patch.object(triton_launch, "_launches_are_known", lambda ours=ours: ours):
                cells += [f"{seconds * 1e6:.0f}" for seconds in measure(function, tensors, calls)]
        peer = name == "SDPA" or name.endswith("timm's")
        lines.append(f"| {name} | {' | '.join(cells[:2] if peer else cells)} |{' | |' if peer else ''}")
    return lines


def main(argv: list[str] | None = None) -> None:
    """Run the tool."""
    parser = argparse.ArgumentParser(prog="python -m tools.host_time", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--calls", type=int, default=50, metavar="N", help="calls in one timed sample (default: 50)")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE}")
    args = parser.parse_args(argv)
    if triton_launch.interpreted():
        parser.error("TRITON_INTERPRET must not be set: nothing is launched in Triton's interpreter")
    torch.set_num_threads(1)
    lines = table(args.calls)
    print("\n".join(lines))
    if args.write:
        facts = ", ".join(f"{key} {value}" for key, value in report.machine("cpu", ["triton"]).items())
        about = (__doc__ or "").split("\n\n")
        text = ["# Time of the host", "`python -m tools.host_time --write`", facts, f"{about[0]} {about[3]}"]
        write_text(PAGE, "\n\n".join([*text, "\n".join(lines)]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
