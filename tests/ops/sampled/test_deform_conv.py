"""deform_conv2d and deform_conv1d against plain loops, torchvision and finite differences."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attn_plugins.ops import backend, deform_conv1d, deform_conv2d, library
from tests.helpers.operator_checks import relative_error
from tests.ops.sampled.deform_conv_operands import GEOMETRIES, make, through_reference

try:
    import torchvision
except ImportError:  # another version of torch may have no matching torchvision
    torchvision = None
needs_torchvision = pytest.mark.skipif(torchvision is None, reason="torchvision is not installed")


def loops(input, offset, weight, bias, stride, padding, dilation, mask) -> Tensor:
    """Compute the definition, one multiplication at a time."""
    B, C, H, W = input.shape
    C_out, group_channels, Kh, Kw = weight.shape
    D = offset.shape[1] // (2 * Kh * Kw)
    output = torch.zeros(B, C_out, *offset.shape[2:], dtype=input.dtype)
    for b, o, oy, ox in itertools.product(*map(range, output.shape)):
        group = o // (C_out // (C // group_channels))
        total = float(bias[o]) if bias is not None else 0.0
        for i, ky, kx in itertools.product(range(group_channels), range(Kh), range(Kw)):
            c = group * group_channels + i
            tap = ((c // (C // D)) * Kh + ky) * Kw + kx
            y = oy * stride[0] - padding[0] + ky * dilation[0] + float(offset[b, 2 * tap, oy, ox])
            x = ox * stride[1] - padding[1] + kx * dilation[1] + float(offset[b, 2 * tap + 1, oy, ox])
            sample = 0.0
            for py in (math.floor(y), math.floor(y) + 1):
                for px in (math.floor(x), math.floor(x) + 1):
                    if 0 <= py < H and 0 <= px < W:
                        sample += (1 - abs(y - py)) * (1 - abs(x - px)) * float(input[b, c, py, px])
            total += float(weight[o, i, ky, kx]) * sample * (float(mask[b, tap, oy, ox]) if mask is not None else 1)
        output[b, o, oy, ox] = total
    return output


def gradients(function, operands: dict, grad_seed: int = 1) -> list[Tensor]:
    names = [n for n in ("input", "offset", "weight", "bias", "mask") if operands[n] is not None]
    leaves = {n: operands[n].detach().clone(memory_format=torch.preserve_format).requires_grad_() for n in names}
    output = function(**{**operands, **leaves})
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(grad_seed), dtype=torch.float64)
    return [output, *torch.autograd.grad(output, list(leaves.values()), grad.to(output.dtype))]


def test_the_binary_is_there() -> None:
    """Without the binary, everything below would only test the reference."""
    assert library.has_kernel("cpu"), library.failures()["cpu"]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("name", [n for n in GEOMETRIES if n != "many pixels"])
def test_equals_plain_loops(name: str, masked: bool) -> None:
    operands = make(GEOMETRIES[name], masked=masked)
    expected = loops(**operands)
    assert relative_error(deform_conv2d(**operands), expected) < 1e-12
    assert relative_error(through_reference(**operands), expected) < 1e-12


@pytest.mark.sampled(16)
@needs_torchvision
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_equals_torchvision(name: str, masked: bool, dtype: torch.dtype) -> None:
    operands = make(GEOMETRIES[name], dtype=dtype, masked=masked)
    ours = gradients(deform_conv2d, operands)
    theirs = gradients(torchvision.ops.deform_conv2d, operands)
    for a, b in zip(ours, theirs):
        assert relative_error(a, b) < (1e-12 if dtype == torch.float64 else 2e-6)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_reference_has_the_same_gradients(name: str) -> None:
    operands = make(GEOMETRIES[name])
    for a, b in zip(gradients(deform_conv2d, operands), gradients(through_reference, operands)):
        assert relative_error(a, b) < 1e-12


@pytest.mark.parametrize("dtype,tolerance", [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    operands = make(GEOMETRIES["wide"], dtype=dtype)
    exact = {k: v.double() if isinstance(v, Tensor) else v for k, v in operands.items()}
    for a, b in zip(gradients(deform_conv2d, operands), gradients(through_reference, exact)):
        assert a.dtype == dtype
        assert relative_error(a, b) < tolerance


@needs_torchvision
def test_derivative_at_a_pixel_is_the_one_to_its_right() -> None:
    operands = make(GEOMETRIES["wide"])
    operands["offset"].round_()
    ours = gradients(deform_conv2d, operands)
    for other in (torchvision.ops.deform_conv2d, through_reference):
        for a, b in zip(ours, gradients(other, operands)):
            assert relative_error(a, b) < 1e-12


@pytest.mark.parametrize("kind", ["cpu", "torch"])
@pytest.mark.parametrize("layout", ["channels_last", "sliced", "transposed", "expanded"])
def test_strided_inputs(layout: str, kind: str) -> None:
    operands = make(GEOMETRIES["wide"])
    strided = dict(operands)
    for name in ("input", "offset", "mask", "weight"):
        t = operands[name]
        if layout == "channels_last":
            strided[name] = t.contiguous(memory_format=torch.channels_last)
        elif layout == "sliced":
            strided[name] = torch.stack((t, -t), -1).flatten(-2)[..., ::2]
        elif layout == "transposed":
            strided[name] = t.transpose(2, 3).contiguous().transpose(2, 3)
        else:
            strided[name] = t[:1].expand_as(t)
            operands[name] = strided[name].contiguous()
    with backend(kind):
        results = gradients(deform_conv2d, strided)
        for a, b in zip(results, gradients(deform_conv2d, operands)):
            assert relative_error(a, b) < 1e-14
    assert results[0].is_contiguous(memory_format=torch.channels_last) == (layout == "channels_last")


def test_result_does_not_depend_on_threads() -> None:
    operands = make(GEOMETRIES["many pixels"], dtype=torch.float32)
    threads = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(gradients(deform_conv2d, operands)[1:3])  # the type in which our own kernels accumulate
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for a, b in zip(results[0], other):
            assert relative_error(a, b) < 1e-6


def test_deterministic_mode() -> None:
    operands = make(GEOMETRIES["many pixels"], dtype=torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = gradients(deform_conv2d, operands), gradients(deform_conv2d, operands)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("empty", ["batch", "nothing needs a gradient"])
def test_empty(empty: str) -> None:
    operands = make(GEOMETRIES["wide"])
    if empty == "batch":
        for name in ("input", "offset", "mask"):
            operands[name] = operands[name][:0]
        output, *grads = gradients(deform_conv2d, operands)
        assert output.shape == (0, 4, 5, 9)
        assert [g.shape for g in grads[:2]] == [operands["input"].shape, operands["offset"].shape]
        assert grads[2].shape == operands["weight"].shape
        assert not grads[2].any()
        assert not grads[3].any()
    else:
        assert not deform_conv2d(**operands).requires_grad


@pytest.mark.parametrize("only", ["input", "offset", "weight", "bias", "mask"])
def test_gradient_of_one_operand(only: str) -> None:
    operands = make(GEOMETRIES["wide"])
    everything = dict(zip(("input", "offset", "weight", "bias", "mask"), gradients(deform_conv2d, operands)[1:]))
    leaf = operands[only].clone().requires_grad_()
    output = deform_conv2d(**{**operands, only: leaf})
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert relative_error(torch.autograd.grad(output, leaf, grad)[0], everything[only]) < 1e-12


@pytest.mark.parametrize("value", [1e9, -1e9, 1e30, float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_offsets_read_zero(value: float, dtype: torch.dtype) -> None:
    operands = make(GEOMETRIES["wide"], dtype=dtype)
    operands["offset"] = torch.full_like(operands["offset"], value)
    for function in (deform_conv2d, through_reference):
        output, *grads = gradients(function, operands)
        assert torch.equal(output, operands["bias"].view(-1, 1, 1).expand_as(output))
        assert all(torch.isfinite(g).all() for g in grads)


def test_infinite_pixels_stay_where_they_are() -> None:
    """Samples outside the map read 0, even if a pixel of the map is infinite."""
    operands = make(GEOMETRIES["one pixel"])
    operands["input"][:] = math.inf
    operands["offset"][:] = 5.0
    for function in (deform_conv2d, through_reference):
        assert torch.isfinite(function(**operands)).all()


SMALL = (1, 4, 3, 4, 2, (2, 3), (1, 2), 1, 1, 2, 2)


@pytest.mark.parametrize("masked", [True, False])
def test_gradcheck_of_both_orders(masked: bool) -> None:
    operands = make(SMALL, masked=masked, spread=0.7)
    names = [n for n in ("input", "offset", "weight", "bias", "mask") if operands[n] is not None]
    leaves = tuple(operands[n].requires_grad_() for n in names)

    def function(*tensors):
        return deform_conv2d(**{**operands, **dict(zip(names, tensors))})

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


EVERY_FLAG = ((True, True, True), (True, False, False), (False, True, False), (False, False, True))
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def check_operators(masked: bool, needs_grad: bool, traced: tuple) -> None:
    """Run opcheck on both operators; the backward traces its own gradient only for the gradients in ``traced``."""
    o = make(SMALL, dtype=torch.float32, masked=masked)
    for name in ("input", "offset", "weight"):
        o[name].requires_grad_(needs_grad)
    common = (list(o["stride"]), list(o["padding"]), list(o["dilation"]), 2, 2)
    forward = (o["input"], o["offset"], o["weight"], o["bias"], o["mask"], *common)
    torch.library.opcheck(torch.ops.attn_plugins.deform_conv2d.default, forward)
    grad = torch.randn_like(deform_conv2d(**o)).detach().requires_grad_(needs_grad)
    for needs in EVERY_FLAG:
        needs_input, needs_offset, needs_weight = needs
        terms = (o["input"], o["offset"], o["weight"], o["bias"], o["mask"])
        backward = (grad, *terms, *common, [needs_input, needs_offset, needs_weight, needs_weight, needs_offset])
        torch.library.opcheck(
            torch.ops.attn_plugins.deform_conv2d_backward.default,
            backward,
            test_utils=CHECKS if needs in traced else CHECKS[:3],
        )


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_opcheck(masked: bool, needs_grad: bool) -> None:
    # Tracing second derivatives with symbolic sizes takes 10 s per set of flags, so the full grid is marked slow.
    check_operators(masked, needs_grad, () if masked else EVERY_FLAG[:1])


@pytest.mark.slow
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_opcheck_of_traced_second_derivatives(masked: bool, needs_grad: bool) -> None:
    check_operators(masked, needs_grad, EVERY_FLAG)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_graph_breaks(dynamic: bool) -> None:
    operands = make(GEOMETRIES["wide"], dtype=torch.float32)
    compiled = torch.compile(deform_conv2d, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for a, b in zip(gradients(compiled, operands), gradients(deform_conv2d, operands)):
        assert relative_error(a, b) < 1e-6


def test_exports() -> None:
    operands = make(GEOMETRIES["wide"], dtype=torch.float32)

    class Layer(torch.nn.Module):
        def forward(self, input, offset, mask):
            return deform_conv2d(input, offset, operands["weight"], None, 1, 1, 1, mask)

    arguments = (operands["input"], operands["offset"], operands["mask"])
    program = torch.export.export(Layer(), arguments)
    assert torch.allclose(program.module()(*arguments), Layer()(*arguments))
    assert any(n.target is torch.ops.attn_plugins.deform_conv2d.default for n in program.graph.nodes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    operands = make(GEOMETRIES["wide"], dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        inside = gradients(deform_conv2d, operands)  # the backward also runs inside
        mixed = deform_conv2d(**{**operands, "offset": operands["offset"].to(dtype)})
    assert inside[0].dtype == mixed.dtype == dtype
    assert all(g.dtype == torch.float32 for g in inside[1:])
    for a, b in zip(inside, gradients(deform_conv2d, operands)):
        assert relative_error(a, b) < 0.03


def test_flop_formula_equals_the_plain_convolutions() -> None:
    operands = make(GEOMETRIES["square"], dtype=torch.float32)
    operands["weight"].requires_grad_()
    operands["input"].requires_grad_()
    with FlopCounterMode(display=False) as ours:
        deform_conv2d(**operands).sum().backward()
    with FlopCounterMode(display=False) as plain:
        torch.nn.functional.conv2d(operands["input"], operands["weight"], padding=1).sum().backward()
    assert ours.get_total_flops() == plain.get_total_flops() > 0


# --- one dimension --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("geometry", [(2, 6, 9, 4, 3, 1, 1, 1, 2, 3), (1, 4, 8, 4, 2, 2, 0, 3, 1, 1)])
def test_1d_equals_plain_loops(geometry: tuple, masked: bool) -> None:
    B, C, L, C_out, K, stride, padding, dilation, groups, D = geometry
    L_out = (L + 2 * padding - dilation * (K - 1) - 1) // stride + 1
    torch.manual_seed(0)
    input, weight, bias = (
        torch.randn(B, C, L).double(),
        torch.randn(C_out, C // groups, K).double(),
        torch.randn(C_out).double(),
    )
    offset = 2 * torch.randn(B, D * K, L_out).double()
    mask = torch.rand(B, D * K, L_out).double() if masked else None
    expected = torch.zeros(B, C_out, L_out).double()
    for b, o, t in itertools.product(range(B), range(C_out), range(L_out)):
        total = float(bias[o])
        for i, k in itertools.product(range(C // groups), range(K)):
            c = o // (C_out // groups) * (C // groups) + i
            tap = c // (C // D) * K + k
            x = t * stride - padding + k * dilation + float(offset[b, tap, t])
            sample = sum(
                max(0.0, 1 - abs(x - p)) * float(input[b, c, p]) for p in range(L)
            )  # Equation 4's g(a, b) = max(0, 1 - |a - b|)
            total += float(weight[o, i, k]) * sample * (float(mask[b, tap, t]) if masked else 1)
        expected[b, o, t] = total
    output = deform_conv1d(input, offset, weight, bias, stride, padding, dilation, mask)
    assert relative_error(output, expected) < 1e-12


def test_1d_gradcheck() -> None:
    torch.manual_seed(0)
    input, weight = torch.randn(1, 4, 5).double(), torch.randn(2, 4, 3).double()
    offset, mask = torch.randn(1, 6, 5).double(), torch.rand(1, 6, 5).double()
    leaves = tuple(t.requires_grad_() for t in (input, offset, weight, mask))
    assert torch.autograd.gradcheck(lambda i, o, w, m: deform_conv1d(i, o, w, None, 1, 1, 1, m), leaves)


# --- bad input ------------------------------------------------------------------------------------------------

GOOD = (1, 4, 5, 6, 2, (3, 3), 1, 1, 1, 2, 2)

BAD = {
    "input not an image": (
        dict(input=torch.zeros(4, 5, 6).double()),
        ValueError,
        r"input must have shape \(B, C, H, W\)",
    ),
    "integer input": (dict(input=torch.zeros(1, 4, 5, 6, dtype=torch.int64)), TypeError, "input must be float"),
    "mixed dtypes": (dict(offset=torch.zeros(1, 36, 5, 6)), TypeError, "offset must have input's dtype"),
    "other device": (dict(weight=torch.zeros(2, 2, 3, 3, device="meta", dtype=torch.float64)), ValueError, "device"),
    "no tensor": (dict(mask=1.0), TypeError, "mask must be a Tensor"),
    "offset channels": (dict(offset=torch.zeros(1, 35, 5, 6).double()), ValueError, "offset must have shape"),
    "offset size": (dict(offset=torch.zeros(1, 36, 6, 5).double()), ValueError, "offset must have shape"),
    "offset batch": (dict(offset=torch.zeros(2, 36, 5, 6).double()), ValueError, "offset must have shape"),
    "offset groups": (dict(offset=torch.zeros(1, 54, 5, 6).double()), ValueError, "D dividing the 4 channels"),
    "mask shape": (dict(mask=torch.zeros(1, 9, 5, 6).double()), ValueError, "mask must have shape"),
    "weight channels": (dict(weight=torch.zeros(2, 3, 3, 3).double()), ValueError, "does not fit input of 4 channels"),
    "weight groups": (dict(weight=torch.zeros(3, 2, 3, 3).double()), ValueError, "does not fit input of 4 channels"),
    "kernel of 0": (dict(weight=torch.zeros(2, 2, 0, 3).double()), ValueError, "no axis of size 0"),
    "bias shape": (dict(bias=torch.zeros(3).double()), ValueError, "bias must have shape"),
    "stride 0": (dict(stride=0), ValueError, "stride must be"),
    "three strides": (dict(stride=(1, 1, 1)), ValueError, "stride must be"),
    "negative padding": (dict(padding=-1), ValueError, "padding must be"),
    "dilation 0": (dict(dilation=(1, 0)), ValueError, "dilation must be"),
    "fractional stride": (dict(stride=1.5), ValueError, "stride must be"),
    "too small": (dict(dilation=9), ValueError, "input is too small"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    change, error, message = BAD[name]
    operands = make(GOOD)
    deform_conv2d(**operands)
    with pytest.raises(error, match=message):
        deform_conv2d(**{**operands, **change})


@pytest.mark.parametrize(
    "change,error,message",
    [
        (dict(input=torch.zeros(1, 4, 5, 6)), ValueError, r"input must have shape \(B, C, L\)"),
        (dict(offset=torch.zeros(1, 4, 5)), ValueError, "offset must have shape"),
        (dict(offset=torch.zeros(1, 3, 4)), ValueError, "offset must have shape"),
        (dict(mask=torch.zeros(1, 6, 5)), ValueError, "mask must have offset's shape"),
        (dict(stride=(1, 1)), ValueError, "stride must be"),
        (dict(input=torch.zeros(1, 4, 5, dtype=torch.int32)), TypeError, "input must be float"),
    ],
)
def test_bad_input_1d(change: dict, error: type[Exception], message: str) -> None:
    operands = dict(input=torch.zeros(1, 4, 5), offset=torch.zeros(1, 3, 5), weight=torch.zeros(2, 4, 3), padding=1)
    deform_conv1d(**operands)
    with pytest.raises(error, match=message):
        deform_conv1d(**{**operands, **change})
