"""Deformable attention: its definition in loops, numbers that are not finite by each backend, points and shapes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_plugins import ops
from attn_plugins.ops import deformable_attention
from tests.helpers import triton_checks
from tests.helpers.emulation import NEEDS
from tests.helpers.operator_checks import DEVICES
from tests.ops.deform_conv.operands import same_where_finite
from tests.ops.emulated_backend import NAME as EMULATED
from tests.ops.test_contract import FIRST, example, forced

SHAPES = ((5, 7), (3, 4), (1, 2))
by = pytest.mark.parametrize(
    "name, backend, device",
    [
        *(("deformable_attention", backend, "cpu") for backend in ("cpu", "eager", "reference")),
        pytest.param("deformable_attention", "triton", triton_checks.DEVICE, marks=triton_checks.needs_triton),
        pytest.param("deformable_attention", EMULATED, "cpu", marks=[pytest.mark.slow, *NEEDS]),
        pytest.param("deformable_attention", FIRST, "cuda", marks=pytest.mark.cuda),
    ],
)
INF, NAN = math.inf, math.nan


def operands(device: str = "cpu", dtype: torch.dtype = torch.float32, **extents) -> list[Tensor]:
    """Return value, locations and weights. Some locations lie outside the map, none on a whole pixel."""
    return list(example("deformable_attention", device=device, dtype=dtype, **extents).leaves().values())


def pixel(value: Tensor, first: int, H: int, W: int, y: int, x: int) -> Tensor:
    """Read a pixel of one head; value is (S, d)."""
    return value[first + y * W + x] if 0 <= y < H and 0 <= x < W else torch.zeros_like(value[0])


def by_loops(value: Tensor, shapes: Sequence[tuple[int, int]], locations: Tensor, weights: Tensor) -> Tensor:
    """Compute Zhu et al. (2021), Eq. 3, without projections, sample by sample."""
    B, _, M, d = value.shape
    _, Q, _, L, K = weights.shape
    output = torch.zeros(B, Q, M, d, dtype=value.dtype)
    starts = [0, *itertools.accumulate(H * W for H, W in shapes)]
    for b, q, m, level, k in itertools.product(*map(range, (B, Q, M, L, K))):
        H, W = shapes[level]
        x, y = (locations[b, q, m, level, k] * torch.tensor([W, H]) - 0.5).tolist()
        for row, column in itertools.product((math.floor(y), math.floor(y) + 1), (math.floor(x), math.floor(x) + 1)):
            share = (1 - abs(y - row)) * (1 - abs(x - column))
            read = pixel(value[b, :, m], starts[level], H, W, row, column)
            output[b, q, m] += weights[b, q, m, level, k] * share * read
    return output.flatten(2)


@pytest.mark.parametrize(
    "extents", [{}, dict(levels=((1, 1),)), dict(M=1, d=16), dict(levels=((3, 2),), K=1), dict(far=1e7)], ids=str
)
def test_reference_is_the_formula(extents):
    some = example("deformable_attention", dtype=torch.float64, **extents)
    value, *terms = some.tensors.values()
    with ops.backend("reference"):
        torch.testing.assert_close(some.call(**some.tensors), by_loops(value, extents.get("levels", SHAPES), *terms))


@by
def test_at_a_whole_pixel_the_derivative_is_that_to_its_right(name, backend, device):
    """Interpolation has a kink where a new module's sampling offsets lie; beyond the map, the derivative is 0."""
    value = torch.tensor([1.0, 3.0, 10.0, 30.0, 99.0], device=device).view(1, 5, 1, 1)  # the last is of another level
    #                 on every pixel; one pixel left and one right of the map; far to the left
    x = (torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0, 4.0, -2.0], device=device) + 0.5) / 4
    locations = torch.stack((x, torch.full_like(x, 0.5)), -1).view(1, 7, 1, 1, 1, 2).repeat(1, 1, 1, 2, 1, 1)
    locations.requires_grad_()
    weights = torch.tensor([1.0, 0.0], device=device).view(2, 1).expand(1, 7, 1, 2, 1)
    with forced(backend):
        output = deformable_attention(value, ((1, 4), (1, 1)), locations, weights)
        output.sum().backward()
    assert output.flatten().tolist() == [1, 3, 10, 30, 0, 0, 0]
    assert (locations.grad[:, :, 0, 0, 0, 0].flatten() / 4).tolist() == [2, 7, 20, -30, 1, 0, 0]


@by
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_nothing_is_read_for_nan_or_beside_the_map(name, backend, device):
    """Nor do they have gradients; a weight that is not finite multiplies 0."""
    value = torch.full((1, 4, 1, 2), INF, device=device, requires_grad=True)
    places = torch.tensor([[NAN, 0.5], [0.5, NAN], [3.0, 0.5], [INF, 0.5], [-1e30, 0.5]], device=device)
    places = places.view(1, 5, 1, 1, 1, 2).requires_grad_()
    weights = torch.ones(1, 5, 1, 1, 1, device=device, requires_grad=True)
    with forced(backend):
        output = deformable_attention(value, ((2, 2),), places, weights)
        grads = torch.autograd.grad(output.sum(), (value, places, weights))
        infinite = deformable_attention(value, ((2, 2),), places, torch.full_like(weights, INF))
    assert not any(t.any() for t in (output, *grads))
    assert infinite.isnan().all()


