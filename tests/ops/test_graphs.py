"""Numbers that users compute from shapes, in graphs: sizes are Tensors while traced and symbols in an export."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attn_plugins import ops
from tests.helpers.slow_cases import slow_but

MAP, SEQUENCE, IMAGE = (1, 2, 6, 8, 4), (1, 2, 6, 8), (1, 2, 6, 8)


def _samples(x: Tensor, shapes: object, points: object = None) -> Tensor:
    """Sample two heads of one channel at one place, which is also the weight of a query."""
    value, axes = x.flatten(2).transpose(1, 2).unsqueeze(-1), (1, 1) if points is None else (1,)
    return ops.deformable_attention(
        value, shapes, x.new_full((1, 2, 2, *axes, 2), 0.4), x.new_ones(1, 2, 2, *axes), points
    )


def _convolved(x: Tensor) -> Tensor:
    one = x.shape[1] - 1
    return ops.deform_conv2d(x, x.new_full((1, 18, 6, 8), 0.3), x.new_ones(2, 2, 3, 3), None, one, (one, 1), one)


def _convolved_sequence(x: Tensor) -> Tensor:
    one = x.shape[1] - 1
    return ops.deform_conv1d(x[:, :, 0], x.new_full((1, 3, 8), 0.3), x.new_ones(2, 2, 3), None, one, one, one)


CASES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "global_attention, scale": (lambda x: ops.global_attention(x, x, x, scale=x.shape[-1] ** -0.5), MAP),
    "criss_cross_attention, scale": (lambda x: ops.criss_cross_attention(x, x, x, scale=x.shape[-1] ** -0.5), MAP),
    "window_attention, scale": (lambda x: ops.window_attention(x, x, x, None, 3, scale=x.shape[-1] ** -0.5), MAP),
    "window_attention, window": (
        lambda x: ops.window_attention(x, x, x, None, (x.shape[-1] - 1, 3), dilation=x.shape[1], stride=x.shape[1],
                                       padding=x.shape[1]), MAP,
    ),
    "sequence_attention, scale": (lambda x: ops.sequence_attention(x, x, x, scale=x.shape[-1] ** -0.5), SEQUENCE),
    "sequence_attention, whole scale": (lambda x: ops.sequence_attention(x, x, x, scale=x.shape[1]), SEQUENCE),
    "sequence_attention, start": (
        lambda x: ops.sequence_attention(x[:, :, -2:], x, x, causal=True, start=x.shape[2] - 2), SEQUENCE,
    ),
    "sequence_attention, outside_logits": (
        lambda x: ops.sequence_attention(x, x, x, band_logits=x[..., :3], outside_logits=-(x.shape[-1] ** 0.5)),
        SEQUENCE,
    ),
    "deform_conv2d, geometry": (_convolved, IMAGE),
    "deform_conv1d, geometry": (_convolved_sequence, IMAGE),
    "deformable_attention, sizes": (lambda x: _samples(x, [(x.shape[2], x.shape[3])]), IMAGE),
    "deformable_attention, a shape": (lambda x: _samples(x, [x.shape[2:]]), IMAGE),
    "deformable_attention, points": (lambda x: _samples(x, [x.shape[2:]], [x.shape[1] - 1]), IMAGE),
    "deformable_attention, one number of points": (lambda x: _samples(x, [x.shape[2:]], x.shape[1] - 1), IMAGE),
}  # fmt: skip


class _Module(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _traced(module: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    return torch.jit.trace(module, x, check_trace=False)


def _exported(module: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    return torch.export.export(module, (x,)).module()


def _exported_for_other_sizes(module: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    axes = dict.fromkeys(range(1, x.dim()), torch.export.Dim.AUTO)
    return torch.export.export(module, (x,), dynamic_shapes=(axes,)).module()


def _compiled(module: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend="eager", dynamic=True)


WAYS = [_traced, _exported, _exported_for_other_sizes, _compiled]
EVERY = list(itertools.product(CASES, WAYS))
# Of each operator, one case in every way; the others as Tensors and as symbols.
FIRST = {case.partition(",")[0]: case for case in reversed(CASES)}.values()
QUICK = [(case, way) for case, way in EVERY if case in FIRST or way in (_traced, _exported_for_other_sizes)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case, way", slow_but(QUICK, EVERY))
def test_numbers_come_from_shapes(case, way):
    function, shape = CASES[case]
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(way(_Module(function), x)(x), function(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_numbers_come_from_shapes_in_onnx_from_torchscript(case, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    function, shape = CASES[case]
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    file = tmp_path / "module.onnx"
    torch.onnx.export(_Module(function), (x,), file, dynamo=False, input_names=["x"], opset_version=19)
    (output,) = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), function(x), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function, words", [
    (lambda x, learned: ops.sequence_attention(x, x, x, scale=learned), "^scale must be a number, got Parameter"),
    (lambda x, _: ops.sequence_attention(x, x, x, scale=x.mean((0, 1))), "^scale must be a number, got Tensor"),
    (lambda x, _: ops.window_attention(x, x, x, None, x.shape[3] / 2), "^kernel_size must be an int or 1 ints"),
], ids=["a parameter", "several numbers", "not whole"])  # fmt: skip
def test_other_tensors_are_refused_in_a_trace_as_well(function, words):
    learned = nn.Parameter(torch.ones(()))
    with pytest.raises((TypeError, ValueError), match=words):
        torch.jit.trace(lambda x: function(x, learned), torch.rand(SEQUENCE), check_trace=False)
