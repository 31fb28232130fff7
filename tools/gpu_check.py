"""The Python half of ``tools/gpu_check.sh``.

python -m tools.gpu_check sanitize     a small problem of every kind, to run under compute-sanitizer
python -m tools.gpu_check benchmark    times, floors, block sizes and kernels, to $OUT/gpu.md and $OUT/gpu.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tools.requires import extras

with extras():
    import torch
    from torch import Tensor

    from attn_plugins.ops import deform_conv2d, deformable_attention, library
    from attn_plugins.ops import window_attention as window_attention_op

    from .benchmark import report, results
    from .benchmark.case import Case, Run, forward, forward_backward
    from .benchmark.criss_cross import criss_cross
    from .benchmark.everywhere import augmented_conv, global_attention
    from .benchmark.measure import Settings, measure, seconds
    from .benchmark.sampled import deform_conv
    from .benchmark.sampled import deformable_attention as deformable_attention_rows
    from .benchmark.window import window_attention

PROBLEM = (16, 256, 64, 64, 1)  # B, C, H, W, offset groups: what the floors, the sweep and the profile are of
KINDS = {
    "float32": (torch.float32, False),
    "TF32": (torch.float32, True),
    "float16": (torch.float16, False),
    "bfloat16": (torch.bfloat16, False),
}
BLOCK_PIXELS = (1024, 2048, 4096, 8192, 16384, 65536)


def sanitize() -> None:
    """Every data type and vector width, whole blocks and parts, both layouts, samples far outside."""
    sizes = ((2, 16, 9, 11, 2, 1), (1, 36, 5, 6, 3, 2), (3, 6, 7, 5, 1, 1), (1, 520, 3, 4, 1, 1), (2, 5, 1, 1, 5, 1))
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for B, C, H, W, D, groups in sizes:
            make: dict[str, Any] = dict(device="cuda", dtype=dtype)
            offset = torch.randn(B, 18 * D, H, W, **make) * 3
            offset[:, ::5] = float("nan")
            offset[:, 1::7] = 6e4
            weight = torch.randn(4, C // groups, 3, 3, **make)
            mask = torch.rand(B, 9 * D, H, W, **make)
            for layout in (torch.contiguous_format, torch.channels_last):
                input = torch.randn(B, C, H, W, **make).to(memory_format=layout)
                leaves = [t.detach().requires_grad_() for t in (input, offset, weight, mask)]
                output = deform_conv2d(leaves[0], leaves[1], leaves[2], torch.randn(4, **make), 1, 1, 1, leaves[3])
                for result in (output, *torch.autograd.grad(output, leaves, torch.randn_like(output))):
                    assert torch.isfinite(result).all()
    sanitize_windows()
    sanitize_samples()
    torch.cuda.synchronize()
    print("computed all small problems")


def sanitize_windows() -> None:
    """Every data type, widths in and out of whole vectors, parts of tiles, strides, both borders."""
    sizes = ((2, 9, 11, 32, 32, 3, 1), (1, 33, 5, 64, 16, 7, 1), (3, 1, 70, 5, 6, 5, 2), (1, 1, 1, 8, 8, 3, 1))
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for M, H, W, d, dv, k, stride in sizes:
            grid = (-(-H // stride), -(-W // stride))
            shapes = ((*grid, d), (H, W, d), (H, W, dv), (*grid, k * k))
            leaves = [torch.randn(2, M, *s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]
            for border in ("exclude", "zero"):
                for terms in (leaves, [None, None, *leaves[2:]], [*leaves[:3], None]):
                    output = window_attention_op(*terms, k, stride=stride, border=border)
                    wanted = [t for t in terms if t is not None]
                    for result in (output, *torch.autograd.grad(output, wanted, torch.randn_like(output))):
                        assert torch.isfinite(result).all()


def sanitize_samples() -> None:
    """Deformable attention: every data type, widths in and out of whole vectors, parts of blocks, far places."""
    shapes = ((5, 7), (1, 3))
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        beside = torch.float64 if dtype == torch.float64 else torch.float32
        for M, d, Q in ((8, 32, 19), (3, 5, 1), (1, 200, 40), (2, 6, 300)):
            value = torch.randn(2, 38, M, d, device="cuda", dtype=dtype)
            locations = torch.rand(2, Q, M, 2, 3, 2, device="cuda", dtype=beside) * 3 - 1
            locations[:, ::3, :, :, 1] = float("nan")
            weights = torch.rand(2, Q, M, 2, 3, device="cuda", dtype=beside)
            leaves = [t.requires_grad_() for t in (value, locations, weights)]
            output = deformable_attention(leaves[0], shapes, *leaves[1:])
            for result in (output, *torch.autograd.grad(output, leaves, torch.randn_like(output))):
                assert torch.isfinite(result).all()


def median(run: Run, repeats: int = 15) -> float:
    for _ in range(3):
        run()
    return statistics.median(seconds(run, "cuda") for _ in range(repeats))


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def materialised(query: Tensor, key: Tensor, value: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Attention with its logits and weights written to memory, as mmcv's GeneralizedAttention does it."""
    logits = torch.einsum("bmhwd,bmyxd->bmhwyx", query, key) + row.unsqueeze(-1) + column.unsqueeze(-2)
    weights = logits.flatten(4).softmax(-1)
    return torch.matmul(weights.flatten(2, 3), value.flatten(2, 3)).unflatten(2, query.shape[2:4])


