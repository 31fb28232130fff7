"""Calls of whole models for :mod:`.host`: timm's ResNet-50 and those with our layers, in bfloat16 autocast.

They are narrow, and their images tiny, so that the host's time is not lost in arithmetic; what a layer calls does not
depend on its width. Calls choose their backends as on a GPU, whose kernels are counted instead of launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from attn_plugins.ops.common import backends, transposition, triton_launch
from attn_plugins.ops.common.operator import OPERATORS
from attn_plugins.ops.deform_conv import cuda as cuda_convolution
from attn_plugins.ops.deform_conv.deform_conv import CONVOLVE

from .host_counts import count

PAGE = Path(__file__).parents[2] / "benchmarks" / "host_time.md"
HEAD = "| model, pass | launches | ATen | Python | C | µs |"
SIZE = 64  # of the images: maps of 8 × 8 to 2 × 2 in the last three stages
CONVOLUTION = 4, 5  # launches of deformable convolution and of its backward, as counted in the emulator
MODELS: dict[str, dict[str, Any]] = {
    "resnet50": {},
    "dcn_resnet50": {},
    "attn0010_dcn_resnet50": {},
    "attn1111_resnet50": {},
    "aa_resnet50": dict(nu=0.5, img_size=SIZE),
}


def passes(name: str) -> dict[str, Callable[[], Any]]:
    """Return a prediction without gradients, and a training step up to the gradients, without an optimiser."""
    import timm

    import attn_plugins.timm  # noqa: F401

    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, channels=(16, 16, 16, 16), **MODELS[name])
    image, grad = torch.rand(2, 3, SIZE, SIZE), torch.ones(2, 10)

    def predict() -> None:
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(image)

    def train() -> None:
        model.train()
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            scores = model(image)
        scores.backward(grad.to(scores.dtype))

    return {"prediction": predict, "training step": train}


@contextmanager
def as_on_cuda() -> Iterator[Callable[[], int]]:
    """Let calls choose as on a GPU, where nothing is launched; give the number of launches of our kernels so far."""
    from .idle_device import idle  # needs Triton

    launches = [0]

    def convolve(input: Tensor, offset: Tensor, weight: Tensor, *_: Any) -> Tensor:
        launches[0] += CONVOLUTION[0]
        return input.new_empty(input.shape[0], weight.shape[0], *offset.shape[2:])

    def differentiate(grad_output: Tensor, input: Tensor, offset: Tensor, weight: Tensor, *_: Any) -> list[Tensor]:
        launches[0] += CONVOLUTION[1]
        return [*map(torch.empty_like, (input, offset, weight)), input.new_empty(0), input.new_empty(0)]

    def transpose(matrices: Tensor, *_: Any) -> Tensor:
        launches[0] += 1
        return matrices.new_empty(matrices.mT.shape)

    with ExitStack() as stack:
        idled = stack.enter_context(idle())
        # Plain calls choose as they do on a GPU, and repeat their plans.
        stack.enter_context(backends.backend(None))  # type: ignore[arg-type]
        stack.enter_context(patch.object(triton_launch, "state", lambda tensor: ("models", tensor.dtype)))
        served = cuda_convolution.BACKEND._replace(cannot=backends.never)
        stack.enter_context(patch.object(CONVOLVE, "table", [served]))
        for operator in OPERATORS.values():  # tensors of the CPU, for which Triton is not the first, nor preferred
            first = [row._replace(prefers_not=None) for row in operator.table if row.name == triton_launch.NAME]
            stack.enter_context(patch.object(operator, "table", [*first, *operator.table]))
        stack.enter_context(patch.object(transposition, "has_kernel", lambda tensor: True))
        stack.enter_context(patch.object(transposition, "transposed", transpose))
        for name, kernel in (("forward", convolve), ("backward", differentiate)):
            stack.enter_context(patch.object(torch.ops.attn_plugins, f"deform_conv2d_{name}_kernel", kernel))
        yield lambda: launches[0] + idled()


def rows(names: Sequence[str], rounds: int) -> Iterator[tuple[str, list[int]]]:
    """Yield a name and launches, ATen operators, functions of Python and of C, and µs of each pass of each model.

    No times are taken for no ``rounds``; which are then 0.
    """
    with as_on_cuda() as launches:
        for name in names:
            for kind, run in passes(name).items():
                counted = count(run, rounds, calls=1)
                before = launches()
                run()
                own = launches() - before
                us = round(counted.us or 0)
                yield f"{name}, {kind}", [own + counted.launches, counted.aten, counted.python, counted.c, us]


def table(names: Sequence[str], rounds: int, write: bool = False, page: Path = PAGE) -> None:
    """Print the counts of models, and write them to the page beside the first ones that it holds."""
    print(f"{HEAD}\n| --- | --- | --- | --- | --- | --- |")
    for name, numbers in rows(names, rounds):
        print("|", " | ".join(map(str, (name, *numbers))), "|", flush=True)
        if write:
            page.write_text("\n".join([beside(line, name, numbers) for line in page.read_text().split("\n")]))


def beside(line: str, name: str, numbers: Sequence[int]) -> str:
    """Return a row of the page with new counts in the place of its second ones and new µs; other lines as they are."""
    first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
    if first != name:
        return line
    *counts, us = numbers
    pairs = [f"{cell.split(' / ')[0]} / {number}" for cell, number in zip(cells, counts)]
    return f"| {' | '.join([name, *pairs, str(us or cells[-1])])} |"
