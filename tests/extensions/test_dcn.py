"""The extensions of DCNv3 and DCNv4, beside loops over outputs, groups, points and corners."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attn_plugins.extensions import dcnv3, dcnv4, ms_deform_attn
from attn_plugins.extensions.windows import Window

WINDOWS = {
    "same": Window(3, 3, 1, 1, 1, 1, 1, 1, 2, 3, 1.0, 0),
    "scaled": Window(3, 3, 1, 1, 1, 1, 1, 1, 2, 3, 1.5, 0),
    "no center": Window(3, 3, 1, 1, 1, 1, 1, 1, 1, 4, 2.0, 1),
    "strided": Window(3, 3, 2, 2, 1, 1, 1, 1, 2, 2, 1.0, 0),
    "sides differ": Window(3, 2, 2, 1, 0, 2, 1, 3, 2, 1, 0.5, 0),
    "even, no center": Window(2, 4, 1, 2, 1, 0, 2, 1, 1, 2, 1.25, 1),
    "one output": Window(5, 7, 1, 1, 0, 0, 1, 1, 1, 2, 1.0, 0),
}
windows = pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)


def operands(window: Window, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return input, offset and mask; some samples are beyond the map."""
    torch.manual_seed(0)
    B, H, W = 2, 5, 7
    height = (H + 2 * window.pad_h - window.dilation_h * (window.kernel_h - 1) - 1) // window.stride_h + 1
    width = (W + 2 * window.pad_w - window.dilation_w * (window.kernel_w - 1) - 1) // window.stride_w + 1
    points = window.group * (window.kernel_h * window.kernel_w - window.remove_center)
    shapes = (B, H, W, window.group * window.group_channels), (B, height, width, points * 2), (B, height, width, points)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def by_place(tensor: Tensor) -> dict[tuple[int, ...], Tensor]:
    """Return what is at each place of the first four axes, which autograd follows faster than an index."""
    return dict(zip(product(*map(range, tensor.shape[:4])), tensor.flatten(0, 3).unbind()))


