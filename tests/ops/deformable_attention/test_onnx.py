"""TensorRT's plug-in in exported graphs, which are read only: it has not run in TensorRT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_plugins.ops import deformable_attention
from attn_plugins.ops.deformable_attention.onnx import tensorrt_plugin

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.skipif(not hasattr(torch.onnx, "ops"), reason="PyTorch before 2.8 writes no such node")
SHAPES, B, Q, M, K, d = ((6, 4), (3, 2)), 2, 7, 3, 4, 8


class Attend(nn.Module):
    def __init__(self, points: list[int] | None) -> None:
        super().__init__()
        self.points = points

    def forward(self, value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        return deformable_attention(value, SHAPES, locations, weights, self.points)


def export(file: Path, points: list[int] | None = None) -> Any:
    P = (len(SHAPES), K) if points is None else (sum(points),)
    example = torch.rand(B, 30, M, d), torch.rand(B, Q, M, *P, 2), torch.rand(B, Q, M, *P)
    batch = tuple({0: torch.export.Dim.AUTO} for _ in example)
    names = ["value", "locations", "weights"]
    torch.onnx.export(
        Attend(points), example, file, dynamo=True, input_names=names, dynamic_shapes=batch, verbose=False
    )
    return onnx.load(file).graph


@pytest.mark.parametrize("points", [None, pytest.param([K, K], marks=pytest.mark.slow)])
def test_inputs_and_output_are_the_plugins(tmp_path, points):
    with tensorrt_plugin():
        graph = export(tmp_path / "m.onnx", points)
    (node,) = (node for node in graph.node if node.op_type == "MultiscaleDeformableAttnPlugin_TRT")
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert attributes == {"plugin_version": b"1", "plugin_namespace": b""}
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for made in (other for other in graph.node if other.op_type == "Constant"):
        constants[made.output[0]] = onnx.numpy_helper.to_array(made.attribute[0].t)
    shapes, starts = constants[node.input[1]], constants[node.input[2]]
    assert shapes.dtype == starts.dtype == "int32"
    assert (shapes.tolist(), starts.tolist()) == ([[6, 4], [3, 2]], [0, 24])
    infos = {info.name: info for info in (*graph.input, *graph.value_info, *graph.output)}
    ranks = [len(infos[name].type.tensor_type.shape.dim) for name in (node.input[0], *node.input[3:], node.output[0])]
    assert ranks == [4, 6, 5, 4]
    if points is None:
        assert [node.input[n] for n in (0, 3, 4)] == ["value", "locations", "weights"]


@pytest.mark.slow
def test_others_are_exported_as_their_definition(tmp_path):
    with tensorrt_plugin():
        graph = export(tmp_path / "m.onnx", [2, 3])
    assert not any("TRT" in node.op_type for node in (*graph.node, *export(tmp_path / "n.onnx").node))