def attention_cases() -> list[Case]:
    """Operator cases with a further peer; of the modules, which have no peer without mmcv, the 1111 ones."""
    found = []
    for case in global_attention.cases("cuda"):
        if case.name.startswith("module 1111"):
            found.append(case)
    B, M, Hq, Wq, Hk, Wk, d = 2, 8, 50, 84, 25, 42, 32
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for passes, build in (("forward", forward), ("forward+backward", forward_backward)):

            def prepare(
                function: Callable[..., Tensor], dtype: torch.dtype = dtype, build: Callable[..., Run] = build
            ) -> Callable[[], Run]:
                def run() -> Run:
                    torch.backends.cuda.matmul.allow_tf32 = False
                    shapes = ((Hq, Wq, d), (Hk, Wk, d), (Hk, Wk, d), (Hq, Wq, Hk), (Hq, Wq, Wk))
                    return build(function, *(torch.randn(B, M, *s, device="cuda", dtype=dtype) for s in shapes))

                return run

            found.append(
                Case(
                    f"operator, batch {B}, {Hq}x{Wq} queries, {Hk}x{Wk} keys, {M} heads x {d}, "
                    f"{str(dtype).removeprefix('torch.')}, {passes}",
                    prepare(global_attention.run_ours),
                    {
                        "materialised logits": prepare(materialised),
                        "SDPA with mask": prepare(global_attention.sdpa_with_mask),
                    },
                    global_attention.GOALS["cuda"],
                )
            )
    return found


def augmented_cases() -> list[Case]:
    """Relative attention and layers; the networks too where timm is."""
    return [case for case in augmented_conv.cases("cuda") if find_spec("timm") or not case.name.startswith("aa_")]


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of copying 1 GiB."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / median(lambda: target.copy_(source))


def floors() -> list[dict]:
    """What no version can beat: the copy bandwidth, and the matrix products of PROBLEM alone, as one GEMM each."""
    B, C, H, W, _ = PROBLEM
    rows = [{"floor": "copy, TB/s read and written", "value": copy_bandwidth() / 1e12}]
    for kind, (dtype, allowed) in KINDS.items():
        columns = torch.randn(B * H * W, 9 * C, device="cuda", dtype=dtype)
        weight = torch.randn(C, 9 * C, device="cuda", dtype=dtype)
        grad = torch.randn(B * H * W, C, device="cuda", dtype=dtype)
        with tf32(allowed):
            product = median(lambda: columns @ weight.t())  # noqa: B023
            backward = median(lambda: (grad @ weight, grad.t() @ columns))  # noqa: B023
        rows.append({"floor": f"GEMM of {PROBLEM[:4]}, {kind}, forward, ms", "value": product * 1e3})
        rows.append(
            {"floor": f"GEMMs of {PROBLEM[:4]}, {kind}, forward+backward, ms", "value": (product + backward) * 1e3}
        )
    return rows


@contextmanager
def block_pixels(count: int | None) -> Iterator[None]:
    if count is not None:
        os.environ["ATTN_PLUGINS_BLOCK_PIXELS"] = str(count)
    try:
        yield
    finally:
        os.environ.pop("ATTN_PLUGINS_BLOCK_PIXELS", None)


