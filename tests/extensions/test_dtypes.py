"""Extensions in half precision and with the mixes of dtypes that public layers pass, on CPUs.

What an extension computes from rounded operands equals what it computes from the same numbers in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_plugins.extensions import adet, dcnv2, dcnv3, dcnv4, deform_conv, detrex, ms_deform_attn, psroi_pooling
from attn_plugins.extensions import detectron2 as detectron2_C
from attn_plugins.extensions import maskrcnn_benchmark as maskrcnn_C

HALVES = [torch.float16, torch.bfloat16]
Call = Callable[..., list[Tensor]]


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64)


def attention(module: Any) -> tuple[Call, list[Tensor]]:
    """Return a call of forward and backward that maps operands to results, with its operands."""
    call = torch.tensor([[4, 3], [2, 2]]), torch.tensor([0, 12])

    def run(value: Tensor, locations: Tensor, weights: Tensor, grad: Tensor) -> list[Tensor]:
        output = module.ms_deform_attn_forward(value, *call, locations, weights, 64)
        return [output, *module.ms_deform_attn_backward(value, *call, locations, weights, grad.to(output), 64)]

    return run, [rand(2, 16, 3, 4), rand(2, 5, 3, 2, 4, 2) * 1.2 - 0.1, rand(2, 5, 3, 2, 4), rand(2, 5, 12)]


def flash() -> tuple[Call, list[Tensor]]:
    call, ints = ([[4, 3], [2, 2]], None), (64, 8, 8, 64)

    def run(value: Tensor, both: Tensor, grad: Tensor) -> list[Tensor]:
        output = dcnv4.flash_deform_attn_forward(value, *call, both, *ints)
        return [output, *dcnv4.flash_deform_attn_backward(value, *call, both, grad.to(output), *ints)]

    return run, [rand(2, 16, 3, 4), rand(2, 5, 3, 48), rand(2, 5, 12)]


WINDOW = 3, 3, 1, 1, 1, 1, 1, 1, 2, 3, 1.0


def dcn3(module: Any) -> tuple[Call, list[Tensor]]:
    def run(input: Tensor, offset: Tensor, mask: Tensor, grad: Tensor) -> list[Tensor]:
        output = module.dcnv3_forward(input, offset, mask, *WINDOW, 256)
        return [output, *module.dcnv3_backward(input, offset, mask, *WINDOW, grad.to(output), 256)]

    return run, [rand(2, 5, 7, 6), rand(2, 5, 7, 36), rand(2, 5, 7, 18), rand(2, 5, 7, 6)]


def dcn4() -> tuple[Call, list[Tensor]]:
    def run(input: Tensor, both: Tensor, grad: Tensor) -> list[Tensor]:
        output = dcnv4.dcnv4_forward(input, both, *WINDOW, 256, 0, 8, 64, True)
        return [output, *dcnv4.dcnv4_backward(input, both, *WINDOW, 256, grad.to(output), 0, 1, 64, True)]

    return run, [rand(2, 5, 7, 6), rand(2, 5, 7, 56), rand(2, 5, 7, 6)]


def convolution(module: Any, suffix: str = "", of_weight: str = "parameters") -> tuple[Call, list[Tensor]]:
    numbers = 3, 3, 2, 2, 1, 1, 1, 1, 2, 2  # columns before rows; groups, deformable groups
    backward = f"deform_conv_backward_{of_weight}{suffix}"

    def run(input: Tensor, offset: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
        output, grads = input.new_empty(2, 4, 3, 4), [torch.zeros_like(t) for t in (input, offset, weight)]
        none = input.new_empty(0)
        getattr(module, f"deform_conv_forward{suffix}")(input, weight, offset, output, none, none, *numbers, 2)
        operands = input, offset, grad.to(output)
        getattr(module, f"deform_conv_backward_input{suffix}")(*operands, *grads[:2], weight, none, *numbers, 2)
        getattr(module, backward)(*operands, grads[2], none, none, *numbers, 1.0, 2)
        return [output, *grads]

    return run, [rand(2, 4, 5, 7), rand(2, 36, 3, 4), rand(4, 2, 3, 3), rand(2, 4, 3, 4)]


def modulated(module: Any, infix: str = "") -> tuple[Call, list[Tensor]]:
    numbers = 3, 3, 2, 2, 1, 1, 1, 1, 2, 2, True

    def run(input: Tensor, offset: Tensor, mask: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> list[Tensor]:
        output, none = input.new_empty(2, 4, 3, 4), input.new_empty(0)
        grads = [torch.zeros_like(t) for t in (input, weight, bias, offset, mask)]
        forward, backward = (getattr(module, f"modulated_deform_conv{infix}_{way}") for way in ("forward", "backward"))
        forward(input, weight, bias, none, offset, mask, output, none, *numbers)
        backward(input, weight, bias, none, offset, mask, none, *grads, grad.to(output), *numbers)
        return [output, *(grads[n] for n in (0, 3, 4, 1, 2))]

    shapes = (2, 4, 5, 7), (2, 36, 3, 4), (2, 18, 3, 4), (4, 2, 3, 3), (4,), (2, 4, 3, 4)
    return run, [rand(*shape) for shape in shapes]


def dcn2() -> tuple[Call, list[Tensor]]:
    numbers = 3, 3, 2, 2, 1, 1, 1, 1, 2

    def run(input: Tensor, offset: Tensor, mask: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> list[Tensor]:
        operands = input, weight, bias, offset, mask
        output = dcnv2.dcn_v2_forward(*operands, *numbers)
        return [output, *dcnv2.dcn_v2_backward(*operands, grad.to(output), *numbers)]

    shapes = (2, 4, 5, 7), (2, 36, 3, 4), (2, 18, 3, 4), (4, 4, 3, 3), (4,), (2, 4, 3, 4)
    return run, [rand(*shape) for shape in shapes]


ROIS = torch.tensor([[0.0, 1, 0, 5, 4], [1, 0, 1, 3, 3], [1, 2, 2, 6, 4]]).double()


def pooling(module: Any, infix: str = "") -> tuple[Call, list[Tensor]]:
    numbers = False, 1.0, 4, 1, 2, 2, 2, 0.25

    def run(input: Tensor, offset: Tensor, grad: Tensor) -> list[Tensor]:
        rois = ROIS.to(input.dtype)
        output, count = input.new_empty(2, 3, 4, 2, 2)
        grads = torch.zeros_like(input), torch.zeros_like(offset)
        forward, backward = (getattr(module, f"deform_psroi_pooling{infix}_{way}") for way in ("forward", "backward"))
        forward(input, rois, offset, output, count, *numbers)
        backward(grad.to(output), input, rois, offset, count, *grads, *numbers)
        return [output, *grads]

    return run, [rand(2, 4, 5, 7), rand(3, 2, 2, 2), rand(3, 4, 2, 2)]


def dcn2_pooling() -> tuple[Call, list[Tensor]]:
    numbers = 0, 1.0, 4, 1, 2, 2, 2, 0.25

    def run(input: Tensor, offset: Tensor, grad: Tensor) -> list[Tensor]:
        operands = input, ROIS.to(input.dtype), offset
        output, count = dcnv2.dcn_v2_psroi_pooling_forward(*operands, *numbers)
        return [output, *dcnv2.dcn_v2_psroi_pooling_backward(grad.to(output), *operands, count, *numbers)]

    return run, [rand(2, 4, 5, 7), rand(3, 2, 2, 2), rand(3, 4, 2, 2)]


def roi_align() -> tuple[Call, list[Tensor]]:
    def run(input: Tensor, rois: Tensor, grad: Tensor) -> list[Tensor]:
        output = maskrcnn_C.roi_align_forward(input, rois, 0.5, 2, 3, 2)
        return [output, maskrcnn_C.roi_align_backward(grad.to(output), rois, 0.5, 2, 3, 2, 4, 5, 7, 2)]

    return run, [rand(2, 4, 5, 7), ROIS, rand(3, 4, 2, 3)]


def roi_pool() -> tuple[Call, list[Tensor]]:
    def run(input: Tensor, rois: Tensor, grad: Tensor) -> list[Tensor]:
        output, places = maskrcnn_C.roi_pool_forward(input, rois, 0.5, 2, 3)
        back = maskrcnn_C.roi_pool_backward(grad.to(output), input, rois, places, 0.5, 2, 3, 2, 4, 5, 7)
        return [output, back]

    return run, [rand(2, 4, 5, 7), ROIS, rand(3, 4, 2, 3)]


def focal() -> tuple[Call, list[Tensor]]:
    targets = torch.tensor([0, 3, -1, 1])

    def run(logits: Tensor, grad: Tensor) -> list[Tensor]:
        losses = maskrcnn_C.sigmoid_focalloss_forward(logits, targets, 3, 2.0, 0.25)
        return [losses, maskrcnn_C.sigmoid_focalloss_backward(logits, targets, grad.to(losses), 3, 2.0, 0.25)]

    return run, [rand(4, 3), rand(4, 3)]


CASES: dict[str, Callable[[], tuple[Call, list[Tensor]]]] = {
    "MultiScaleDeformableAttention": lambda: attention(ms_deform_attn),
    "detrex": lambda: attention(detrex),
    "adet": lambda: attention(adet),
    "DCNv4 attention": flash,
    "DCNv3": lambda: dcn3(dcnv3),
    "detrex DCNv3": lambda: dcn3(detrex),
    "DCNv4": dcn4,
    "DCNv2": dcn2,
    "DCNv2 pooling": dcn2_pooling,
    "deform_conv_ext": lambda: convolution(deform_conv),
    "deform_conv_ext modulated": lambda: modulated(deform_conv),
    "deform_conv_cuda": lambda: convolution(deform_conv, "_cuda"),
    "deform_conv_cuda modulated": lambda: modulated(deform_conv, "_cuda"),
    "deform_pool_cuda": lambda: pooling(psroi_pooling, "_cuda"),
    "detectron2": lambda: convolution(detectron2_C, of_weight="filter"),
    "detectron2 modulated": lambda: modulated(detectron2_C),
    "maskrcnn": lambda: convolution(maskrcnn_C),
    "maskrcnn modulated": lambda: modulated(maskrcnn_C),
    "maskrcnn pooling": lambda: pooling(maskrcnn_C),
    "maskrcnn roi_align": roi_align,
    "maskrcnn roi_pool": roi_pool,
    "maskrcnn focal": focal,
}


def check(run: Call, given: list[Tensor]) -> None:
    """Compare with float64, in the precision of the narrowest operand; a result has its operand's dtype."""
    with torch.autocast("cpu", torch.bfloat16):  # which a compiled function does not know
        found = run(*given)
    wanted = run(*(tensor.double() for tensor in given))
    narrowest = max((tensor.dtype for tensor in given[:-1]), key=lambda dtype: torch.finfo(dtype).eps)
    eps = max(torch.finfo(narrowest).eps, 1e-6)
    for result, exact, like in zip(found, wanted, [given[0], *given]):
        assert result.dtype == like.dtype
        assert exact.any()
        torch.testing.assert_close(result.double(), exact, rtol=4 * eps, atol=4 * eps * exact.abs().max().item())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CASES)
