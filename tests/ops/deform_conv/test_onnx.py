"""Deformable convolution in ONNX: the node ``DeformConv`` since opset 19, the definition before, both exporters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_plugins import ops
from tests.helpers.slow_cases import slow_but
from tests.ops.contract_examples import Example
from tests.ops.deform_conv.operands import ALL, GEOMETRIES, drawn
from tests.ops.test_contract_backends import SINGLE

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.filterwarnings("ignore")
EXPORTERS = [pytest.param(False, id="torchscript"), pytest.param(True, id="dynamo", marks=pytest.mark.slow)]


class Layer(nn.Module):
    """A call whose weight and bias are parameters and whose maps are inputs."""

    def __init__(self, some: Example) -> None:
        super().__init__()
        self.call = some.call
        for name in {"weight", "bias"} & some.tensors.keys():
            self.register_parameter(name, nn.Parameter(some.tensors[name]))

    def forward(self, *maps: Tensor) -> Tensor:
        return self.call(**dict(zip(("input", "offset", "mask"), maps)), **dict(self.named_parameters()))


def maps(some: Example) -> tuple[Tensor, ...]:
    return tuple(some.tensors[name] for name in ("input", "offset", "mask") if name in some.tensors)


def export(layer: nn.Module, example: tuple[Tensor, ...], file: Path, dynamo: bool, opset: int | None = 19) -> None:
    """Export with the batch and the size of every map open."""
    names, axes = ["input", "offset", "mask"][: len(example)], (0, 2, 3)
    dynamic: dict[str, Any] = dict(dynamic_axes={n: {a: f"{n}{a}" for a in axes} for n in names})
    if dynamo:
        dynamic = dict(
            dynamic_shapes=(tuple(dict.fromkeys(axes, torch.export.Dim.AUTO) for _ in names),), verbose=False
        )
    torch.onnx.export(
        layer.eval(), example, file, dynamo=dynamo, input_names=names, opset_version=opset, **dynamic
    )  # fmt: skip


def run(file: Path, given: tuple[Tensor, ...]) -> Tensor:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {node.name: t.numpy() for node, t in zip(session.get_inputs(), given, strict=True)})
    return torch.from_numpy(output)


def types(file: Path) -> list[str]:
    return [node.op_type for node in onnx.load(file).graph.node]


CASES = [
    *((name, ALL, SINGLE) for name in list(GEOMETRIES)[:5]),
    *(("wide", f"input offset weight {more}", SINGLE) for more in ("bias", "mask", "")),
    ("wide", ALL, torch.float64),
]
EXPORTED = [(*case, dynamo) for case in CASES for dynamo in (False, True)]


@pytest.mark.parametrize(
    "name, names, dtype, dynamo",
    slow_but([case for case in EXPORTED if not case[-1] or case == ("wide", ALL, SINGLE, True)], EXPORTED),
    ids=str,
)
def test_onnx_runtime_gives_the_same_for_another_batch_and_size(name, names, dtype, dynamo, tmp_path):
    some, (H, W) = drawn(name, dtype, names=names), GEOMETRIES[name]["map"]
    layer, file = Layer(some), tmp_path / "layer.onnx"
    export(layer, maps(some), file, dynamo)
    assert types(file) == ["DeformConv"]
    others = maps(drawn(name, dtype, names=names, B=4, map=(H + 4, W + 3)))
    torch.testing.assert_close(run(file, others), layer(*others).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "opset, dynamo",
    slow_but(
        [(18, False), (20, False), (None, False), (None, True)],
        [(opset, dynamo) for opset in (18, None, 20) for dynamo in (False, True)],
    ),
)
def test_older_opsets_get_the_definition(opset, dynamo, tmp_path):
    """``dynamo=False`` writes opset 20 at most; None is the exporter's default."""
    some = drawn("wide", SINGLE)
    layer, file = Layer(some), tmp_path / "layer.onnx"
    export(layer, maps(some), file, dynamo, opset)
    (version,) = (entry.version for entry in onnx.load(file).opset_import if entry.domain == "")
    assert ("DeformConv" in types(file)) == (version >= 19)
    assert opset in (None, version)
    torch.testing.assert_close(run(file, maps(some)), layer(*maps(some)).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("opset", [pytest.param(22, marks=pytest.mark.slow), 23])
def test_opsets_22_and_23_have_one_node(opset, tmp_path):
    some = drawn("wide", SINGLE)
    layer, file = Layer(some), tmp_path / "layer.onnx"
    export(layer, maps(some), file, True, opset)
    assert types(file) == ["DeformConv"]
    torch.testing.assert_close(run(file, maps(some)), layer(*maps(some)).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dynamo", EXPORTERS)
def test_half_precision_keeps_positions_in_float32(dynamo, tmp_path):
    some = drawn("wide", torch.float16)
    layer, file = Layer(some), tmp_path / "layer.onnx"
    export(layer, maps(some), file, dynamo)
    assert "DeformConv" in types(file)
    torch.testing.assert_close(run(file, maps(some)), layer(*maps(some)).detach(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dynamo", EXPORTERS)
def test_reference_is_exported_as_operations(dynamo, tmp_path):
    some, file = drawn("wide", SINGLE), tmp_path / "layer.onnx"
    with ops.backend("reference"):
        export(Layer(some), maps(some), file, dynamo)
    assert "DeformConv" not in types(file)


@pytest.mark.parametrize("dynamo", EXPORTERS)
def test_deform_conv1d_becomes_the_node(dynamo, tmp_path):
    class Sequence(nn.Module):
        def forward(self, input: Tensor, offset: Tensor, weight: Tensor) -> Tensor:
            return ops.deform_conv1d(input, offset, weight, padding=1)

    torch.manual_seed(0)
    given, file = (torch.randn(2, 4, 9), torch.randn(2, 6, 9), torch.randn(6, 2, 3)), tmp_path / "layer.onnx"
    torch.onnx.export(Sequence().eval(), given, file, dynamo=dynamo, opset_version=19)
    assert "DeformConv" in types(file)
    torch.testing.assert_close(run(file, given), ops.deform_conv1d(*given, padding=1), rtol=1e-5, atol=1e-5)
