"""Boxes, regions and focal loss of ``maskrcnn_benchmark._C``, beside torchvision and plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor
from torch.autograd.function import once_differentiable

from attn_plugins.extensions import maskrcnn_benchmark as _C

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
ROIS = torch.tensor([[1.0, 2, 1, 9, 12], [0, 0.7, 1.4, 4.3, 2.6], [0, -6, -3, 3, 5], [1, 5, 5, 2, 1]])


def overlap(a: list[float], b: list[float]) -> float:
    """Return the intersection over union of boxes that count their last pixel."""
    sides = [max(0.0, min(a[n + 2], b[n + 2]) - max(a[n], b[n]) + 1) for n in (0, 1)]
    areas = [(box[2] - box[0] + 1) * (box[3] - box[1] + 1) for box in (a, b)]
    return math.prod(sides) / (sum(areas) - math.prod(sides))


@dtypes
@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7])
def test_nms_is_that_of_loops_in_ascending_order(threshold, dtype):
    torch.manual_seed(0)
    corners = torch.rand(60, 2) * 10
    boxes, scores = torch.cat((corners, corners + 10 + torch.rand(60, 2) * 5), 1).to(dtype), torch.rand(60).to(dtype)
    kept: list[int] = []
    for n in scores.argsort(descending=True).tolist():
        if all(overlap(boxes[n].tolist(), boxes[m].tolist()) < threshold for m in kept):
            kept.append(n)
    assert 1 < len(kept) < 60
    assert _C.nms(boxes, scores, threshold).tolist() == sorted(kept)


@dtypes
def test_nms_suppresses_an_overlap_of_the_threshold(dtype):
    """Compiled code compares with >= on CPUs: boxes of 10 x 4 and 10 x 2 pixels overlap by a half."""
    boxes, scores = torch.tensor([[0, 0, 9, 3], [0, 0, 9, 1]], dtype=dtype), torch.tensor([0.4, 0.9], dtype=dtype)
    assert _C.nms(boxes, scores, 0.5).tolist() == [1]
    assert _C.nms(boxes, scores, 0.5001).tolist() == [0, 1]
    assert _C.nms(boxes[:0], scores[:0], 0.5).tolist() == []


class RoIAlign(torch.autograd.Function):
    """The extension behind autograd, as the project puts it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, rois: Tensor) -> Tensor:
        ctx.save_for_backward(rois)
        ctx.shape = input.shape
        return _C.roi_align_forward(input, rois, 0.5, 3, 2, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _C.roi_align_backward(grad, *ctx.saved_tensors, 0.5, 3, 2, *ctx.shape, 2), None


class RoIPool(torch.autograd.Function):
    """The extension behind autograd, as the project puts it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, rois: Tensor) -> Tensor:
        output, argmax = _C.roi_pool_forward(input, rois, 0.5, 3, 2)
        ctx.save_for_backward(input, rois, argmax)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, rois, argmax = ctx.saved_tensors
        return _C.roi_pool_backward(grad, input, rois, argmax, 0.5, 3, 2, *input.shape), None


@dtypes
@pytest.mark.parametrize(
    "layer, define",
    [
        (RoIAlign, lambda x, rois: torchvision.ops.roi_align(x, rois, (3, 2), 0.5, 2, aligned=False)),
        (RoIPool, lambda x, rois: torchvision.ops.roi_pool(x, rois, (3, 2), 0.5)),
    ],
)
def test_region_pooling_equals_torchvision(layer, define, dtype):
    torch.manual_seed(0)
    input, rois = torch.randn(2, 3, 7, 5).to(dtype).requires_grad_(), ROIS.to(dtype)
    output, expected = layer.apply(input, rois), define(input, rois)
    torch.testing.assert_close(output, expected)
    grad = torch.randn_like(output)
    found, wanted = (torch.autograd.grad(result, input, grad) for result in (output, expected))
    torch.testing.assert_close(found, wanted)


def test_wrong_images():
    for pool in (RoIAlign, RoIPool):
        with pytest.raises(ValueError, match="rois must name images from 0 to 0, got 0 to 1"):
            pool.apply(torch.rand(1, 3, 7, 5), ROIS)


class FocalLoss(torch.autograd.Function):
    """The extension behind autograd, as the project puts it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, gamma: float, alpha: float) -> Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.numbers = logits.shape[1], gamma, alpha
        return _C.sigmoid_focalloss_forward(logits, targets, *ctx.numbers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _C.sigmoid_focalloss_backward(*ctx.saved_tensors, grad, *ctx.numbers), None, None, None


@dtypes
@pytest.mark.parametrize("gamma, alpha", [(2.0, 0.25), (0.5, 0.7)])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_focal_loss_is_that_of_its_formula(gamma, alpha, integers, dtype):
    """Equation 5 of the paper; classes count from 1, 0 is the background, -1 is ignored."""
    torch.manual_seed(0)
    logits = (torch.randn(7, 3) * 3).to(dtype).requires_grad_()
    targets = torch.tensor([0, 1, 2, 3, -1, 3, 0], dtype=integers)
    rows = []
    for row, target in zip(logits, targets.tolist()):
        for c, x in enumerate(row, 1):
            p = x.sigmoid() if c == target else (-x).sigmoid()
            weight = alpha if c == target else 1 - alpha
            rows.append(-weight * (1 - p) ** gamma * p.log() if target >= 0 else x * 0)
    losses, expected = FocalLoss.apply(logits, targets, gamma, alpha), torch.stack(rows).view(7, 3)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance)
    grad = torch.rand_like(losses)
    found, wanted = (torch.autograd.grad(result, logits, grad) for result in (losses, expected))
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_confident_logits_have_finite_losses():
    """A wrong logit of x costs x, where the logarithm of 1 - sigmoid(x) would be that of 0."""
    logits = torch.tensor([[50.0, -50.0]], requires_grad=True)
    losses = FocalLoss.apply(logits, torch.tensor([2]), 2.0, 0.25)
    torch.testing.assert_close(losses, torch.tensor([[0.75 * 50, 0.25 * 50]]))
    torch.testing.assert_close(torch.autograd.grad(losses.sum(), logits)[0], torch.tensor([[0.75, -0.25]]))


def test_wrong_logits():
    with pytest.raises(ValueError, match=r"logits must have shape \(N, 4\), got \(2, 3\)"):
        _C.sigmoid_focalloss_forward(torch.rand(2, 3), torch.tensor([0, 1]), 4, 2.0, 0.25)
    with pytest.raises(ValueError, match="targets must hold integers, got torch"):
        _C.sigmoid_focalloss_forward(torch.rand(2, 3), torch.rand(2), 3, 2.0, 0.25)
