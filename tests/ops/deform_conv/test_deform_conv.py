"""deform_conv2d and deform_conv1d against plain loops and torchvision."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from attn_plugins.core import library
from attn_plugins.ops import deform_conv1d, deform_conv2d
from attn_plugins.ops.deform_conv.deform_conv import CONVOLVE
from attn_plugins.ops.deform_conv.operands import Options, Terms
from tests.helpers.emulation import NEEDS
from tests.helpers.operator_checks import relative_error
from tests.ops.deform_conv.operands import ALL, GEOMETRIES, drawn, same_where_finite
from tests.ops.emulated_backend import NAME as EMULATED
from tests.ops.test_contract import FIRST, differentiate, example, forced, results
from tests.ops.test_contract_backends import DOUBLE, SINGLE, check, plain_backends

try:
    import torchvision
except ImportError:  # another version of torch may have no matching torchvision
    torchvision = None
needs_torchvision = pytest.mark.skipif(torchvision is None, reason="torchvision is not installed")


def loops(input, offset, weight, bias, mask=None, *, stride=(1, 1), padding=(1, 1), dilation=(1, 1)) -> Tensor:
    """Compute the definition, one multiplication at a time."""
    given = input, offset, weight, bias, mask
    input, offset, weight, bias, mask = (None if t is None else t.numpy() for t in given)
    B, C, H, W = input.shape
    C_out, group_channels, Kh, Kw = weight.shape
    D = offset.shape[1] // (2 * Kh * Kw)
    output = np.zeros((B, C_out, *offset.shape[2:]))
    for b, o, oy, ox in itertools.product(*map(range, output.shape)):
        group = o // (C_out // (C // group_channels))
        total = float(bias[o])
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
    return torch.from_numpy(output)


def test_the_binary_is_there() -> None:
    """Without the binary, everything below would only test the reference."""
    assert library.has_kernel("cpu"), library.failures()["cpu"]


@pytest.mark.parametrize("names", [ALL, ALL.removesuffix(" mask")])
@pytest.mark.parametrize("name", [n for n in GEOMETRIES if n != "many pixels"])
def test_equals_plain_loops(name: str, names: str) -> None:
    some = drawn(name, names=names)
    geometry = {n: GEOMETRIES[name][n] for n in ("stride", "padding", "dilation") if n in GEOMETRIES[name]}
    expected = loops(**some.tensors, **geometry)
    for backend in ("reference", FIRST, *plain_backends("deform_conv2d")):
        assert relative_error(check(some, backend, DOUBLE)["output"], expected) < 1e-12


@pytest.mark.parametrize("kind", ["cpu", "reference"])
def test_gradients_without_autograd_are_those_that_are_needed(kind: str) -> None:
    some, needs = drawn("wide"), [True, False, True, False, True]
    expected = results(some)
    grad = torch.randn(expected["output"].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    terms, options = Terms(**some.tensors), Options((1, 1), (1, 1), (1, 1), 2, 3)
    with forced(kind):
        found = CONVOLVE.gradients(grad, terms, options, needs)
    assert [gradient is not None for gradient in found] == needs
    for name, gradient in zip(terms._fields, found):
        assert gradient is None or relative_error(gradient, expected[name]) < 1e-12


@pytest.mark.parametrize("kind", ["cpu", "eager"])
def test_derivative_at_a_pixel_is_the_one_to_its_right(kind: str) -> None:
    """As by torchvision, of which ``test_torchvision.py`` says the same."""
    some = drawn("wide")
    some.tensors["offset"].round_()
    check(some, kind, DOUBLE)


@pytest.mark.parametrize("kind", ["cpu", "eager"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_output_has_the_memory_format_of_the_input(layout, kind: str) -> None:
    some = drawn("wide")
    some.tensors["input"] = some.tensors["input"].contiguous(memory_format=layout)
    assert check(some, kind, DOUBLE)["output"].is_contiguous(memory_format=layout)


by = pytest.mark.parametrize(
    "name, backend",
    [*(("deform_conv2d", kind) for kind in ("cpu", "eager", "reference")),
     pytest.param("deform_conv2d", EMULATED, marks=[pytest.mark.slow, *NEEDS])],
)  # fmt: skip
NAN, INF = math.nan, math.inf


@needs_torchvision
@by
@pytest.mark.parametrize(
    "row, column, mask",
    [
        *[(1e9, 0, 1), (0, -1e30, 1), (INF, 0, 1), (0, INF, 1), (-INF, INF, 1), (NAN, 1e9, 1), (-1e9, NAN, 1)],
        *[(0, 0, NAN), (1e9, 0, NAN), (0, 0, INF), (0, -1e9, INF)],
    ],
)
def test_far_offsets_and_masks_give_what_torchvision_gives(
    row: float, column: float, mask: float, name: str, backend: str
) -> None:
    """Far offsets read 0, which a mask that is not finite turns into NaN."""
    some = drawn("wide", far=0.7)
    some.tensors["offset"][0, 2:4, 1, 1:4] += torch.tensor([row, column]).view(2, 1)
    some.tensors["mask"][0, 1, 1, 1:4] *= mask
    expected = differentiate(partial(torchvision.ops.deform_conv2d, padding=1), some.leaves())
    with forced(backend):
        assert all(same_where_finite(result, expected[n]) for n, result in results(some).items())


def test_blocks_of_pixels_on_cpus() -> None:
    """The columns of 7055 pixels of 128 channels take three blocks of 12 MB, of which the last is smaller."""
    check(example("deform_conv2d, version 1", B=1, C=128, map=(83, 85), out=8), "cpu", SINGLE)


@by
def test_a_row_or_column_beyond_the_last_reads_nothing(name: str, backend: str) -> None:
    """Whatever the other coordinate is."""
    offset = torch.tensor([[1.0, NAN], [NAN, 1.0]]).view(2, 2, 1, 1)  # on maps of one pixel
    with forced(backend):
        output = deform_conv2d(torch.ones(2, 1, 1, 1), offset, torch.ones(1, 1, 1, 1))
    assert not output.any()


@by
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row, column", [(NAN, 0), (0, NAN), (NAN, NAN)])
def test_nan_offsets_read_nan(row: float, column: float, dtype: torch.dtype, name: str, backend: str) -> None:
    """As with torchvision on GPUs; on CPUs it reads beyond its memory."""
    some = drawn("wide", dtype, far=0.3)
    some.tensors["offset"][0, 2:4, 1, 1:4] += torch.tensor([row, column]).view(2, 1)
    nowhere = torch.zeros(1, 1, 5, 9, dtype=torch.bool)
    nowhere[0, 0, 1, 1:4] = True
    with forced(backend):
        actual = results(some)
    expected = {n: torch.zeros_like(result, dtype=torch.bool) for n, result in actual.items()}
    expected["output"][:, :2] = expected["mask"][:, 1:2] = nowhere  # outputs of the group
    expected["weight"][:2, :2, 0, 1] = True
    # A derivative along one axis is a difference of zeros, weighted by the position along the other one.
    expected["offset"][:, 2:3] = nowhere & math.isnan(column)
    expected["offset"][:, 3:4] = nowhere & math.isnan(row)
    assert all(torch.equal(result.isnan(), expected[n]) for n, result in actual.items())


def test_infinite_pixels_stay_where_they_are() -> None:
    """Samples outside the map read 0, even if a pixel of the map is infinite."""
    some = drawn("one pixel")
    some.tensors["input"][:] = math.inf
    some.tensors["offset"][:] = 5.0
    for backend in (FIRST, "reference"):
        with forced(backend):
            assert some.call(**some.tensors).isfinite().all()


# --- one dimension --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("geometry", [(2, 6, 9, 4, 3, 1, 1, 1, 2, 3), (1, 4, 8, 4, 2, 2, 0, 3, 1, 1)])
def test_1d_equals_plain_loops(geometry: tuple, masked: bool) -> None:
    B, C, L, C_out, K, stride, padding, dilation, groups, D = geometry
    L_out = (L + 2 * padding - dilation * (K - 1) - 1) // stride + 1
    torch.manual_seed(0)
    shapes = (B, C, L), (C_out, C // groups, K), (C_out,)
    input, weight, bias = (torch.randn(shape).double() for shape in shapes)
    offset = 2 * torch.randn(B, D * K, L_out).double()
    mask = torch.rand(B, D * K, L_out).double() if masked else None
    expected = torch.zeros(B, C_out, L_out).double()
    for b, o, t in itertools.product(range(B), range(C_out), range(L_out)):
        total = float(bias[o])
        for i, k in itertools.product(range(C // groups), range(K)):
            c = o // (C_out // groups) * (C // groups) + i
            tap = c // (C // D) * K + k
            x = t * stride - padding + k * dilation + float(offset[b, tap, t])
            sample = sum(max(0.0, 1 - abs(x - p)) * float(input[b, c, p]) for p in range(L))  # g of Equation 4
            total += float(weight[o, i, k]) * sample * (float(mask[b, tap, t]) if masked else 1)
        expected[b, o, t] = total
    output = deform_conv1d(input, offset, weight, bias, stride, padding, dilation, mask)
    assert relative_error(output, expected) < 1e-12