def test_half_precision(name, dtype):
    torch.manual_seed(0)
    run, operands = CASES[name]()
    check(run, [tensor.to(dtype) for tensor in operands])


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", CASES)
def test_mixed_dtypes(name, half):
    """Half of float16 and bfloat16 in turn; float32 parameters beside half activations are one of the mixes."""
    torch.manual_seed(0)
    run, operands = CASES[name]()
    *operands, grad = operands
    for dtypes in product((half, torch.float32), repeat=len(operands)):
        check(run, [*(tensor.to(dtype) for tensor, dtype in zip(operands, dtypes)), grad])


@pytest.mark.parametrize("dtypes", product([*HALVES, torch.float32, torch.float64], repeat=3))
def test_any_dtypes_of_attention(dtypes):
    torch.manual_seed(0)
    run, (*operands, grad) = attention(ms_deform_attn)
    check(run, [*(tensor.to(dtype) for tensor, dtype in zip(operands, dtypes)), grad])


class Attend(torch.autograd.Function):
    """The extension behind autograd, as DINO puts it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, shapes: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(value, shapes, locations, weights)
        return ms_deform_attn.ms_deform_attn_forward(value, shapes, shapes[:, 0], locations, weights, 64)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        value, shapes, locations, weights = ctx.saved_tensors
        found = ms_deform_attn.ms_deform_attn_backward(value, shapes, shapes[:, 0], locations, weights, grad, 64)
        return found[0], None, *found[1:]


def test_dino_in_half_precision():
    """Its layer converts values and locations in float16 to float32, but not the weights, and converts the output."""
    torch.manual_seed(0)
    shapes, run = torch.tensor([[4, 3], [2, 2]]), attention(ms_deform_attn)
    value, locations, weights, grad = (t.half().requires_grad_() for t in run[1])
    output = Attend.apply(value.float(), shapes, locations.float(), weights).half()
    output.backward(grad)
    assert output.dtype == value.grad.dtype == locations.grad.dtype == weights.grad.dtype == torch.float16
    wanted = run[0](*(t.detach().double() for t in (value, locations, weights, grad)))
    for found, exact in zip((output, value.grad, locations.grad, weights.grad), wanted):
        torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=2e-3)
