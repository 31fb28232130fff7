"""Deformable convolution's Triton kernels, interpreted where there is no device, against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_plugins.ops import backend, deform_conv1d, deform_conv2d, explain
from attn_plugins.ops.sampled import plain, triton_deform_conv
from attn_plugins.ops.sampled.deform_conv import CONVOLVE
from attn_plugins.ops.sampled.operands import Options, Terms
from tests.conftest import ROOT
from tests.helpers.operator_checks import relative_error
from tests.helpers.triton_checks import DEVICE, DTYPES, check, definition, needs_triton, randn, results_and_gradients
from tests.ops.sampled.deform_conv_operands import make

pytestmark = needs_triton
interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="kernels are compiled here, not interpreted")

# name -> (B, C, H, W, C_out, kernel, stride, padding, dilation, groups, offset groups)
CASES = {
    "square": (2, 20, 4, 5, 6, (3, 3), 1, 1, 1, 1, 1),
    "more than a block of all": (1, 70, 11, 6, 260, (1, 1), 1, 0, 1, 1, 1),
    "tall kernel, stride, dilation, groups": (1, 8, 5, 4, 4, (3, 2), (2, 1), (1, 0), (1, 2), 2, 4),
    "groups cut offset groups": (1, 6, 3, 4, 3, (1, 3), 1, (0, 1), 1, 3, 2),
    "one pixel": (3, 2, 1, 1, 2, (3, 3), 1, 1, 1, 1, 1),
}
TINY = (2, 4, 3, 5, 3, (1, 2), 1, (0, 1), 1, 1, 2)
NAMES = Terms._fields


def operands(case: tuple, dtype: torch.dtype = torch.float32, **options) -> tuple[Terms, Options]:
    made = make(case, dtype=dtype, **options)
    terms = Terms(*(t if t is None else t.to(DEVICE) for t in (made[name] for name in NAMES)))
    return terms, Options(made["stride"], made["padding"], made["dilation"], *case[-2:])


def computed(terms: Terms, options: Options) -> list[Tensor | None]:
    shape = (len(terms.input), len(terms.weight), *terms.offset.shape[2:])
    return results_and_gradients(CONVOLVE, terms, options, randn(*shape, dtype=terms.input.dtype))


def assert_same(found: list[Tensor | None], expected: list[Tensor | None], tolerance: float = 1e-5) -> None:
    for name, a, b in zip(("output", *NAMES), found, expected):
        if a is None or b is None:
            assert a is b, name
        else:
            assert relative_error(a, b) <= tolerance, name


@DTYPES
@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition(case, dtype):
    check(CONVOLVE, *operands(CASES[case], dtype))


def test_without_mask_and_bias():
    terms, options = operands(TINY, masked=False)
    check(CONVOLVE, terms._replace(bias=None), options)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e9, -1e30])
def test_far_offsets_read_zero(value):
    terms, options = operands(TINY)
    terms.offset[:, ::2] = value
    output, *grads = computed(terms, options)
    assert torch.equal(output, terms.bias.view(1, -1, 1, 1).expand_as(output))
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert not grads[0].any()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
def test_infinite_pixels_stay_where_they_are():
    """A sample with no pixel reads 0, even where the pixel that stands in for it is infinite."""
    terms, options = operands(CASES["square"])
    terms.input[:, :, 0, 0] = float("inf")
    terms.input[:, :, -1, -1] = float("nan")
    found, *grads = computed(terms, options)
    expected, *their_grads = definition(CONVOLVE, terms, options, randn(*found.shape))
    assert torch.equal(torch.isfinite(found), torch.isfinite(expected))
    assert not torch.isfinite(found).all()
    for name, a, b in zip(NAMES, grads, their_grads):
        assert torch.equal(torch.isfinite(a), torch.isfinite(b)), name


def test_a_chunk_of_images_at_a_time(monkeypatch):
    terms, options = operands((3, 2, *TINY[2:]))
    whole = computed(terms, options)
    for pixels in (1, 40):
        monkeypatch.setattr(triton_deform_conv, "CHUNK_PIXELS", pixels)
        assert_same(computed(terms, options), whole)


def test_places_of_64_bits(monkeypatch):
    monkeypatch.setattr(triton_deform_conv, "WIDE", 1)
    check(CONVOLVE, *operands(TINY))


def test_the_gradient_of_the_weight_is_split_over_pixels(monkeypatch):
    terms, options = operands((1, 4, 9, 9, 3, (1, 1), 1, 0, 1, 1, 1))
    split = computed(terms, options)
    monkeypatch.setattr(triton_deform_conv, "WEIGHT_PROGRAMS", 1)
    assert_same(split, computed(terms, options))


@pytest.mark.parametrize("only", NAMES)
def test_the_gradient_of_one_operand(only):
    terms, options = operands(TINY)
    expected = dict(zip(("output", *NAMES), computed(terms, options)))[only]
    grad_output = randn(2, 3, *terms.offset.shape[2:])
    with backend("triton"):
        grads = CONVOLVE._backward(grad_output, *terms, *options, [name == only for name in NAMES])
    for name, grad in zip(NAMES, grads):
        assert grad.shape == (getattr(terms, name).shape if name == only else (0,))
    assert relative_error(dict(zip(NAMES, grads))[only], expected) < 1e-6


@pytest.mark.parametrize("layout", ["channels last", "transposed", "sliced"])
def test_layouts(layout):
    """The results' memory formats are those that the fake functions promise."""
    terms, options = operands(TINY)
    whole = computed(terms, options)
    if layout == "channels last":
        strided = [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in terms]
    elif layout == "transposed":
        strided = [t.mT.contiguous().mT if t.dim() == 4 else t for t in terms]
    else:
        strided = [torch.stack((t, t), -1).flatten(-2)[..., ::2] for t in terms]
    terms = Terms(*strided)
    found = computed(terms, options)
    assert_same(found, whole)
    promised = [*CONVOLVE.fake(terms, options), *CONVOLVE._gradients(terms, [True] * 5)]
    assert [t.stride() for t in found] == [t.stride() for t in promised]
    assert found[0].is_contiguous() == (plain.memory_format(terms.input) == torch.contiguous_format)


