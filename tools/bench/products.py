"""Measure float32 products by MKL and by oneDNN: python -m tools.bench.products.

Prints a page with GFLOP/s of both for layers of known models and for small products, alternating call by call.
"""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles

import torch
from torch import Tensor

from attn_plugins.ops.common import onednn
from tools import command_parser

LAYERS = {
    "Swin-T, stage 1, qkv": (3136, 96, 288),
    "Swin-T, stage 1, second of the MLP": (3136, 384, 96),
    "Swin-T, stage 3, qkv": (196, 384, 1152),
    "Swin-T, stage 4, first of the MLP": (49, 768, 3072),
    "Deformable DETR, encoder, first of the FFN": (17821, 256, 1024),
    "Deformable DETR, decoder, projection": (300, 256, 256),
    "deform_conv2d, 256 channels, 3×3, a block of columns": (1133, 2304, 256),
    "square": (2048, 2048, 2048),
    "4 million multiplications, the limit": (160, 160, 160),
    "1 million": (100, 100, 100),
    "0.26 million": (64, 64, 64),
}
LINEAR = "`a @ b.T`"
SECONDS = 1.5  # of each row


INTRODUCTION = """# Float32 products on CPUs: MKL and oneDNN

`python -m tools.bench.products`, {date}, {processor}, {threads}, torch {torch}.

GFLOP/s of the fastest call, in brackets the quartiles of all; calls alternate. `a @ b.T` is a linear layer, `a @ b` the
gradient of its input, `a.T @ b` of its weight; packed is a linear layer whose weight oneDNN has packed before. Errors
are the largest beside float64, over the largest result, MKL's in brackets. `ops.use_onednn` takes oneDNN from
{work:,} multiplications on; `a.T @ b` also needs {wide} rows or columns.
"""


def main() -> None:
    """Print the page."""
    command_parser("bench.products", __doc__).parse_args()
    threads = torch.get_num_threads()
    print(
        INTRODUCTION.format(
            date=datetime.date.today(),
            processor=processor(),
            threads=f"{threads} thread{'s' * (threads != 1)}",
            torch=torch.__version__,
            work=onednn.WORK,
            wide=onednn.WIDE,
        )
    )
    print("| product | (rows, width, columns) | form | MKL | oneDNN | ratio | packed | error |")
    print("| --- " * 8 + "|")
    for name, (M, K, N) in LAYERS.items():
        for form, a, b in (
            (LINEAR, torch.randn(M, K), torch.randn(N, K).t()),
            ("`a @ b`", torch.randn(M, N), torch.randn(N, K)),
            ("`a.T @ b`", torch.randn(M, N).t(), torch.randn(M, K)),
        ):
            print(row(name, (M, K, N), form, a, b), flush=True)


def row(name: str, sizes: tuple[int, int, int], form: str, a: Tensor, b: Tensor) -> str:
    """Measure one product and return its line of the table."""
    rows, width, columns = sizes
    calls: list[Callable[[], Tensor]] = [lambda: torch.ops.aten.mm(a, b), lambda: onednn._product(a, b, None)]
    if form == LINEAR:
        weight = torch.ops.mkldnn._reorder_linear_weight(b.t(), rows)
        calls.append(lambda: onednn._linear(a, weight))
    exact = a.double() @ b.double()
    errors = [float((call() - exact).abs().max() / exact.abs().max()) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times[0]) < 5:
        for call, seconds in zip(calls, times):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    work = 2e-9 * rows * width * columns
    speeds = [f"{work / min(t):.0f} ({work / q[2]:.0f}–{work / q[0]:.0f})" for t in times for q in [quantiles(t)]]
    mkl, other, *packed = speeds
    ratio = min(times[0]) / min(times[1])
    error = f"{errors[1]:.0e} ({errors[0]:.0e})"
    return f"| {name} | {sizes} | {form} | {mkl} | {other} | {ratio:.2f}× | {''.join(packed)} | {error} |"


def processor() -> str:
    """Return the processor's name and its vector instructions as PyTorch sees them."""
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{(names or [platform.processor()])[0]} ({torch.backends.cpu.get_cpu_capability()})"


if __name__ == "__main__":
    main()
