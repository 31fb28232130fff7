"""Modules as graphs: compiled, exported, traced, written as ONNX, with one batch and run with another; under vmap."""

from __future__ import annotations

from functools import partial
from math import prod

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.utils import _pytree as pytree

from attn_plugins import ops
from attn_plugins.modules import SpaceTimeSelfAttention, SpatialSelfAttention
from tests.helpers import module_inputs
from tests.helpers.cuda_checks import check_module, floating, no_tf32, randomized  # noqa: F401
from tests.helpers.memory_format_checks import FORMATS, has_format
from tests.helpers.module_inputs import drawn, inputs
from tests.helpers.operator_checks import DEVICES
from tests.helpers.public_modules import MODULES, VARIANTS, often
from tests.helpers.slow_cases import slow_but


class Flat(nn.Module):
    """A module as a function of its tensor inputs alone, and the axes of the batch in these."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.module = drawn(VARIANTS[name](), 0.3)
        self.leaves, self.spec = pytree.tree_flatten(inputs(name))
        self.example = tuple(leaf for leaf in self.leaves if isinstance(leaf, Tensor))
        monkeypatch.setattr(module_inputs, "B", 3)
        others = pytree.tree_leaves(inputs(name, seed=1))
        self.others = tuple(leaf for leaf in others if isinstance(leaf, Tensor))
        self.batch = [
            {axis for axis in range(a.dim()) if a.shape[axis] != b.shape[axis]}
            for a, b in zip(self.example, self.others)
        ]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return tuple(t for t in pytree.tree_leaves(self.module(*args, **kwargs)) if isinstance(t, Tensor))

    def assert_close(self, actual: list[Tensor]) -> None:
        for output, expected in zip(actual, self(*self.others), strict=True):
            torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4)


@pytest.fixture
def flat(name, monkeypatch) -> Flat:
    return Flat(name, monkeypatch).eval().requires_grad_(False)


@pytest.mark.usefixtures("no_tf32")
@pytest.mark.parametrize("device", DEVICES)
@often("CrissCrossAttention2d", "MultiheadSpatialAttention",
       seldom=("GeneralizedAttention2d, range", "WindowSelfAttention, V2"))  # fmt: skip
def test_compiled_in_one_graph_equals_eager(name, device):
    """On CUDA, inductor compiles; on the CPU, graphs run as they are, which needs no compiler."""
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = partial(torch.compile, backend=backend, fullgraph=True)
    check_module(randomized(VARIANTS[name]()).eval(), inputs(name), device, torch.float32, compiled=compiled)


# torch's guards on the sizes of named tuples' fields are no valid Python.
@often("AAConv2d, pooled", "BilateralSelfAttention", "NonLocal2d, relative",
       seldom=("MultiScaleDeformableAttention, ε3", "RelativeSelfAttention, per head"),
       never=("GatedBilateralController",))  # fmt: skip
def test_exported_for_another_batch(name, flat):
    dynamic = tuple(dict.fromkeys(batch, torch.export.Dim.AUTO) for batch in flat.batch)
    program = torch.export.export(flat, flat.example, dynamic_shapes=(dynamic,))
    flat.assert_close(program.module()(*flat.others))


@pytest.mark.filterwarnings("ignore")
@often("AAConv2d, sine", "BilateralCrissCross2d, zero", "DualWayEncoder", "DynamicConv1d", "GatedConvBlock",
       "LocalBilateralConv2d", "NonLocal3d, concatenation",
       seldom=("MultimodalDecoderBlock", "SpaceTimeSelfAttention, axial",
               "WindowSelfAttention, bilateral"))  # fmt: skip
def test_onnx_from_torchscript_runs_with_another_batch(name, flat, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    file, names = tmp_path / "module.onnx", [f"x{n}" for n in range(len(flat.example))]
    axes = {name: {axis: f"{name}_{axis}" for axis in batch} for name, batch in zip(names, flat.batch)}
    torch.onnx.export(flat, flat.example, file, dynamo=False, input_names=names, dynamic_axes=axes)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    given = {node.name: flat.others[names.index(node.name)].numpy() for node in session.get_inputs()}
    flat.assert_close([*map(torch.from_numpy, session.run(None, given))])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODULES)
def test_traced_for_another_batch(name, flat):
    flat.assert_close(torch.jit.trace(flat, flat.example, check_trace=False)(*flat.others))


def test_traced_by_the_definitions_there_is_no_operator_of_ours():
    """Such a file loads where this package is not installed, in C++ as well."""
    layer, x = VARIANTS["GeneralizedAttention2d"]().eval().requires_grad_(False), torch.randn(2, 16, 5, 7)
    assert "attn_plugins::" in str(torch.jit.trace(layer, x).inlined_graph)
    with ops.backend("reference"):
        traced = torch.jit.trace(layer, x)
    assert "attn_plugins::" not in str(traced.inlined_graph)
    torch.testing.assert_close(traced(x), layer(x))


class _PrefixByShape(nn.Module):
    """A layer whose grid and number of prefix tokens come from the number of tokens."""

    def __init__(self, layer: nn.Module, *grid: int) -> None:
        super().__init__()
        self.layer, self.grid = layer, grid

    def forward(self, x: Tensor) -> Tensor:
        prefix = x.shape[1] - 48
        return self.layer(x, grid=((x.shape[1] - prefix) // prod(self.grid), *self.grid), prefix_tokens=prefix)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", [partial(torch.jit.trace, check_trace=False), torch.export.export])
@pytest.mark.parametrize("layer", [
    _PrefixByShape(SpatialSelfAttention(16, 2, attention_type="1000"), 8),
    _PrefixByShape(SpaceTimeSelfAttention(16, 2), 4, 6),
], ids=["space", "space and time"])  # fmt: skip
def test_the_prefix_is_a_number_from_a_shape(layer, way):
    layer, x = layer.eval().requires_grad_(False), torch.randn(1, 49, 16)
    dynamic = {} if way is not torch.export.export else dict(dynamic_shapes=({1: torch.export.Dim.AUTO},))
    graph = way(layer, (x,), **dynamic)
    graph = graph.module() if hasattr(graph, "graph_module") else graph
    torch.testing.assert_close(graph(x), layer(x))


@pytest.mark.parametrize("name", ["AAConv2d", "CrissCrossAttention2d", "LocalBilateralConv2d"])
def test_a_graph_keeps_the_memory_format(name):
    torch.manual_seed(0)
    module, x = VARIANTS[name]().eval(), inputs(name)[0][0]
    for kind, layout in FORMATS.items():
        x = x.contiguous(memory_format=layout)
        expected = module(x).detach()
        for function in (torch.jit.trace(module, x), torch.export.export(module, (x,)).module()):
            output = function(x)
            assert has_format(output, kind)
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


SEEDS = (0, 1, 2)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", slow_but(MODULES, [*VARIANTS]))
def test_vmap_of_grad_is_a_loop(name):
    """Gradients of an ensemble, each with its own parameters and sample."""
    members = [drawn(VARIANTS[name](dtype=torch.float64), 0.3, seed).eval() for seed in SEEDS]
    leaves, spec = zip(*(pytree.tree_flatten(inputs(name, seed)) for seed in SEEDS))
    floats = [n for n, leaf in enumerate(leaves[0]) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    samples = [[given[n].double() for n in floats] for given in leaves]

    def loss(parameters: dict[str, Tensor], tensors: list[Tensor]) -> Tensor:
        given = list(leaves[0])
        for n, tensor in zip(floats, tensors):
            given[n] = tensor
        args, kwargs = pytree.tree_unflatten(given, spec[0])
        return sum(output.square().sum() for output in floating(functional_call(members[0], parameters, args, kwargs)))

    states = [dict(member.named_parameters()) for member in members]
    expected = []
    for state, tensors in zip(states, samples):
        wanted = [*state.values(), *(t.requires_grad_() for t in tensors)]
        expected.append(torch.autograd.grad(loss(state, tensors), wanted, allow_unused=True, materialize_grads=True))
    stacked = {n: torch.stack([state[n].detach() for state in states]) for n in states[0]}
    parameters, tensors = torch.vmap(grad(loss, (0, 1)))(stacked, [torch.stack(t).detach() for t in zip(*samples)])
    torch.testing.assert_close(
        [*parameters.values(), *tensors], [*map(torch.stack, zip(*expected))], rtol=1e-9, atol=1e-9
    )