@interpreted
def test_gradients_by_autograd_and_one_dimension():
    x, offset, weight, mask = (randn(*s) for s in ((2, 6, 9), (2, 9, 9), (4, 3, 3), (2, 9, 9)))
    leaves = [t.requires_grad_() for t in (x, offset, weight, mask)]
    results = []
    for name in ("reference", "triton"):
        with backend(name):
            output = deform_conv1d(x, offset, weight, padding=1, mask=mask)
            results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    for ours, theirs in zip(*results):
        assert relative_error(ours, theirs) < 1e-5


@pytest.mark.parametrize("empty", ["batch", "outputs"])
def test_nothing_to_compute(empty):
    terms, options = operands(TINY)
    if empty == "batch":
        terms = Terms(terms.input[:0], terms.offset[:0], terms.weight, terms.bias, terms.mask[:0])
    else:
        terms = terms._replace(weight=terms.weight[:0], bias=terms.bias[:0])
    output, *grads = computed(terms, options)
    assert output.shape == (len(terms.input), len(terms.weight), 3, 6)
    assert [grad.shape for grad in grads] == [term.shape for term in terms]
    assert not any(grad.any() for grad in grads)


# --- where it serves ----------------------------------------------------------------------------------------------


def test_it_comes_after_the_compiled_kernels_and_before_pytorchs():
    assert [each.name for each in CONVOLVE.table] == ["cpu", "cuda", "triton", "torch"]


def test_explained():
    x, offset, weight = torch.zeros(1, 2, 4, 4), torch.zeros(1, 18, 4, 4), torch.zeros(2, 2, 3, 3)
    with backend("torch"):  # which leaves the choice to the table
        choice = explain(deform_conv2d, *(t.to("meta") for t in (x, offset, weight)), padding=1)
    assert choice.refusals["triton"] == "its kernels are for CUDA, and the tensors are on meta"


def test_not_where_results_must_not_depend_on_the_order_of_atomics():
    terms, options = operands(TINY)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ValueError, match="'triton' does not compute this deform_conv2d: its backward is not det"):
            computed(terms, options)
    finally:
        torch.use_deterministic_algorithms(False)


# --- what is compiled ---------------------------------------------------------------------------------------------

VARIANTS = """
import sys; sys.path.insert(0, {root!r})
import torch
from tests.helpers.triton_checks import compiled_variants
from tools.triton_cases import deform_conv

def variants(B, H, W, dtype=torch.bfloat16):
    return compiled_variants(deform_conv(B, 32, H, W, 1, dtype))

expected = variants(2, 16, 16)
assert len(expected) == 3, expected
sizes = [(1 + n % 5, 1 + 7 * n, 200 - 9 * n) for n in range(20)]
assert all(variants(*size) == expected for size in sizes)
assert variants(64, 129, 257) == expected, "several chunks of images"
assert variants(2, 16, 16, torch.float16) != expected
"""
COMPILED = """
import sys; sys.path.insert(0, {root!r})
from tools.triton_cases import CASES
from tools.triton_report import rows

found = rows({{"case": CASES["deform_conv2d, (16,256,64,64), bfloat16"]}}, [90])
assert {{row["kernel"] for row in found}} == {{"convolve", "differentiate_samples", "differentiate_weight"}}
assert all(row["stack"] == 0 and row["shared"] < 99 << 10 for row in found), found
"""


def test_no_size_of_a_map_compiles_anything_new(python):
    python(VARIANTS.format(root=str(ROOT)), TRITON_INTERPRET="0")


def test_kernels_compile_without_spills(python, tmp_path):
    python(COMPILED.format(root=str(ROOT)), TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path / "cache"))
