"""Count what the host does for one call of an operator on tiny tensors: ``python -m tools.bench.host``.

Columns: launches of kernels; ATen operators, as the profiler sees them, those within others as well; functions of
Python that are entered, and those of C that Python calls; the least of many times of one thread's CPU, in µs.

``--cuda`` counts the way to a GPU without one. The two sampling operators run their CUDA kernels in the emulator of
``tools/emulation``, which is compiled first (half a minute, once); times there mean nothing and are left out. Triton's
operators run on a device that launches nothing, whose times leave out the launches. ATen operators that launch a kernel
on CUDA count as launches.

``--models`` counts a prediction and a training step of whole models on the same device; see :mod:`.host_models`.
``--write`` puts their table into ``benchmarks/host_time.md``, where each cell keeps its first number.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

from attn_plugins.ops import criss_cross_attention
from attn_plugins.ops.common.backends import never
from attn_plugins.ops.deform_conv import cuda as cuda_convolution
from attn_plugins.ops.deform_conv.deform_conv import CONVOLVE
from attn_plugins.ops.deformable_attention import cuda as cuda_attention
from attn_plugins.ops.deformable_attention.deformable_attention import ATTEND

from . import host_models
from .cases.calls import OPERATORS
from .host_counts import count

EMULATED = {
    "deform_conv2d": (CONVOLVE, cuda_convolution.BACKEND),
    "deformable_attention": (ATTEND, cuda_attention.BACKEND),
}
TRITON = "sequence_attention", "global_attention", "criss-cross content"  # whose kernel takes no position logits
HALVES = TRITON[-1]  # whose kernels do not take float32
WORK = OPERATORS | {HALVES: (OPERATORS["criss_cross_attention"][0][:3], criss_cross_attention)}
COMPILED = {  # operators of the binary, and the emulator's
    "deform_conv2d_forward_kernel": "deform_conv2d",
    "deform_conv2d_backward_kernel": "deform_conv2d_backward",
    "deformable_attention_forward_kernel": "deformable_attention",
    "deformable_attention_backward_kernel": "deformable_attention_backward",
}


def passes(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Callable[[], Any]]:
    """Return a forward without gradients, and a forward with the backward of all gradients."""
    shapes, call = WORK[name]
    leaves = [torch.rand(shape).to(dtype).requires_grad_() for shape in shapes]
    tensors = [leaf.detach() for leaf in leaves]
    ones = torch.ones_like(call(*tensors))
    return {
        "forward": lambda: call(*tensors),
        "with backward": lambda: torch.autograd.grad(call(*leaves), leaves, ones),
    }


@cache
def _load_emulator() -> None:
    from ..emulation.build import EMULATION, load

    load(EMULATION / "sampling.cpp")


@contextmanager
def emulated() -> Iterator[Callable[[], int]]:
    """Let the emulator run the CUDA backends of :data:`EMULATED`; give the number of its launches so far."""
    with ExitStack() as stack:
        _load_emulator()
        operators, compiled = torch.ops.attn_plugins_emulated, torch.ops.attn_plugins
        for name, other in COMPILED.items():
            stack.enter_context(patch.object(compiled, name, getattr(operators, other)))
        for operator, backend in EMULATED.values():
            stack.enter_context(patch.object(operator, "table", [backend._replace(cannot=never)]))
        yield operators.launches


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tools.bench.host", description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="OPERATOR", help=f"any of {', '.join(WORK)} (default: all)")
    parser.add_argument("--cuda", action="store_true", help=f"count the way to a GPU ({HALVES}: not in float32)")
    dtypes = ("float32", "bfloat16", "float16", "float64")
    parser.add_argument("--dtype", default="float32", choices=dtypes, help="of the tensors (float32)")
    parser.add_argument("--models", action="store_true", help="count whole models, all or those that are named")
    parser.add_argument("--counts", action="store_true", help="of models, leave out the times")
    parser.add_argument("--write", action="store_true", help="write the models' table to benchmarks/host_time.md")
    options = parser.parse_args(arguments)
    known = host_models.MODELS if options.models or options.write else WORK
    if unknown := set(options.names) - {*known}:
        parser.error(f"OPERATOR must be any of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    if options.models or options.write:
        host_models.table(options.names or [*host_models.MODELS], 0 if options.counts else 20, options.write)
        return 0
    print("| operator, pass | launches | ATen | Python | C | µs |\n| --- | --- | --- | --- | --- | --- |")
    if options.cuda:
        from .idle_device import idle  # needs Triton
    on_cuda = [*EMULATED, *(name for name in TRITON if name != HALVES or options.dtype != "float32")]
    for name in options.names or (on_cuda if options.cuda else OPERATORS):
        way = nullcontext() if not options.cuda else idle() if name in TRITON else emulated()
        with way as launches:
            for kind, run in passes(name, getattr(torch, options.dtype)).items():
                counted, own = count(run, 0 if options.cuda and name in EMULATED else 200), "-"
                if launches:
                    before = launches()
                    run()
                    own = str(launches() - before + counted.launches)
                us = "-" if counted.us is None else f"{counted.us:.0f}"
                row = f"{name}, {kind}", own, counted.aten, counted.python, counted.c, us
                print("|", " | ".join(map(str, row)), "|", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