def replayed(run: Run) -> float:
    """Time of a run captured in a CUDA graph: what the device needs, without the launches' cost on the host."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median(graph.replay)


def sweep() -> list[dict]:
    """PROBLEM at several block sizes; None is the kernels' own choice."""
    rows = []
    for kind in ("TF32", "bfloat16"):
        dtype, allowed = KINDS[kind]
        tensors = deform_conv.operands(PROBLEM, dtype, "cuda")
        runs = {"forward": forward(deform_conv.ours, *tensors)}
        runs["forward+backward"] = forward_backward(deform_conv.ours, *tensors)
        for count in (None, *BLOCK_PIXELS):
            with block_pixels(count), tf32(allowed):
                row: dict = {"kind": kind, "block pixels": count or "own choice"}
                row |= {f"{name}, ms": median(run) * 1e3 for name, run in runs.items()}
                row["forward in a graph, ms"] = replayed(runs["forward"]) * 1e3
            rows.append(row)
    return rows


def profile() -> list[dict]:
    """Device time by kernel of one forward and backward pass over PROBLEM in bfloat16."""
    run = forward_backward(deform_conv.ours, *deform_conv.operands(PROBLEM, torch.bfloat16, "cuda"))
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    events = [e for e in recorded.key_averages() if e.device_time_total > 0]
    return [
        {"kernel": e.key[:90].replace("|", "/"), "calls": e.count, "ms": e.device_time_total / 1e3}
        for e in sorted(events, key=lambda e: -e.device_time_total)[:14]
    ]


def table(title: str, rows: list[dict]) -> str:
    if not rows:
        return ""
    cell = lambda v: f"{v:.4g}" if isinstance(v, float) else str(v)  # noqa: E731
    names = list(rows[0])
    lines = [f"# {title}", "", "| " + " | ".join(names) + " |", "| --- " * len(names) + "|"]
    lines += ["| " + " | ".join(cell(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def page(name: str, command: str, facts: dict[str, str], rows: list[dict]) -> str:
    """Return the part of the page that a benchmark's rows make."""
    head = [f"# {name}, cuda", "", f"`{command}`", "", ", ".join(f"{k} {v}" for k, v in facts.items()), ""]
    return "\n".join([*head, *report.table(rows)]) + "\n"


def benchmark() -> None:
    assert library.has_kernel("cuda"), library.failures()["cuda"]
    torch.manual_seed(0)
    facts = report.machine("cuda")
    command = "bash tools/gpu_check.sh benchmark"
    data: dict = {**facts}
    parts: list[str] = []
    folder = Path(os.environ.get("OUT", "build/gpu_check/out"))

    def keep(name: str, rows: list[dict], text: str) -> None:
        """Write after every part: a run that is cut short leaves what it measured."""
        data[name] = rows
        parts.append(text)
        results.write(folder, "gpu", data, "\n".join(parts))

    rows = floors()
    keep("floors", rows, table("Floors", rows))
    for name, cases in (
        ("deform_conv", deform_conv.cases("cuda")),
        ("deformable_attention", deformable_attention_rows.cases("cuda")),
        ("global_attention", attention_cases()),
        ("augmented_conv", augmented_cases()),
        ("window_attention", window_attention.cases("cuda")),
        ("criss_cross", criss_cross.cases("cuda")),
    ):
        rows = []
        for case in cases:
            rows.append(measure(case, "cuda", Settings(rounds=15)))
            print(f"{case.name}: {report.milliseconds(rows[-1]['ours']['median'])} ms", flush=True)
        keep(name, rows, page(name, command, facts, rows))
        torch.backends.cuda.matmul.allow_tf32 = False
        if name == "deform_conv":
            for title, part in (("Block sizes of deform_conv2d", sweep), ("Kernels of deform_conv2d", profile)):
                rows = part()
                keep(part.__name__, rows, table(f"{title}, {PROBLEM[:4]}", rows))
    print("\n" + "\n".join(parts))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("sanitize", "benchmark"))
    part = parser.parse_args(arguments).part
    if not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA device here", file=sys.stderr)
        return 2
    {"sanitize": sanitize, "benchmark": benchmark}[part]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