def spoilt_cases() -> Iterator[Any]:
    """Every backend, width, number and place; Triton's interpreter, which takes seconds, in the first by default."""
    for case in by.args[1]:
        values, marks = (case.values, case.marks) if isinstance(case, type(pytest.param())) else (case, ())
        for n, some in enumerate(itertools.product([4, 5, 32], [NAN, INF], ["weights", "pixels", "corners"])):
            interpreted = triton_checks.SLOW_INTERPRETED if "triton" in values and n else []
            yield pytest.param(*values, *some, marks=[*marks, *interpreted])


@pytest.mark.parametrize("name, backend, device, d, bad, spoilt", list(spoilt_cases()))
@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow")
def test_numbers_that_are_not_finite_spoil_their_own_samples_alone(name, backend, device, d, bad, spoilt):
    """This includes the borders, where pixels inside substitute for those outside."""
    some = example(name, "small", device, torch.float32, d=d, Q=8, far=1.5)
    value, _, weights = some.tensors.values()
    if spoilt == "weights":
        weights[:, ::2, 1, 1, 0] = bad
    else:  # corners of the first two levels
        value[0, [0, 6, 34, 35, 46] if spoilt == "corners" else 10] = bad
    with ops.backend("reference"):
        expected = some.call(**{n: t.cpu().double() for n, t in some.tensors.items()})
    with forced(backend):
        output = some.call(**some.tensors)
    assert 0 < expected.isfinite().sum() < expected.numel()
    assert same_where_finite(output.cpu(), expected, 1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_points_that_differ_by_level(device):
    """One call equals the sum of one call per level."""
    points = (3, 0, 2)
    value, *_ = operands(device)
    locations, weights = torch.rand(2, 6, 3, 5, 2, device=device), torch.rand(2, 6, 3, 5, device=device)
    output = deformable_attention(value, SHAPES, locations, weights, points)
    expected, row, point = 0, 0, 0
    for (H, W), count in zip(SHAPES, points):
        one = slice(point, point + count)
        maps = value[:, row : row + H * W]
        if count:
            expected = expected + deformable_attention(
                maps, ((H, W),), locations[..., None, one, :], weights[..., None, one]
            )
        row, point = row + H * W, point + count
    torch.testing.assert_close(output, expected)


def test_compiled_gradients_of_any_size():
    torch._dynamo.reset()

    def attend(map: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        return deformable_attention(map.flatten(1, 2), (map.shape[1:3],), locations, weights)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in ((5, 7), (9, 4), (6, 8)):
        value, *beside = operands(levels=(size,))
        terms = (value.detach().unflatten(1, size).requires_grad_(), *beside)
        gradient = torch.randn(2, 6, 12)
        wanted = torch.autograd.grad(attend(*terms), terms, gradient)
        for a, b in zip(torch.autograd.grad(compiled(*terms), terms, gradient), wanted):
            torch.testing.assert_close(a, b)


def test_shapes_as_a_tensor():
    terms = operands()
    shapes, other = torch.tensor(SHAPES), [(W, H) for H, W in SHAPES]
    for expected in (SHAPES, other):
        shapes.numpy()[:] = expected  # which PyTorch does not notice
        as_tensor = deformable_attention(terms[0], shapes, *terms[1:])
        assert torch.equal(as_tensor, deformable_attention(terms[0], expected, *terms[1:]))


class Attend(nn.Module):
    def forward(self, *terms: Tensor) -> Tensor:
        return deformable_attention(*terms)


def graph_of(way: str, example: tuple[Tensor, ...], file: Path) -> Callable[..., Tensor]:
    dynamic = tuple({0: torch.export.Dim.AUTO} if t.is_floating_point() else None for t in example)
    if way == "compiled":
        torch._dynamo.reset()
        return torch.compile(Attend(), fullgraph=True, backend="aot_eager")
    if way == "onnx":
        onnxruntime = pytest.importorskip("onnxruntime")
        names = ["value", "shapes", "locations", "weights"]
        torch.onnx.export(
            Attend(), example, file, input_names=names, dynamic_shapes=(dynamic,), dynamo=True, verbose=False
        )
        run = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]).run
        return lambda *terms: torch.from_numpy(run(None, {n: t.numpy() for n, t in zip(names, terms)})[0])
    return torch.export.export(Attend(), example, dynamic_shapes=(dynamic,), strict=way == "strict").module()


@pytest.mark.parametrize("way", ["exported", "strict", "compiled", pytest.param("onnx", marks=pytest.mark.slow)])
def test_the_values_of_a_tensor_of_shapes_are_no_constants(way, tmp_path):
    """mmdet's layers always pass a Tensor; one graph serves other shapes of as many pixels, and any batch."""
    arguments = []
    for shapes, batch in ((SHAPES, 2), (SHAPES, 3), (((7, 5), (4, 3), (2, 1)), 2)):
        value, *beside = (t.detach() for t in operands(levels=shapes, B=batch))
        arguments.append((value, torch.tensor(shapes), *beside))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        function = graph_of(way, arguments[0], tmp_path / "attend.onnx")
        for terms in arguments:
            torch.testing.assert_close(function(*terms), deformable_attention(*terms), rtol=1e-4, atol=1e-5)
    if way == "exported":
        with pytest.raises(RuntimeError):
            function(terms[0], torch.tensor(((5, 7), (3, 4), (1, 3))), *terms[2:])


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_casts_the_value_alone(device):
    terms = operands(device, levels=((3, 200),), Q=20)
    with torch.autocast(device, torch.bfloat16):
        output = deformable_attention(terms[0], ((3, 200),), *terms[1:])
    rounded = terms[0].detach().bfloat16()
    assert torch.equal(output, deformable_attention(rounded, ((3, 200),), *terms[1:]))
    output.sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in terms)
