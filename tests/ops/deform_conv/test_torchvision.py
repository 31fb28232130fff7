"""Deformable convolution by torchvision's kernels, on CUDA where there is a device, else forced on the CPU."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from attn_plugins.core.backends import never
from attn_plugins.ops import backend, deform_conv1d
from attn_plugins.ops.deform_conv import torchvision_kernels as by_torchvision
from attn_plugins.ops.deform_conv.deform_conv import CONVOLVE
from attn_plugins.ops.deform_conv.operands import Options, Terms
from tests.helpers.operator_checks import deterministic_mode, relative_error
from tests.ops.deform_conv.operands import drawn
from tests.ops.test_contract import assert_close, forced, results
from tests.ops.test_contract_backends import DOUBLE, HALF, check

pytest.importorskip("torchvision")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = math.nan


@pytest.fixture
def serving(monkeypatch):
    """Let torchvision serve everywhere, as on a device without our binary, without an instruction to do so."""
    monkeypatch.setattr(CONVOLVE, "table", [by_torchvision.BACKEND._replace(cannot=never, prefers_not=None)])


def test_half_positions_are_exact_on_wide_maps():
    """torchvision's kernel of float16 is 1 % off here."""
    check(drawn("square", HALF, DEVICE, B=1, map=(3, 200), out=4), "torchvision", HALF)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts_are_those_of_fake_tensors(layout, dtype):
    """Else a compiled graph would read the results wrongly."""
    options, tensors = Options((1, 1), (1, 1), (1, 1), 2, 3), drawn("wide", dtype, DEVICE).tensors
    terms = Terms(**{n: t.contiguous(memory_format=layout) if t.dim() == 4 else t for n, t in tensors.items()})
    with backend("torchvision"):
        output = CONVOLVE._forward(*terms, *options)
        grads = CONVOLVE._backward(output, *terms, *options, [True] * 5)
    assert output.stride() == CONVOLVE.fake(terms, options)[0].stride()
    for grad, fake in zip(grads, CONVOLVE._gradients(terms, [True] * 5)):
        assert (grad.shape, grad.stride(), grad.dtype) == (fake.shape, fake.stride(), fake.dtype)


@pytest.mark.parametrize("name", ["wide", "groups cut offset groups"])
def test_the_derivative_at_a_pixel_and_on_the_edge_is_that_to_its_right(name):
    some = drawn(name, device=DEVICE)
    for change in (some.tensors["offset"].round_, some.tensors["offset"].zero_):
        change()
        check(some, "torchvision", DOUBLE)


@pytest.mark.parametrize("row, column", [(NAN, 0), (0, NAN), (NAN, NAN)])
def test_nan_offsets(row, column):
    """They read NaN on GPUs, with the reference's gradients, and are refused on CPUs."""
    some = drawn("wide", device=DEVICE, far=0.3)
    some.tensors["offset"][0, 2:4, 1, 1:4] += torch.tensor([row, column], device=DEVICE).view(2, 1)
    if DEVICE == "cpu":
        words = "offset has a NaN, for which torchvision's kernels for CPUs read"
        with backend("torchvision"), pytest.raises(ValueError, match=words):
            results(some)
        return
    with forced("torchvision"):
        actual = results(some)
    with forced("reference"):
        torch.testing.assert_close(actual, results(some), equal_nan=True)


def test_gradients_of_nan_offsets_are_those_of_the_definition():
    """torchvision's are finite along the axis that is NaN, from pixels that the definition does not read."""
    offset = torch.tensor([1.0, NAN, NAN, 2.0])
    given = by_torchvision.without_nowhere(torch.tensor([3.0, 5.0, NAN, NAN]), offset)
    torch.testing.assert_close(given, torch.tensor([3.0, 0.0, NAN, NAN]), equal_nan=True)


# --- autograd -----------------------------------------------------------------------------------------------------


def test_both_orders_of_gradients(serving):
    some = drawn("square", device=DEVICE, B=1, map=(3, 4), out=2, kernel=(2, 3), groups=2, D=2, far=0.3)

    def function(*tensors):
        return some.call(**dict(zip(some.tensors, tensors)))

    leaves = list(some.leaves().values())
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True, nondet_tol=1e-10)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True, nondet_tol=1e-10)


def test_vmap_and_grad_equal_the_reference(serving):
    some = drawn("wide", device=DEVICE)
    call, x = lambda input: some.call(**{**some.tensors, "input": input}), some.tensors["input"]
    with torch.no_grad(), backend("reference"):
        expected = [call(x), call(2 * x)]
    assert_close(dict(output=torch.vmap(call)(torch.stack([x, 2 * x]))), dict(output=torch.stack(expected)), 1e-12)
    gradient = torch.func.grad(lambda input: call(input).square().sum())(x)
    leaf = x.clone().requires_grad_()
    with backend("reference"):
        assert relative_error(gradient, torch.autograd.grad(call(leaf).square().sum(), leaf)[0]) < 1e-12


def test_deform_conv1d_and_an_empty_batch_are_served(serving):
    x, offset, weight = torch.randn(2, 4, 9), torch.randn(2, 3, 9), torch.randn(6, 4, 3)
    args = [t.to(DEVICE) for t in (x, offset, weight)]
    output = deform_conv1d(*args, padding=1)
    with backend("reference"):
        assert relative_error(output, deform_conv1d(*args, padding=1)) < 2e-6
    assert deform_conv1d(args[0][:0], args[1][:0], args[2], padding=1).shape == (0, 6, 9)


# --- what serves --------------------------------------------------------------------------------------------------


def test_calls_that_torchvision_does_not_serve_are_refused_in_words(monkeypatch):
    terms = Terms(**drawn("wide").tensors)
    assert by_torchvision.cannot(terms, None) is None
    assert by_torchvision.prefers_not(terms, None) == "it serves GPUs, and the tensors are on cpu"
    with deterministic_mode():
        assert by_torchvision.BACKEND.cannot_backward(terms, None) == "its backward is not deterministic"
    assert by_torchvision._missing("xpu") == "this torchvision has no deform_conv2d for xpu"


@pytest.mark.parametrize(
    "source, words",
    [
        ("raise ImportError", "torchvision is not installed"),
        ("raise RuntimeError('of another torch')", "torchvision does not load: of another torch"),
    ],
)
def test_a_torchvision_that_does_not_load_is_named(source, words, monkeypatch, tmp_path):
    (tmp_path / "torchvision.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision")
    assert by_torchvision._missing.__wrapped__("cuda") == words


@pytest.mark.slow
def test_a_torchvision_without_its_binary_is_named(python):
    code = "from attn_plugins.ops.deform_conv import torchvision_kernels as t; print(t._missing('cuda'))"
    stdout = python(code, packages={"torchvision/__init__.py": ""}).stdout
    assert stdout.strip() == "this torchvision has no deform_conv2d for cuda"
