"""Deformable attention: its definition in loops, and its behaviour in torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attn_plugins import ops
from attn_plugins.ops import deformable_attention
from tests.helpers.operator_checks import DEVICES, check_compiled_and_exported, relative_error
from tests.ops.sampled.deformable_attention_operands import SHAPES, by_loops, operands

BACKENDS = ["cpu", "torch", "reference"]
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
        found = deformable_attention(value, shapes, locations, weights)
    torch.testing.assert_close(found, by_loops(value, shapes, locations, weights))


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
    found = deformable_attention(terms[0], shapes, *terms[1:])
    expected = by_grid_sample(terms[0], shapes, *terms[1:])
    torch.testing.assert_close(found, expected)
    gradient = torch.randn_like(found)
    bound = 1e-12 if dtype == torch.float64 else 2e-5
    pairs = zip(torch.autograd.grad(found, terms, gradient), torch.autograd.grad(expected, terms, gradient))
    assert all(relative_error(a, b) < bound for a, b in pairs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shapes", [SHAPES, ((3, 4),)])
def test_gradients_of_both_orders(shapes, device):
    torch.manual_seed(0)
    terms = operands(shapes, batch=1, queries=3, heads=2, d=3, device=device)

    def function(*tensors: Tensor) -> Tensor:
        return deformable_attention(tensors[0], shapes, *tensors[1:])

    assert torch.autograd.gradcheck(function, terms)
    assert torch.autograd.gradgradcheck(function, terms)


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


@pytest.mark.parametrize("device", DEVICES)
def test_points_that_differ_by_level(device):
    """One call equals the sum of one call per level."""
    points = (3, 0, 2)
    value, *_ = operands(device=device)
    locations = torch.rand(2, 6, 3, 5, 2, dtype=torch.float64, device=device)
    weights = torch.rand(2, 6, 3, 5, dtype=torch.float64, device=device)
    found = deformable_attention(value, SHAPES, locations, weights, points)
    expected, row, point = 0, 0, 0
    for (H, W), count in zip(SHAPES, points):
        one = slice(point, point + count)
        maps = value[:, row : row + H * W]
        if count:
            expected = expected + deformable_attention(
                maps, ((H, W),), locations[..., None, one, :], weights[..., None, one]
            )
        row, point = row + H * W, point + count
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    value, locations, weights = operands(dtype=dtype, beside=torch.float32)
    terms = (value, locations.detach().flatten(3, 4).requires_grad_(), weights.detach().flatten(3).requires_grad_())
    options = ([n for shape in SHAPES for n in shape], [2, 2, 2])
    torch.library.opcheck(torch.ops.attn_plugins.deformable_attention, (*terms, *options))
    gradient = torch.randn(2, 6, 12, dtype=dtype)
    torch.library.opcheck(
        torch.ops.attn_plugins.deformable_attention_backward,
        (gradient, *(t.detach() for t in terms), *options, [True] * 3),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_the_places_of_its_samples(dtype, device):
    """On a map of 200 columns, a half-precision location would be off by up to half a pixel."""
    torch.manual_seed(0)
    shapes = ((3, 200),)
    terms = operands(shapes, queries=40, d=32, dtype=dtype, beside=torch.float32, device=device)
    exact = [t.detach().double().requires_grad_() for t in terms]
    found = deformable_attention(terms[0], shapes, *terms[1:])
    expected = deformable_attention(exact[0], shapes, *exact[1:])
    assert found.dtype == dtype
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=1e-5)
    gradient = torch.randn_like(found)
    wanted = torch.autograd.grad(expected, exact, gradient.double())
    for term, a, b in zip(terms, torch.autograd.grad(found, terms, gradient), wanted):
        assert a.dtype == term.dtype
        assert relative_error(a, b) < (rounding if term.dtype == dtype else 1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_casts_the_value_alone(device):
    terms = operands(((3, 200),), queries=20, dtype=torch.float32, device=device)
    with torch.autocast(device, torch.bfloat16):
        found = deformable_attention(terms[0], ((3, 200),), *terms[1:])
    rounded = terms[0].detach().bfloat16()
    assert torch.equal(found, deformable_attention(rounded, ((3, 200),), *terms[1:]))
    found.sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in terms)


def test_compiled_and_exported():
    check_compiled_and_exported(
        lambda *terms: deformable_attention(terms[0], SHAPES, *terms[1:]), operands(dtype=torch.float32, grad=False)
    )


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


class Layer(torch.nn.Module):
    def forward(self, value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        return deformable_attention(value, SHAPES, locations, weights)


def test_onnx_runtime_gives_the_same(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    arguments = operands(dtype=torch.float32, grad=False)
    torch.onnx.export(Layer(), arguments, tmp_path / "layer.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "layer.onnx", providers=["CPUExecutionProvider"])
    inputs = {i.name: t.numpy() for i, t in zip(session.get_inputs(), arguments)}
    (found,) = session.run(None, inputs)
    torch.testing.assert_close(torch.from_numpy(found), Layer()(*arguments), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_views_give_what_copies_give(device):
    """Heads of a projection and of a part of one, a crop of the keys, every second channel, one expanded head."""
    value, locations, weights = operands(device=device)
    B, S, M, d = value.shape
    options = dict(dtype=value.dtype, device=device)
    views = {
        "heads first": torch.randn(B, M, S, d, **options).transpose(1, 2),
        "channels first": torch.randn(B, M, d, S, **options).permute(0, 3, 1, 2),
        "part": torch.randn(B, S, 3 * M * d, **options)[..., M * d : 2 * M * d].unflatten(-1, (M, d)),
        "crop": torch.randn(B, S + 3, M, d, **options)[:, 2:-1],
        "every second": torch.randn(B, S, M, 2 * d, **options)[..., ::2],
        "one head": torch.randn(B, S, 1, d, **options).expand(B, S, M, d),
    }
    strided = [t.detach().transpose(0, 1).contiguous().transpose(0, 1) for t in (locations, weights)]
    for name, view in views.items():
        leaves = [t.detach().requires_grad_() for t in (view, *strided)]
        copies = [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in leaves]
        found, expected = (deformable_attention(t[0], SHAPES, *t[1:]) for t in (leaves, copies))
        torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")
        gradients = (torch.autograd.grad(o.square().sum(), t) for o, t in ((found, leaves), (expected, copies)))
        for a, b in zip(*gradients):
            torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("packed", [False, True])
def test_nothing_depends_on_threads(packed):
    terms = operands(((20, 30),), queries=900 if packed else 40, K=4, heads=4, d=32, dtype=torch.float32)
    gradient = torch.randn(2, 900 if packed else 40, 128)
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            output = deformable_attention(terms[0], ((20, 30),), *terms[1:])
            results.append([output, *torch.autograd.grad(output, terms, gradient)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_only_wanted_gradients():
    terms = operands(grad=False)
    every = [t.clone().requires_grad_() for t in terms]
    expected = torch.autograd.grad(deformable_attention(every[0], SHAPES, *every[1:]).square().sum(), every)
    for wanted in range(3):
        leaves = list(terms)
        leaves[wanted] = leaves[wanted].clone().requires_grad_()
        deformable_attention(leaves[0], SHAPES, *leaves[1:]).square().sum().backward()
        torch.testing.assert_close(leaves[wanted].grad, expected[wanted])


def test_nothing_uninitialised_is_read():
    """Results and gradients start as NaN."""
    terms = operands(d=5, dtype=torch.float32)
    output = deformable_attention(terms[0], SHAPES, *terms[1:])
    expected = [output, *torch.autograd.grad(output.square().sum(), terms)]
    filled = torch.utils.deterministic.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        output = deformable_attention(terms[0], SHAPES, *terms[1:])
        found = [output, *torch.autograd.grad(output.square().sum(), terms)]
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("empty", [dict(batch=0), dict(queries=0), dict(K=0), {}])
def test_nothing_to_do_and_shapes_without_data(empty, device):
    if device == "meta":
        terms = [t.to("meta").requires_grad_() for t in operands(**empty, dtype=torch.float32, grad=False)]
    else:
        terms = operands(**empty, dtype=torch.float32)
    output = deformable_attention(terms[0], SHAPES, *terms[1:])
    assert output.shape == (empty.get("batch", 2), empty.get("queries", 6), 12)
    if device == "cpu":
        if "K" in empty:
            assert not output.any()
        output.sum().backward()
        assert all(t.grad.shape == t.shape for t in terms)
        assert terms[0].grad.any() == (not empty)


def test_flops():
    terms = operands()
    with FlopCounterMode(display=False) as counter:
        output = deformable_attention(terms[0], SHAPES, *terms[1:])
    samples = 2 * 6 * 3 * (3 * 2) * 4
    assert counter.get_total_flops() == 2 * 5 * samples
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    assert counter.get_total_flops() == 2 * 8 * samples


def test_shapes_as_a_tensor():
    terms = operands()
    as_tensor = deformable_attention(terms[0], torch.tensor(SHAPES), *terms[1:])
    assert torch.equal(as_tensor, deformable_attention(terms[0], SHAPES, *terms[1:]))


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(value=None), "value must be a Tensor, got NoneType"),
        (dict(sampling_locations=None), "sampling_locations must be a Tensor, got NoneType"),
        (dict(attention_weights=None), "attention_weights must be a Tensor, got NoneType"),
        (dict(value=torch.zeros(2, 49, 12)), r"value must have shape \(B, S, M, d\), got \(2, 49, 12\)"),
        (dict(value=torch.zeros(2, 49, 3, 4, dtype=torch.int32)), "value must be float16, bfloat16"),
        (dict(spatial_shapes=((5, 7), (3, 4))), r"spatial_shapes must have as many pixels as value has keys, 49, got"),
        (dict(spatial_shapes=()), r"spatial_shapes must hold \(H, W\) of at least one level, got \(\)"),
        (dict(spatial_shapes=5), r"spatial_shapes must hold \(H, W\) of at least one level, got 5"),
        (dict(spatial_shapes=((5, 7), (3, 4), (2,))), r"each of spatial_shapes must be .* 2 ints"),
        (dict(spatial_shapes=((7, 7), (0, 4))), "each of spatial_shapes must be .* at least 1"),
        (dict(spatial_shapes=torch.ones(3, 2)), r"must be an integer Tensor \(L, 2\), got torch.float32"),
        (dict(attention_weights=torch.zeros(2, 6, 3, 2, 2)), r"must have shape \(2, 6, 3, 3, 2\): .* got \(2, 6, 3, 2"),
        (dict(attention_weights=torch.zeros(2, 6, 3, 6)), r"weights must have shape \(B, Q, M, L, K\), got"),
        (dict(attention_weights=torch.zeros(())), r"attention_weights must have shape \(B, Q, M, L, K\), got \(\)"),
        (dict(sampling_locations=torch.zeros(2, 6, 3, 3, 2, 3)), r"locations must have shape \(2, 6, 3, 3, 2, 2"),
        (dict(sampling_locations=torch.zeros(2, 5, 3, 3, 2, 2)), r"locations must have shape \(2, 6, 3, 3, 2, 2"),
        (dict(sampling_locations=torch.zeros(2, 6, 3, 6, 2)), r"must have shape \(B, Q, M, L, K, 2\), got"),
        (dict(points=(2, 2, 2)), r"attention_weights must have shape \(B, Q, M, P\), got \(2, 6, 3, 3, 2\)"),
        (dict(points=(2, 2)), "points must be an int or 3 ints"),
        (dict(points=(2, 2, -2)), "points must be an int or 3 ints, each at least 0"),
        (dict(sampling_locations=torch.zeros(2, 6, 3, 3, 2, 2).double()), "must be torch.float32 for a value"),
        (dict(attention_weights=torch.zeros(2, 6, 3, 3, 2, dtype=torch.float16)), "must be torch.float32 for a value"),
        (dict(sampling_locations=torch.zeros(2, 6, 3, 3, 2, 2, device="meta")), "be on value's device cpu, got meta"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(change, words):
    value, locations, weights = operands(dtype=torch.float32, grad=False)
    arguments = dict(value=value, spatial_shapes=SHAPES, sampling_locations=locations, attention_weights=weights)
    with pytest.raises((ValueError, TypeError), match=words):
        deformable_attention(**{**arguments, **change})
