"""Modules that are exported or traced with one batch and run with another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attn_plugins import ops
from tests.helpers import module_inputs
from tests.helpers.public_modules import VARIANTS


class Flat(nn.Module):
    """A module as a function of its tensor inputs alone, and the axes of the batch in these."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.module = module_inputs.drawn(VARIANTS[name](), 0.3)
        leaves, self.spec = pytree.tree_flatten(module_inputs.inputs(name))
        self.leaves = leaves
        self.example = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        monkeypatch.setattr(module_inputs, "B", 3)
        others = pytree.tree_leaves(module_inputs.inputs(name, seed=1))
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
    torch.manual_seed(0)
    return Flat(name, monkeypatch).eval().requires_grad_(False)


@pytest.mark.sampled(24, every_value=False)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", VARIANTS)
def test_onnx_from_torchscript_runs_with_another_batch(name, flat, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    file, names = tmp_path / "module.onnx", [f"x{n}" for n in range(len(flat.example))]
    axes = {name: {axis: f"{name}_{axis}" for axis in batch} for name, batch in zip(names, flat.batch)}
    torch.onnx.export(flat, flat.example, file, dynamo=False, input_names=names, dynamic_axes=axes)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    given = {node.name: flat.others[names.index(node.name)].numpy() for node in session.get_inputs()}
    flat.assert_close([*map(torch.from_numpy, session.run(None, given))])


@pytest.mark.sampled(24, every_value=False)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", VARIANTS)
def test_traced_for_another_batch(name, flat):
    flat.assert_close(torch.jit.trace(flat, flat.example, check_trace=False)(*flat.others))


@pytest.mark.sampled(8, every_value=False)
# torch's guards on the sizes of named tuples' fields are no valid Python.
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "GatedBilateralController"])
def test_exported_for_another_batch(name, flat):
    dynamic = tuple(dict.fromkeys(batch, torch.export.Dim.AUTO) for batch in flat.batch)
    program = torch.export.export(flat, flat.example, dynamic_shapes=(dynamic,))
    flat.assert_close(program.module()(*flat.others))


def test_traced_by_the_definitions_there_is_no_operator_of_ours():
    """Such a file loads where this package is not installed, in C++ as well."""
    layer, x = VARIANTS["GeneralizedAttention2d"]().eval().requires_grad_(False), torch.randn(2, 16, 5, 7)
    assert "attn_plugins::" in str(torch.jit.trace(layer, x).inlined_graph)
    with ops.backend("reference"):
        traced = torch.jit.trace(layer, x)
    assert "attn_plugins::" not in str(traced.inlined_graph)
    torch.testing.assert_close(traced(x), layer(x))
