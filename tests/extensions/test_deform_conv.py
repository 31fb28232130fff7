"""Extensions of deformable convolution behind functions of autograd, as public layers put them, beside torchvision."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor
from torch.autograd.function import once_differentiable

from attn_plugins.extensions import dcnv2, deform_conv, detectron2, maskrcnn_benchmark

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
Pair = tuple[int, int]


class DCNv2(torch.autograd.Function):
    """``_ext`` as ``dcn_v2.py`` calls it."""

    @staticmethod
    def forward(ctx: Any, geometry: tuple[int, ...], *operands: Tensor) -> Tensor:
        input, offset, mask, weight, bias = operands
        ctx.numbers = *weight.shape[2:], *geometry
        ctx.save_for_backward(*operands)
        return dcnv2.dcn_v2_forward(input, weight, bias, offset, mask, *ctx.numbers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        input, offset, mask, weight, bias = ctx.saved_tensors
        return None, *dcnv2.dcn_v2_backward(input, weight, bias, offset, mask, grad_output, *ctx.numbers)


class V1(torch.autograd.Function):
    """The layer without masks of mmdetection, BasicSR, detectron2 and maskrcnn-benchmark: columns before rows."""

    @staticmethod
    def forward(ctx: Any, names: tuple, pairs: tuple[Pair, ...], groups: Pair, *operands: Tensor) -> Tensor:
        input, offset, weight = operands
        ctx.names, ctx.buffers = names, [input.new_empty(0), input.new_empty(0)]
        ctx.numbers = *(n for pair in (weight.shape[2:], *pairs) for n in pair[::-1]), *groups
        ctx.save_for_backward(*operands)
        output = input.new_empty(len(input), len(weight), *offset.shape[2:])
        names[0](input, weight, offset, output, *ctx.buffers, *ctx.numbers, len(input))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        input, offset, weight = ctx.saved_tensors
        (columns, ones), step = ctx.buffers, len(input)
        grads = [torch.zeros_like(tensor) for tensor in ctx.saved_tensors]
        ctx.names[1](input, offset, grad_output, *grads[:2], weight, columns, *ctx.numbers, step)
        ctx.names[2](input, offset, grad_output, grads[2], columns, ones, *ctx.numbers, 1, step)
        return None, None, None, *grads


class Modulated(torch.autograd.Function):
    """Their layer with masks: rows before columns, which are the same number, and a flag for the bias."""

    @staticmethod
    def forward(ctx: Any, names: tuple, numbers: tuple, *operands: Tensor | None) -> Tensor:
        input, offset, mask, weight, bias = operands
        ctx.names, ctx.with_bias = names, bias is not None
        bias = input.new_empty(1) if bias is None else bias
        ctx.buffers = [input.new_empty(0), input.new_empty(0)]
        ctx.numbers = *weight.shape[2:], *(n for number in numbers[:3] for n in (number, number)), *numbers[3:]
        ctx.save_for_backward(input, weight, bias, offset, mask)
        output = input.new_empty(len(input), len(weight), *offset.shape[2:])
        ones, columns = ctx.buffers
        names[0](input, weight, bias, ones, offset, mask, output, columns, *ctx.numbers, ctx.with_bias)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        input, weight, bias, offset, mask = ctx.saved_tensors
        grads = [torch.zeros_like(tensor) for tensor in ctx.saved_tensors]
        (ones, columns), end = ctx.buffers, (grad_output, *ctx.numbers, ctx.with_bias)
        ctx.names[1](input, weight, bias, ones, offset, mask, columns, *grads, *end)
        of_input, of_weight, of_bias, of_offset, of_mask = grads
        return None, None, of_input, of_offset, of_mask, of_weight, of_bias if ctx.with_bias else None


def names(module: ModuleType, cuda: str = "", parameters: str = "parameters") -> tuple:
    wanted = "forward", "backward_input", f"backward_{parameters}"
    return tuple(getattr(module, f"deform_conv_{name}{cuda}") for name in wanted)


def modulated_names(module: ModuleType, cuda: str = "") -> tuple:
    return tuple(getattr(module, f"modulated_deform_conv{cuda}_{way}") for way in ("forward", "backward"))


V1_NAMES = {
    "deform_conv_ext": names(deform_conv),
    "deform_conv_cuda": names(deform_conv, "_cuda"),
    "detectron2": names(detectron2, parameters="filter"),
    "maskrcnn_benchmark": names(maskrcnn_benchmark),
}
V2_NAMES = {
    "deform_conv_ext": modulated_names(deform_conv),
    "deform_conv_cuda": modulated_names(deform_conv, "_cuda"),
    "detectron2": modulated_names(detectron2),
    "maskrcnn_benchmark": modulated_names(maskrcnn_benchmark),
}


def operands(dtype: torch.dtype, size: Pair, kernel: Pair = (3, 2), groups: int = 2) -> list[Tensor]:
    """Return input, offsets of 2 groups, masks, weight and bias; some samples are beyond the map."""
    torch.manual_seed(0)
    taps = 2 * kernel[0] * kernel[1]
    shapes = (2, 4, 7, 5), (2, 2 * taps, *size), (2, taps, *size), (6, 4 // groups, *kernel), (6,)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def check(output: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    tolerance = 1e-4 if output.dtype == torch.float32 else 1e-10
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    grad = torch.randn_like(output)
    for found, wanted in zip(torch.autograd.grad(output, leaves, grad), torch.autograd.grad(expected, leaves, grad)):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@dtypes
def test_dcnv2_equals_torchvision(dtype):
    """Rows and columns differ in all numbers: size, kernel, stride, padding, dilation."""
    leaves = operands(dtype, (4, 5), groups=1)
    input, offset, mask, weight, bias = leaves
    expected = torchvision.ops.deform_conv2d(input, offset, weight, bias, (2, 1), (1, 1), (1, 2), mask)
    check(DCNv2.apply((2, 1, 1, 1, 1, 2, 2), *leaves), expected, leaves)


@dtypes
@pytest.mark.parametrize("name", V1_NAMES)
def test_without_masks(name, dtype):
    input, offset, _, weight, _ = operands(dtype, (4, 5))
    leaves = [input, offset, weight]
    expected = torchvision.ops.deform_conv2d(input, offset, weight, None, (2, 1), (1, 1), (1, 2))
    check(V1.apply(V1_NAMES[name], ((2, 1), (1, 1), (1, 2)), (2, 2), *leaves), expected, leaves)


@dtypes
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("name", V2_NAMES)
def test_with_masks(name, with_bias, dtype):
    leaves = operands(dtype, (4, 3))[: 5 if with_bias else 4]
    input, offset, mask, weight, *bias = leaves
    expected = torchvision.ops.deform_conv2d(input, offset, weight, *(bias or [None]), 2, 1, 1, mask)
    found = Modulated.apply(V2_NAMES[name], (2, 1, 1, 2, 2), *leaves, *([] if bias else [None]))
    check(found, expected, leaves)


def test_gradients_are_added_and_scaled():
    """As compiled, they go on top of what the caller's tensors hold; the weight's is multiplied by ``scale``."""
    input, offset, _, weight, _ = (t.detach() for t in operands(torch.float64, (4, 3)))
    grad, none = torch.randn(2, 6, 4, 3).double(), input.new_empty(0)
    numbers = 2, 3, 2, 2, 1, 1, 1, 1, 2, 2
    results = []
    for scale, start in ((1.0, 0.0), (0.5, 3.0)):
        total = torch.full_like(weight, start)
        deform_conv.deform_conv_backward_parameters(input, offset, grad, total, none, none, *numbers, scale, 2)
        results.append(total)
    torch.testing.assert_close(results[1], 3 + results[0] / 2)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["DCNv2", "without masks", "with masks"])
def test_compiled_gradients(name, dtype):
    """torch.compile traces a function of autograd, and gives no gradient to an output that is a tensor twice."""
    torch._dynamo.reset()
    groups = 1 if name == "DCNv2" else 2
    input, offset, mask, weight, bias = leaves = operands(dtype, (4, 3), groups=groups)
    if name == "DCNv2":
        call = lambda *given: DCNv2.apply((2, 2, 1, 1, 1, 1, 2), *given)  # noqa: E731
    elif name == "without masks":
        leaves = [input, offset, weight]
        call = lambda *given: V1.apply(V1_NAMES["detectron2"], ((2, 2), (1, 1), (1, 1)), (2, 2), *given)  # noqa: E731
    else:
        call = lambda *given: Modulated.apply(V2_NAMES["detectron2"], (2, 1, 1, 2, 2), *given)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    wanted, found = (torch.autograd.grad(of(*leaves).square().sum(), leaves) for of in (call, compiled))
    torch.testing.assert_close(found, wanted)
    assert all(grad.any() for grad in found)


def test_offsets_of_zero_have_the_compiled_gradients():
    """At row or column -1, in the padding, compiled functions have none; torchvision has that of the inner side."""
    input, offset, mask, weight, bias = operands(torch.float64, (7, 5), (3, 3), groups=1)
    offset = torch.zeros(2, 36, 7, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.randn(2, 18, 7, 5, dtype=torch.float64)
    outputs = (
        DCNv2.apply((1, 1, 1, 1, 1, 1, 2), input, offset, mask, weight, bias),
        torchvision.ops.deform_conv2d(input, offset, weight, bias, 1, 1, 1, mask),
    )
    found, wanted = (torch.autograd.grad(output.sum(), offset)[0].view(2, 2, 3, 3, 2, 7, 5) for output in outputs)
    inner = torch.zeros(3, 3, 2, 7, 5, dtype=torch.bool)
    for axis, (taps, places) in enumerate(((0, -2), (1, -1))):  # the first taps at the first places are at -1
        part = inner.select(2, axis)
        part.fill_(True)
        part.narrow(taps, 0, 1).narrow(places, 0, 1).fill_(False)
    assert wanted[:, :, ~inner].any()
    torch.testing.assert_close(found, wanted * inner)


def test_wrong_arguments():
    input, offset, mask, weight, bias = (t.detach() for t in operands(torch.float32, (4, 3), groups=1))
    with pytest.raises(TypeError, match=r"geometry must be 9 numbers, kernel_h, kernel_w, stride_h, .*, got"):
        dcnv2.dcn_v2_forward(input, weight, bias, offset, mask, 3, 2, 2, 2, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="offset must have 12 channels for deformable_group 1, got 24"):
        dcnv2.dcn_v2_forward(input, weight, bias, offset, mask, 3, 2, 2, 2, 1, 1, 1, 1, 1)
    with pytest.raises(TypeError, match=r"deform_conv_forward must have 17 arguments, input, weight, offset.*got 16"):
        deform_conv.deform_conv_forward_cuda(input, weight, offset, *[input] * 3, *range(10))
