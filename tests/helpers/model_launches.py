"""Launches and calls of whole models as on a GPU, without one: ``python -m tests.helpers.model_launches``.

Models, in bfloat16 autocast, choose their backends as on a GPU, whose kernels are counted instead of launched. They are
narrow, and their images tiny, since what a layer calls does not depend on its width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from attn_plugins.core import backends, transposition, triton_launch
from attn_plugins.core import operator as operator_module
from attn_plugins.ops.deform_conv import cuda as cuda_convolution
from attn_plugins.ops.deform_conv.deform_conv import CONVOLVE
from tests.helpers.idle_device import idle
from tools.bench.host import count

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


def launches(run: Callable[[], Any]) -> int:
    """Return the kernels that ATen launches in ``run``; those of ours are left out."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        run()
    events = [event for event in profile.events() if event.name.startswith("aten::")]
    return sum(SEVERAL.get(event.name, 1) for event in events if _launches(event))


def _launches(event: Any) -> bool:
    return event.name not in LAUNCHES_NOTHING and all(map(_calls_others, _above(event)))


def _calls_others(name: str) -> bool:
    return name in LAUNCHES_NOTHING or not name.startswith("aten::")


def _above(event: Any) -> Iterator[str]:
    while event := event.cpu_parent:
        yield event.name


def passes_of_model(name: str) -> tuple[Callable[[], None], Callable[[], None]]:
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

    return predict, train


@contextmanager
def as_on_cuda() -> Iterator[Callable[[], int]]:
    """Let calls choose as on a GPU, where nothing is launched; give the number of launches of our kernels so far."""
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


def main() -> None:
    """Print launches, ATen operators and functions of Python of a prediction and a training step of models."""
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        with as_on_cuda() as ours:
            for run in passes_of_model(name):
                counted, before = count(run), ours()
                print(launches(run) + ours() - before, counted.aten, counted.python)


if __name__ == "__main__":
    main()
