"""ONNX export of mmcv's functions on the stand-in: the nodes of their ``symbolic``, which mmdeploy needs."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import onnx
import pytest
import torch
from mmcv import ops
from torch import Tensor

from tests.mm.mmcv_ext_helpers import stand_in  # noqa: F401 - a fixture
from tests.mm.test_mmcv_ext import random_boxes

pytestmark = pytest.mark.usefixtures("stand_in")


class Calls(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def exported(function: Callable[..., Any], *inputs: Tensor) -> dict[str, dict[str, Any]]:
    """Return the attributes of the nodes of the ONNX graph, by ``domain::type``."""
    file = io.BytesIO()
    torch.onnx.export(Calls(function), inputs, file, dynamo=False, opset_version=16)
    nodes = onnx.load_from_string(file.getvalue()).graph.node
    value = onnx.helper.get_attribute_value
    return {f"{n.domain}::{n.op_type}": {a.name: value(a) for a in n.attribute} for n in nodes}


MAP, ROIS = torch.rand(2, 3, 9, 12), torch.tensor([[0, 3.0, 5, 21, 30], [1, 0, 0, 9, 9]])
DEFORM = torch.rand(2, 8, 5, 9), torch.rand(2, 36, 3, 5), torch.rand(4, 4, 3, 3)
CARAFE, REGIONS = (torch.rand(2, 4, 3, 4), torch.rand(2, 9, 6, 8)), ((3, 2), 0.25)
# By autograd.Function: a call, its inputs, and the node of its ``symbolic`` with some of its attributes.
NODES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str, dict[str, Any]]] = {
    "DeformConv2dFunction": (
        lambda x, offset, weight: ops.deform_conv2d(x, offset, weight, 2, 1, 1, 2, 2),
        DEFORM,
        "mmcv::MMCVDeformConv2d",
        dict(stride=2, padding=1, dilation=1, groups=2, deform_groups=2),
    ),
    "ModulatedDeformConv2dFunction": (
        lambda x, offset, weight, mask: ops.modulated_deform_conv2d(x, offset, mask, weight, None, 2, 1, 1, 2, 2),
        (*DEFORM, torch.rand(2, 18, 3, 5)),
        "mmcv::MMCVModulatedDeformConv2d",
        dict(stride=2, groups=2),
    ),
    "CARAFEFunction": (lambda *x: ops.carafe(*x, 3, 1, 2), CARAFE, "mmcv::MMCVCARAFE", dict(kernel_size=3)),
    "CARAFENaiveFunction": (lambda *x: ops.carafe_naive(*x, 3, 1, 2), CARAFE, "mmcv::MMCVCARAFENaive", {}),
    "PSAMaskFunction": (
        lambda x: ops.psa_mask.psa_mask(x, 0, (3, 5)), (torch.rand(2, 15, 4, 5),), "mmcv::MMCVPSAMask", {}
    ),
    "DeformRoIPoolFunction": (
        lambda x, rois, offset: ops.deform_roi_pool(x, rois, offset, *REGIONS, 2, 0.5),
        (MAP, ROIS, torch.rand(2, 2, 3, 2)),
        "mmcv::MMCVDeformRoIPool",
        dict(pooled_height=3, pooled_width=2, gamma=0.5),
    ),
    "MaskedConv2dFunction": (
        lambda *x: ops.masked_conv2d(*x, 1),
        (torch.rand(1, 3, 5, 6), torch.rand(1, 5, 6), torch.rand(2, 3, 3, 3), torch.rand(2)),
        "mmcv::MMCVMaskedConv2d",
        dict(padding=1),
    ),
    "SoftNMSop": (
        lambda *x: ops.soft_nms(*x, 0.5, 0.5, 0.125),
        (random_boxes(9), torch.rand(9)),
        "mmcv::SoftNonMaxSuppression",
        dict(min_score=0.125),
    ),
    "RoIPoolFunction": (lambda *x: ops.roi_pool(*x, *REGIONS), (MAP, ROIS), "::MaxRoiPool", dict(pooled_shape=[3, 2])),
    "RoIAlignFunction": (
        lambda *x: ops.roi_align(*x, *REGIONS, 2, "max", False), (MAP, ROIS), "::RoiAlign", dict(mode=b"max")
    ),
}  # fmt: skip
NOT_OFFERED = {"BorderAlignFunction", "PrRoIPoolFunction", "RoIAlignRotatedFunction", "RotatedFeatureAlignFunction"}
INVALID = {"SyncBatchNormFunction"}  # mmcv's symbolic names an attribute without its type


@pytest.mark.parametrize("name", NODES)
def test_exports_the_node_of_the_symbolic(name: str) -> None:
    call, inputs, node, attributes = NODES[name]
    nodes = exported(call, *inputs)
    assert nodes[node].items() >= attributes.items()
    assert not torch.jit.is_tracing()


def test_every_symbolic_is_tested() -> None:
    modules = [module for name, module in sys.modules.items() if name.startswith("mmcv.ops.")]
    functions = {v for m in modules for v in vars(m).values() if isinstance(v, type) and hasattr(v, "symbolic")}
    assert {function.__name__ for function in functions} == NODES.keys() | NOT_OFFERED | INVALID


def test_a_symbolic_from_outside_is_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """mmdeploy adds symbolics to functions of mmcv that have none."""
    function = ops.multi_scale_deform_attn.MultiScaleDeformableAttnFunction
    node = lambda g, value, shapes, starts, places, weights, step: g.op("mmdeploy::MSDA", value, places, step_i=step)  # noqa: E731
    monkeypatch.setattr(function, "symbolic", staticmethod(node), raising=False)
    shapes, starts = torch.tensor([[3, 4], [2, 3]]), torch.tensor([0, 12])
    inputs = torch.rand(2, 18, 2, 4), torch.rand(2, 5, 2, 2, 3, 2), torch.rand(2, 5, 2, 2, 3)
    nodes = exported(lambda value, *rest: function.apply(value, shapes, starts, *rest, 64), *inputs)
    assert nodes == {"mmdeploy::MSDA": dict(step=64)}


def test_functions_without_a_symbolic_are_recorded() -> None:
    """Compiled ones are not: a traced model would return the boxes and overlaps of its example."""
    boxes, scores, others = random_boxes(9), torch.rand(9), random_boxes(9)
    traced = torch.jit.trace(Calls(ops.bbox_overlaps), (boxes, others))
    torch.testing.assert_close(traced(others, boxes), ops.bbox_overlaps(others, boxes))

    class Kept(torch.nn.Module):
        def forward(self, boxes: Tensor, scores: Tensor) -> Tensor:
            return ops.nms(boxes, scores, 0.3)[1]

    file, names = io.BytesIO(), ["boxes", "scores"]
    torch.onnx.export(Kept(), (boxes, scores), file, dynamo=False, opset_version=16, input_names=names,
                      dynamic_axes={name: {0: "N"} for name in names})  # fmt: skip
    boxes, scores = random_boxes(60), torch.rand(60)
    session = pytest.importorskip("onnxruntime").InferenceSession(file.getvalue())
    (kept,) = session.run(None, dict(boxes=boxes.numpy(), scores=scores.numpy()))
    assert kept.tolist() == ops.nms(boxes, scores, 0.3)[1].tolist()


def test_tracing_goes_on_after_an_error() -> None:
    def call(x: Tensor, offset: Tensor, weight: Tensor) -> Tensor:
        with pytest.raises(ValueError, match="offset must have 36 channels"):
            ops.deform_conv2d(x, offset[:, :18], weight, 2, 1, 1, 2, 2)
        return x + 1

    graph = torch.jit.trace(Calls(call), DEFORM, check_trace=False).graph
    assert [node.kind() for node in graph.nodes()][-1] == "aten::add"
