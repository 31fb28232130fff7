"""The extensions of Deformable DETR and Grounding DINO, beside ``grid_sample``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from attn_plugins.extensions import ms_deform_attn

SHAPES = torch.tensor([[6, 4], [3, 2], [1, 5]])
STARTS = torch.tensor([0, 24, 30])
B, Q, M, K = 2, 7, 3, 4


def operands(d: int = 5, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return values, locations, some beyond the maps, and weights."""
    torch.manual_seed(0)
    value, locations = torch.randn(B, 35, M, d), torch.rand(B, Q, M, 3, K, 2) * 1.4 - 0.2
    return [t.to(dtype) for t in (value, locations, torch.randn(B, Q, M, 3 * K).softmax(-1).view(B, Q, M, 3, K))]


class Attend(torch.autograd.Function):
    """The extension behind autograd, as the projects put it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(value, locations, weights)
        return ms_deform_attn.ms_deform_attn_forward(value, SHAPES, STARTS, locations, weights, 64)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        value, locations, weights = ctx.saved_tensors
        found = ms_deform_attn.ms_deform_attn_backward(value, SHAPES, STARTS, locations, weights, grad, 64)
        return tuple(found)


def by_grid_sample(value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    """Sum the samples of every level, one head after another."""
    heads = []
    for m in range(M):
        total = torch.zeros(())
        for level, (part, (H, W)) in enumerate(zip(value[:, :, m].split(SHAPES.prod(1).tolist(), 1), SHAPES.tolist())):
            picture = part.transpose(1, 2).unflatten(2, (H, W))
            samples = F.grid_sample(picture, 2 * locations[:, :, m, level] - 1, align_corners=False)  # (B, d, Q, K)
            total = total + (samples * weights[:, None, :, m, level]).sum(-1)
        heads.append(total.transpose(1, 2))
    return torch.cat(heads, 2)


@pytest.mark.parametrize("d", [1, 5, 32])
def test_values_and_gradients_are_those_of_grid_sample(d):
    leaves = [t.requires_grad_() for t in operands(d)]
    output, expected = Attend.apply(*leaves), by_grid_sample(*leaves)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    grad = torch.randn_like(output)
    for found, wanted in zip(torch.autograd.grad(output, leaves, grad), torch.autograd.grad(expected, leaves, grad)):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("d", [2, 30, 32, 64, 71, 1025, 2048, 3096])  # from 30 on those of Deformable DETR's test
def test_numerical_gradients(d):
    """Wide heads are checked in a random direction: at 3096, the matrices of all derivatives would take 37 GB."""
    leaves = [t.requires_grad_() for t in operands(d)]
    assert torch.autograd.gradcheck(Attend.apply, leaves, fast_mode=d > 2)


def test_layouts_and_autocast_change_nothing():
    """A compiled function knows no autocast: float32 operands are computed in float32."""
    given = operands(dtype=torch.float32)
    expected = Attend.apply(*given)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(Attend.apply(*given), expected, rtol=0, atol=0)
    strided = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in given]
    torch.testing.assert_close(Attend.apply(*strided), expected)


def test_half_precision_and_wrong_shapes():
    exact, half = operands(), operands(dtype=torch.bfloat16)
    assert Attend.apply(*half).dtype == torch.bfloat16
    torch.testing.assert_close(Attend.apply(*half).double(), by_grid_sample(*exact), rtol=0.1, atol=0.1)
    with pytest.raises(ValueError, match="spatial_shapes must have as many pixels as value has keys, 34"):
        Attend.apply(exact[0][:, 1:], *exact[1:])


class Model(torch.nn.Module):
    """The extension within a model."""

    def forward(self, value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        return Attend.apply(value, locations, weights)


@pytest.mark.slow
def test_onnx_runtime_computes_the_same(tmp_path):
    """With ``dynamo=False``, a function of autograd needs a ``symbolic``, as behind a compiled extension."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install '.[onnx]'")
    given = operands(8, torch.float32)
    torch.onnx.export(Model(), tuple(given), tmp_path / "m.onnx", dynamo=True, input_names=["v", "l", "w"])
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    (found,) = session.run(None, dict(zip("vlw", (t.numpy() for t in given))))
    torch.testing.assert_close(torch.from_numpy(found), Attend.apply(*given), rtol=1e-4, atol=1e-5)
