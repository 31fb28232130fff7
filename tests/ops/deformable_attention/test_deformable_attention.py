"""Deformable attention: its definition in loops, and its behaviour in torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_plugins import ops
from attn_plugins.ops import deformable_attention
from tests.helpers.operator_checks import DEVICES, relative_error
from tests.ops.deformable_attention.operands import SHAPES, by_loops, operands

BACKENDS = ["cpu", "eager", "reference"]
CASES = {
    "levels": {},
    "one level, one pixel": dict(shapes=((1, 1),), queries=3),
    "one head": dict(heads=1, d=16, queries=5),
    "a width of no vector": dict(d=5),
    "a width of many vectors": dict(d=72, batch=1, queries=2, heads=2),
    "many queries": dict(shapes=((3, 2),), queries=300, K=1, heads=2, batch=1),  # more than a task, and packed
    "far beside the map": dict(margin=1e7, batch=1),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_definition(case, backend):
    torch.manual_seed(0)
    value, locations, weights = operands(**CASES[case], grad=False)
    shapes = CASES[case].get("shapes", SHAPES)
    with ops.backend(backend):
        output = deformable_attention(value, shapes, locations, weights)
    torch.testing.assert_close(output, by_loops(value, shapes, locations, weights))


def by_grid_sample(value: Tensor, shapes, locations: Tensor, weights: Tensor) -> Tensor:
    """Compute deformable attention with torch's grid_sample, level by level."""
    B, _, M, d = value.shape
    Q = weights.shape[1]
    output, first = 0, 0
    for level, (H, W) in enumerate(shapes):
        maps = value[:, first : first + H * W].permute(0, 2, 3, 1).reshape(B * M, d, H, W)
        grid = 2 * locations[:, :, :, level].transpose(1, 2).flatten(0, 1) - 1  # (B * M, Q, K, 2)
        samples = F.grid_sample(maps, grid, align_corners=False).view(B, M, d, Q, -1)
        output = output + torch.einsum("bmdqk,bqmk->bqmd", samples, weights[:, :, :, level])
        first += H * W
    return output.flatten(2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_grid_sample_gives_the_same_with_its_gradients(case, dtype, device):
    if case == "far beside the map" and dtype == torch.float32:
        pytest.skip("grid_sample rounds such positions on another way")
    torch.manual_seed(1)
    terms = operands(**CASES[case], dtype=dtype, device=device)
    shapes = CASES[case].get("shapes", SHAPES)
    output = deformable_attention(terms[0], shapes, *terms[1:])
    expected = by_grid_sample(terms[0], shapes, *terms[1:])
    torch.testing.assert_close(output, expected)
    gradient = torch.randn_like(output)
    bound = 1e-12 if dtype == torch.float64 else 2e-5
    pairs = zip(torch.autograd.grad(output, terms, gradient), torch.autograd.grad(expected, terms, gradient))
    assert all(relative_error(a, b) < bound for a, b in pairs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_at_a_whole_pixel_the_derivative_is_that_to_its_right(backend):
    """Interpolation has a kink where a new module's sampling offsets lie; beyond the map, the derivative is 0."""
    value = torch.tensor([1.0, 3.0, 10.0, 30.0], dtype=torch.float64).view(1, 4, 1, 1)
    #                      on every pixel; one pixel left and one right of the map; far to the left
    x = (torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0, 4.0, -2.0], dtype=torch.float64) + 0.5) / 4
    locations = torch.stack((x, torch.full_like(x, 0.5)), -1).view(1, 7, 1, 1, 1, 2).requires_grad_()
    weights = torch.ones(1, 7, 1, 1, 1, dtype=torch.float64)
    with ops.backend(backend):
        output = deformable_attention(value, ((1, 4),), locations, weights)
        output.sum().backward()
    assert output.flatten().tolist() == [1, 3, 10, 30, 0, 0, 0]
    assert (locations.grad[..., 0].flatten() / 4).tolist() == [2, 7, 20, -30, 1, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_read_for_nan_or_beside_the_map(backend):
    value = torch.full((1, 4, 1, 2), float("inf"))
    locations = torch.tensor([[float("nan"), 0.5], [0.5, float("nan")], [3.0, 0.5], [float("inf"), 0.5], [-1e30, 0.5]])
    terms = (value, ((2, 2),), locations.view(1, 5, 1, 1, 1, 2), torch.ones(1, 5, 1, 1, 1))
    with ops.backend(backend):
        assert not deformable_attention(*terms).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_not_hidden(weight, backend):
    """Beside the map, it multiplies 0."""
    value, locations, weights = operands(grad=False, margin=0.6)
    weights[:, ::2, 1, 1, 0] = weight
    expected = by_grid_sample(value, SHAPES, locations, weights).isfinite()
    with ops.backend(backend):
        output = deformable_attention(value, SHAPES, locations, weights)
    assert torch.equal(output.isfinite(), expected)
    assert not expected[:, ::2, 4:8].any()


@pytest.mark.parametrize("device", DEVICES)
def test_points_that_differ_by_level(device):
    """One call equals the sum of one call per level."""
    points = (3, 0, 2)
    value, *_ = operands(device=device)
    locations = torch.rand(2, 6, 3, 5, 2, dtype=torch.float64, device=device)
    weights = torch.rand(2, 6, 3, 5, dtype=torch.float64, device=device)
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
        value, *beside = operands((size,), dtype=torch.float32)
        terms = (value.detach().unflatten(1, size).requires_grad_(), *beside)
        gradient = torch.randn(2, 6, 12)
        wanted = torch.autograd.grad(attend(*terms), terms, gradient)
        for a, b in zip(torch.autograd.grad(compiled(*terms), terms, gradient), wanted):
            torch.testing.assert_close(a, b)


def test_shapes_as_a_tensor():
    terms = operands()
    as_tensor = deformable_attention(terms[0], torch.tensor(SHAPES), *terms[1:])
    assert torch.equal(as_tensor, deformable_attention(terms[0], SHAPES, *terms[1:]))


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
        value, *beside = operands(shapes, batch=batch, dtype=torch.float32, grad=False)
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
    terms = operands(((3, 200),), queries=20, dtype=torch.float32, device=device)
    with torch.autocast(device, torch.bfloat16):
        output = deformable_attention(terms[0], ((3, 200),), *terms[1:])
    rounded = terms[0].detach().bfloat16()
    assert torch.equal(output, deformable_attention(rounded, ((3, 200),), *terms[1:]))
    output.sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in terms)
