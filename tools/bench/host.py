"""Count what the host does for one call: ``python -m tools.bench.host``, for operators and for whole models.

Columns: launches of kernels, ATen operators as the profiler sees them, those within others as well, functions of Python
that are entered, and those of C that Python calls. Operators run on CPUs, on tiny tensors. Models, in bfloat16
autocast, choose their backends as on a GPU, whose kernels are counted instead of launched; they are narrow, and their
images tiny, since what a layer calls does not depend on its width.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from attn_plugins.core import backends, transposition, triton_launch
from attn_plugins.core import operator as operator_module
from attn_plugins.ops.deform_conv import cuda as cuda_convolution
from attn_plugins.ops.deform_conv.deform_conv import CONVOLVE

from .cases.calls import OPERATORS

SIZE = 64  # of the images: maps of 8 × 8 to 2 × 2 in the last three stages
CONVOLUTION = 4, 5  # launches of deformable convolution and of its backward, as counted in the emulator
MODELS: dict[str, dict[str, Any]] = {
    "resnet50": {},
    "dcn_resnet50": {},
    "attn0010_dcn_resnet50": {},
    "attn1111_resnet50": {},
    "aa_resnet50": dict(nu=0.5, img_size=SIZE),
}
# ATen operators that launch nothing themselves: views, allocations, and those that only call others. Every other one is
# a kernel on CUDA, whatever it calls.
LAUNCHES_NOTHING = {
    f"aten::{n}"
    for n in """
    _batch_norm_impl_index _conj _local_scalar_dense _reshape_alias _to_copy _unsafe_view adaptive_avg_pool2d
    alias as_strided as_strided_ batch_norm chunk clone contiguous conv1d conv2d conv3d detach detach_ dropout
    einsum embedding empty empty_like empty_strided expand expand_as feature_dropout flatten full full_like
    is_nonzero item lift lift_fresh linear mH mT matmul max_pool2d mean_dim movedim narrow new_empty
    new_empty_strided new_full new_ones new_zeros numpy_T ones ones_like output_nr pad permute real
    requires_grad_ reshape resize_ resolve_conj resolve_neg result_type select select_backward set_ slice
    slice_backward split split_with_sizes squeeze stride sum_to_size swapaxes t to transpose transpose_ type_as
    unbind unflatten unfold unsqueeze unsqueeze_ view view_as zeros zeros_like
    """.split()
}
SEVERAL = {"aten::convolution_backward": 2}  # the gradients of input and weight


class Count(NamedTuple):
    """Of one call; ``launches`` leaves out our own kernels."""

    launches: int
    aten: int
    python: int
    c: int


def count(run: Callable[[], Any]) -> Count:
    """Count what one call of ``run`` does, after three others."""
    for _ in range(3):
        run()
    entered = {"call": 0, "c_call": -1}  # sys.setprofile itself

    def seen(frame: Any, event: str, argument: Any) -> None:
        if event in entered:
            entered[event] += 1

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        run()
    events = [event for event in profile.events() if event.name.startswith("aten::")]
    launches = sum(SEVERAL.get(event.name, 1) for event in events if _launches(event))
    return Count(launches, len(events), entered["call"] - 1, entered["c_call"])


def _launches(event: Any) -> bool:
    return event.name not in LAUNCHES_NOTHING and all(map(_calls_others, _above(event)))


def _calls_others(name: str) -> bool:
    return name in LAUNCHES_NOTHING or not name.startswith("aten::")


def _above(event: Any) -> Iterator[str]:
    while event := event.cpu_parent:
        yield event.name


# --- calls --------------------------------------------------------------------------------------------------------


def passes_of_operator(name: str) -> dict[str, Callable[[], Any]]:
    """Return a forward without gradients, and a forward with the backward of all gradients."""
    shapes, call = OPERATORS[name]
    leaves = [torch.rand(shape).requires_grad_() for shape in shapes]
    tensors = [leaf.detach() for leaf in leaves]
    ones = torch.ones_like(call(*tensors))
    return {
        "forward": lambda: call(*tensors),
        "with backward": lambda: torch.autograd.grad(call(*leaves), leaves, ones),
    }


def passes_of_model(name: str) -> dict[str, Callable[[], Any]]:
    """Return a prediction without gradients, and a training step up to the gradients, without an optimizer."""
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
        # Tensors of the CPU, for which Triton is not the first, nor preferred.
        for operator in operator_module.OPERATORS.values():
            first = [row._replace(prefers_not=None) for row in operator.table if row.name == triton_launch.NAME]
            stack.enter_context(patch.object(operator, "table", [*first, *operator.table]))
        stack.enter_context(patch.object(transposition, "has_kernel", lambda tensor: True))
        stack.enter_context(patch.object(transposition, "transposed", transpose))
        for name, kernel in (("forward", convolve), ("backward", differentiate)):
            stack.enter_context(patch.object(torch.ops.attn_plugins, f"deform_conv2d_{name}_kernel", kernel))
        yield lambda: launches[0] + idled()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tools.bench.host", description=__doc__.split("\n\n")[0])
    known = [*OPERATORS, *MODELS]
    parser.add_argument("names", nargs="*", metavar="CALL", help=f"any of {', '.join(known)} (default: all)")
    names = parser.parse_args(arguments).names
    if unknown := set(names) - {*known}:
        parser.error(f"CALL must be any of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    print("| call, pass | launches | ATen | Python | C |\n| --- | --- | --- | --- | --- |")
    for name in names or known:
        with as_on_cuda() if name in MODELS else nullcontext(lambda: 0) as launches:
            for kind, run in (passes_of_model if name in MODELS else passes_of_operator)(name).items():
                counted = count(run)
                before = launches()
                run()
                counted = counted._replace(launches=counted.launches + launches() - before)
                print("|", " | ".join(map(str, (f"{name}, {kind}", *counted))), "|", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