def by_loops(w: Window, input: Tensor, offset: Tensor, mask: Tensor) -> Tensor:
    """Compute the output one sample at a time."""
    (B, H, W, _), (_, height, width, _) = input.shape, mask.shape
    groups, outputs = by_place(input.unflatten(3, (w.group, w.group_channels))), []
    offsets, weights = by_place(offset), by_place(mask)
    for b, y, x, g in product(range(B), range(height), range(width), range(w.group)):
        total, point = torch.zeros(w.group_channels, dtype=input.dtype), g * mask.shape[3] // w.group
        for i, j in product(range(w.kernel_w), range(w.kernel_h)):
            if w.remove_center and (i, j) == (w.kernel_w // 2, w.kernel_h // 2):
                continue
            middle_x, middle_y = w.dilation_w * (w.kernel_w - 1) // 2, w.dilation_h * (w.kernel_h - 1) // 2
            dx, dy = offsets[b, y, x, 2 * point], offsets[b, y, x, 2 * point + 1]
            at_x = x * w.stride_w - w.pad_w + middle_x + (i * w.dilation_w - middle_x + dx) * w.offset_scale
            at_y = y * w.stride_h - w.pad_h + middle_y + (j * w.dilation_h - middle_y + dy) * w.offset_scale
            left, top = math.floor(at_x.item()), math.floor(at_y.item())
            for row, column in product((top, top + 1), (left, left + 1)):
                if 0 <= row < H and 0 <= column < W and at_y > -1 and at_x > -1:  # at -1, compiled ones skip the point
                    share_x = at_x - left if column > left else left + 1 - at_x
                    share_y = at_y - top if row > top else top + 1 - at_y
                    total = total + groups[b, row, column, g] * (share_x * share_y * weights[b, y, x, point])
            point += 1
        outputs.append(total)
    return torch.stack(outputs).view(B, height, width, -1)


class DCNv3(torch.autograd.Function):
    """The extension behind autograd, as InternImage puts it."""

    @staticmethod
    def forward(ctx: Any, window: Window, input: Tensor, offset: Tensor, mask: Tensor) -> Tensor:
        ctx.window = window
        ctx.save_for_backward(input, offset, mask)
        return dcnv3.dcnv3_forward(input, offset, mask, *window[:11], 256, window.remove_center)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, *dcnv3.dcnv3_backward(*ctx.saved_tensors, *ctx.window[:11], grad, 256, ctx.window.remove_center)


class DCNv4(torch.autograd.Function):
    """The extension behind autograd, as DCNv4 puts it."""

    @staticmethod
    def forward(ctx: Any, window: Window, softmax: bool, input: Tensor, offset_mask: Tensor) -> Tensor:
        ctx.window, ctx.softmax = window, softmax
        ctx.save_for_backward(input, offset_mask)
        return dcnv4.dcnv4_forward(input, offset_mask, *window[:11], 256, window.remove_center, 8, 64, softmax)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        arguments = *ctx.window[:11], 256, grad, ctx.window.remove_center, 1, 64, ctx.softmax
        return None, None, *dcnv4.dcnv4_backward(*ctx.saved_tensors, *arguments)


def packed(window: Window, offset: Tensor, mask: Tensor) -> Tensor:
    """Return each group's offsets and weights, padded to a multiple of 8 by numbers that must not count."""
    groups = (t.unflatten(3, (window.group, -1)) for t in (offset, mask))
    used = torch.cat(list(groups), 4).flatten(3)
    return torch.cat((used, torch.full((*used.shape[:3], -used.shape[3] % 8), 1e3, dtype=used.dtype)), 3)


def check(output: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    grad = torch.randn_like(output)
    for found, wanted in zip(torch.autograd.grad(output, leaves, grad), torch.autograd.grad(expected, leaves, grad)):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@windows
def test_dcnv3_is_the_loops(window):
    leaves = operands(window)
    check(DCNv3.apply(window, *leaves), by_loops(window, *leaves), leaves)


@pytest.mark.parametrize("softmax", [True, pytest.param(False, marks=pytest.mark.slow)])
@windows
def test_dcnv4_is_the_loops(window, softmax):
    leaves = operands(window)
    input, offset, mask = leaves
    weights = mask.unflatten(3, (window.group, -1)).softmax(4).flatten(3) if softmax else mask
    output = DCNv4.apply(window, softmax, input, packed(window, offset, mask))
    check(output, by_loops(window, input, offset, weights), leaves)


class Layer(torch.nn.Module):
    """InternImage's layer of DCNv3, or DCNv4's, with their parameters and their way to offsets and weights."""

    def __init__(self, window: Window, version: int) -> None:
        super().__init__()
        C, G = window.group * window.group_channels, window.group * (9 - window.remove_center)
        self.window, self.version = window, version
        self.input_proj, self.output_proj = torch.nn.Linear(C, C), torch.nn.Linear(C, C)
        self.dw_conv = torch.nn.Conv2d(C, C, 3, padding=1, groups=C)
        if version == 3:
            self.norm, self.offset, self.mask = torch.nn.LayerNorm(C), torch.nn.Linear(C, 2 * G), torch.nn.Linear(C, G)
        else:
            self.offset_mask = torch.nn.Linear(C, math.ceil(3 * G / 8) * 8)

    def forward(self, input: Tensor, loops: bool = False) -> Tensor:
        """(B, H, W, C) -> (B, H, W, C), by the extension or by the loops."""
        w, x = self.window, self.input_proj(input)
        read = self.dw_conv(input.movedim(3, 1)).movedim(1, 3)
        if self.version == 3:
            read = torch.nn.functional.gelu(self.norm(read))
            mask = self.mask(read).unflatten(3, (w.group, -1)).softmax(4).flatten(3)
            return self.output_proj((by_loops if loops else DCNv3.apply)(w, x, self.offset(read), mask))
        read = self.offset_mask(read)
        if not loops:
            return self.output_proj(DCNv4.apply(w, False, x, read))
        points = 9 - w.remove_center
        groups = read[..., : w.group * points * 3].unflatten(3, (w.group, -1))
        offset, mask = groups.split((2 * points, points), 4)
        return self.output_proj(by_loops(w, x, offset.flatten(3), mask.flatten(3)))


@pytest.mark.parametrize("remove_center", [0, 1])
@pytest.mark.parametrize("version", [3, 4])
def test_the_layers_of_internimage_and_dcnv4(version, remove_center):
    """Output and all gradients equal those of the loops in place of the extension."""
    torch.manual_seed(0)
    layer = Layer(Window(3, 3, 1, 1, 1, 1, 1, 1, 2, 3, 1.5, remove_center), version).double()
    input = torch.randn(1, 4, 5, 6, dtype=torch.float64, requires_grad=True)
    check(layer(input), layer(input, loops=True), [input, *layer.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_offsets_of_zero_have_the_loops_gradients(dtype):
    """All samples are on pixels then, as at initialization: to their left, gradients would be others."""
    window = Window(3, 3, 1, 1, 1, 1, 1, 1, 1, 2, 1.0, 0)
    input, mask = torch.randn(1, 3, 49, 2, dtype=dtype), torch.randn(1, 3, 49, 9, dtype=dtype)
    offset = torch.zeros(1, 3, 49, 18, dtype=dtype, requires_grad=True)
    found, wanted = (
        torch.autograd.grad(output.sum(), offset)[0]
        for output in (DCNv3.apply(window, input, offset, mask), by_loops(window, input, offset, mask))
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    """Locations of a wide map would not be exact otherwise. Autocast changes nothing."""
    window = Window(3, 3, 1, 1, 1, 1, 1, 1, 2, 4, 1.0, 0)
    exact = [torch.randn(1, 3, 90, C).to(dtype).float().requires_grad_() for C in (8, 36, 18)]
    half = [t.detach().to(dtype).requires_grad_() for t in exact]
    expected = DCNv3.apply(window, *exact)
    with torch.autocast("cpu", torch.bfloat16):
        output = DCNv3.apply(window, *half)
    assert output.dtype == dtype
    torch.testing.assert_close(output, expected.to(dtype), rtol=0, atol=0)
    grad = torch.randn_like(output)
    grads = torch.autograd.grad(expected, exact, grad.float())
    for found, wanted in zip(torch.autograd.grad(output, half, grad), grads):
        torch.testing.assert_close(found, wanted.to(dtype))


@windows
def test_no_images(window):
    leaves = [t.detach()[:0].requires_grad_() for t in operands(window)]
    input, offset, mask = leaves
    for output in (DCNv3.apply(window, *leaves), DCNv4.apply(window, True, input, packed(window, offset, mask))):
        assert output.shape == (*offset.shape[:3], input.shape[3])
        assert [grad.shape for grad in torch.autograd.grad(output.sum(), leaves)] == [t.shape for t in leaves]


def test_version_1_has_no_remove_center():
    window = WINDOWS["same"]
    leaves = [t.detach() for t in operands(window)]
    output = DCNv3.apply(window, *leaves)
    torch.testing.assert_close(dcnv3.dcnv3_forward(*leaves, *window[:11], 256), output)
    first, second = (
        dcnv3.dcnv3_backward(*leaves, *window[:11], output, 256, *remove_center) for remove_center in ((), (0,))
    )
    torch.testing.assert_close(first, second)


def test_wrong_shapes():
    window = WINDOWS["same"]
    input, offset, mask = operands(window)
    with pytest.raises(ValueError, match=r"offset must have shape \(2, 5, 7, 36\), got \(2, 5, 7, 18\)"):
        DCNv3.apply(window, input, mask, mask)
    with pytest.raises(ValueError, match="mask must have shape"):
        DCNv3.apply(window, input, offset, offset)
    with pytest.raises(ValueError, match="with 2 groups of 3 channels"):
        DCNv3.apply(window, input[..., 1:], offset, mask)
    with pytest.raises(ValueError, match="window must fit the padded map"):
        DCNv3.apply(window._replace(pad_h=0), input[:, :2], offset, mask)
    with pytest.raises(ValueError, match="offset_mask must have shape"):
        DCNv4.apply(window, False, input, offset)


def test_dcnv4s_attention_is_that_of_its_softmax():
    """Locations come first, of all levels, then the logits."""
    torch.manual_seed(0)
    shapes, B, Q, M, d, K = torch.tensor([[4, 3], [2, 2]]), 2, 5, 3, 4, 8
    value, grad = torch.randn(B, 16, M, d).double().requires_grad_(), torch.randn(B, Q, M * d).double()
    locations = (torch.rand(B, Q, M, 2, K, 2) * 1.4 - 0.2).double().requires_grad_()
    logits = torch.randn(B, Q, M, 2 * K).double().requires_grad_()
    both = torch.cat((locations.flatten(3), logits), 3)
    weights = logits.softmax(3).unflatten(3, (2, K))
    call = (shapes, torch.tensor([0, 12]))
    expected = ms_deform_attn.ms_deform_attn_forward(value, *call, locations, weights, 64)
    torch.testing.assert_close(dcnv4.flash_deform_attn_forward(value, *call, both, 64, K, 8, 64), expected)
    wanted = ms_deform_attn.ms_deform_attn_backward(value, *call, locations, weights, grad, 64)
    (by_logits,) = torch.autograd.grad(weights, logits, wanted[2])
    found = dcnv4.flash_deform_attn_backward(value, *call, both, grad, 64, K, 2, 64)
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[1], torch.cat((wanted[1].flatten(3), by_logits), 3))
    half = [t.detach().to(torch.bfloat16) for t in (value, both, grad)]
    wide = [t.float() for t in half]
    for call_of, extra in ((dcnv4.flash_deform_attn_forward, 0), (dcnv4.flash_deform_attn_backward, 1)):
        rest = [(t[2:][:extra], 64, K, 8, 64) for t in (half, wide)]
        found, exact = (call_of(t[0], *call, t[1], *grad, *ints) for t, (grad, *ints) in zip((half, wide), rest))
        torch.testing.assert_close(found, [t.bfloat16() for t in exact] if extra else exact.bfloat16(), rtol=0, atol=0)


@pytest.mark.slow
def test_internimage_reads_the_version(python):
    """Its layer imports the extension, then asks pkg_resources for the distribution."""
    pytest.importorskip("pkg_resources", reason="setuptools has no pkg_resources from version 82 on")
    read = "print(pkg_resources.get_distribution('DCNv3').version)"
    for first, second in (("DCNv3", "pkg_resources"), ("pkg_resources", "DCNv3")):
        assert python(f"import torch\nimport {first}, {second}\n{read}").stdout.split() == ["1.1"]


class Model(torch.nn.Module):
    """DCNv3 within a model."""

    def forward(self, input: Tensor, offset: Tensor, mask: Tensor) -> Tensor:
        return DCNv3.apply(WINDOWS["same"], input, offset, mask)


class FlashDeformAttn(torch.autograd.Function):
    """The extension behind autograd, as DCNv4 puts its deformable attention."""

    @staticmethod
    def forward(ctx: Any, shapes: list[list[int]], value: Tensor, both: Tensor) -> Tensor:
        ctx.shapes = shapes
        ctx.save_for_backward(value, both)
        return dcnv4.flash_deform_attn_forward(value, shapes, None, both, 64, 8, 8, 64)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        value, both = ctx.saved_tensors
        return None, *dcnv4.flash_deform_attn_backward(value, ctx.shapes, None, both, grad, 64, 8, 8, 64)


def behind_autograd(name: str, dtype: torch.dtype) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Return a function of an extension behind autograd, and its operands."""
    window, leaves = WINDOWS["same"], operands(WINDOWS["same"], dtype)
    if name == "dcnv3":
        return lambda *given: DCNv3.apply(window, *given), leaves
    if name == "dcnv4":
        offset_mask = packed(window, *leaves[1:]).detach().requires_grad_()
        return lambda *given: DCNv4.apply(window, True, *given), [leaves[0], offset_mask]
    given = [torch.rand(shape, dtype=dtype).requires_grad_() for shape in ((2, 16, 3, 4), (2, 5, 3, 48))]
    return lambda *given: FlashDeformAttn.apply([[4, 3], [2, 2]], *given), given


@pytest.mark.parametrize("name", ["dcnv3", "dcnv4", "flash"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_compiled_gradients(name, dtype):
    """torch.compile traces a function of autograd, and gives no gradient to an output that is a tensor twice."""
    torch._dynamo.reset()
    call, leaves = behind_autograd(name, dtype)
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    wanted, found = (torch.autograd.grad(of(*leaves).square().sum(), leaves) for of in (call, compiled))
    torch.testing.assert_close(found, wanted)
    assert all(grad.any() for grad in found)


@pytest.mark.slow
def test_onnx_runtime_computes_dcnv3(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install '.[onnx]'")
    given = [t.detach() for t in operands(WINDOWS["same"], torch.float32)]
    torch.onnx.export(Model(), tuple(given), tmp_path / "m.onnx", dynamo=True, input_names=["i", "o", "m"])
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    (found,) = session.run(None, dict(zip("iom", (t.numpy() for t in given))))
    torch.testing.assert_close(torch.from_numpy(found), Model()(*given), rtol=1e-4, atol=1e-5)
