"""Deformable position-sensitive RoI pooling behind functions of autograd, beside loops over bins and samples."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attn_plugins.extensions import dcnv2, maskrcnn_benchmark, psroi_pooling
from attn_plugins.extensions.psroi_pooling import Bins
from tests.helpers.slow_cases import slow_but

BINS = {
    "plain": Bins(True, 0.5, 3, 1, 2, 2, 2, 0.0),
    "moved": Bins(False, 0.5, 4, 1, 3, 3, 2, 0.2),
    "classes, fewer parts": Bins(False, 1.0, 4, 1, 4, 2, 3, 0.1),
    "groups": Bins(True, 0.25, 2, 3, 3, 3, 1, 0.0),
    "groups of several bins": Bins(False, 0.5, 2, 2, 5, 3, 2, 0.3),
}
every = pytest.mark.parametrize("bins", BINS.values(), ids=BINS)
ROIS = [[1, 2, 1, 9, 12], [0, 0.5, 1.5, 4.5, 2.5], [0, -6, -3, 3, 5], [1, 5, 5, 2, 1], [0, 30, 30, 40, 40]]


def operands(bins: Bins, dtype: torch.dtype) -> list[Tensor]:
    """Return maps, regions and offsets; some regions are partly beyond the map, or without area, or outside."""
    torch.manual_seed(0)
    classes = 2 if bins.output_dim == 4 else 1
    input = torch.randn(2, bins.output_dim * bins.group_size**2, 7, 5)
    offset = torch.randn(len(ROIS), 2 * classes, bins.part_size, bins.part_size)
    return [input.to(dtype).requires_grad_(), torch.tensor(ROIS).to(dtype), offset.to(dtype).requires_grad_()]


def rounded(value: float) -> int:
    """Round halves away from 0, as C does."""
    return math.floor(abs(value) + 0.5) * (1 if value > 0 else -1)


def by_loops(bins: Bins, input: Tensor, rois: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Compute averages and counts one sample at a time."""
    (H, W), P, G, S = input.shape[2:], bins.pooled_size, bins.group_size, bins.sample_per_part
    classes = 1 if bins.no_trans else offset.shape[1] // 2
    averages, counts = [], []
    for r, o, i, j in product(range(len(rois)), range(bins.output_dim), range(P), range(P)):
        image, *corners = rois[r].tolist()
        left, top, right, bottom = (
            (rounded(corner) + (n > 1)) * bins.spatial_scale - 0.5 for n, corner in enumerate(corners)
        )
        width, height = max(right - left, 0.1), max(bottom - top, 0.1)
        part = i * bins.part_size // P, j * bins.part_size // P
        n = 2 * (o // (bins.output_dim // classes))
        move_x, move_y = (0.0, 0.0) if bins.no_trans else (bins.trans_std * offset[(r, n + a, *part)] for a in (0, 1))
        plane = input[int(image), (o * G + i * G // P) * G + j * G // P]
        total, count = input.new_zeros(()), 0
        for k, m in product(range(S), range(S)):
            y = torch.as_tensor(top + (i + k / S) * height / P + move_y * height, dtype=input.dtype)
            x = torch.as_tensor(left + (j + m / S) * width / P + move_x * width, dtype=input.dtype)
            if not (-0.5 <= x <= W - 0.5 and -0.5 <= y <= H - 0.5):
                continue
            count += 1
            y, x = y.clamp(0, H - 1), x.clamp(0, W - 1)
            rows, columns = ({math.floor(at), math.ceil(at)} for at in (y.item(), x.item()))
            for row, column in product(rows, columns):
                total = total + plane[row, column] * (1 - (y - row).abs()) * (1 - (x - column).abs())
        averages.append(total / max(count, 1))
        counts.append(count)
    shape = len(rois), bins.output_dim, P, P
    return torch.stack(averages).view(shape), torch.tensor(counts).view(shape).to(input.dtype)


class DCNv2Pooling(torch.autograd.Function):
    """``_ext`` as ``dcn_v2.py`` calls it."""

    @staticmethod
    def forward(ctx: Any, bins: Bins, input: Tensor, rois: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        ctx.bins = int(bins.no_trans), *bins[1:]
        output, count = dcnv2.dcn_v2_psroi_pooling_forward(input, rois, offset, *ctx.bins)
        ctx.save_for_backward(input, rois, offset, count)
        ctx.mark_non_differentiable(count)
        return output, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        of_input, of_offset = dcnv2.dcn_v2_psroi_pooling_backward(grad, *ctx.saved_tensors, *ctx.bins)
        return None, of_input, None, of_offset


class DeformRoIPooling(torch.autograd.Function):
    """The layer of mmdetection and maskrcnn-benchmark."""

    @staticmethod
    def forward(ctx: Any, functions: Any, bins: Bins, input: Tensor, rois: Tensor, offset: Tensor) -> Any:
        ctx.bins, ctx.functions = bins, functions
        shape = len(rois), bins.output_dim, bins.pooled_size, bins.pooled_size
        output, count = input.new_empty(shape), input.new_empty(shape)
        functions[0](input, rois, offset, output, count, *bins)
        ctx.save_for_backward(input, rois, offset)
        ctx.count = count
        ctx.mark_non_differentiable(count)
        return output, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        input, _, offset = ctx.saved_tensors
        of_input, of_offset = torch.zeros_like(input), torch.zeros_like(offset)
        ctx.functions[1](grad, *ctx.saved_tensors, ctx.count, of_input, of_offset, *ctx.bins)
        return None, None, of_input, None, of_offset


def deform_roi_pooling(module: Any, infix: str = "") -> Any:
    functions = [getattr(module, f"deform_psroi_pooling{infix}_{way}") for way in ("forward", "backward")]
    return lambda *operands: DeformRoIPooling.apply(functions, *operands)


LAYERS = {
    "deform_pool_ext": deform_roi_pooling(psroi_pooling),
    "deform_pool_cuda": deform_roi_pooling(psroi_pooling, "_cuda"),
    "maskrcnn_benchmark": deform_roi_pooling(maskrcnn_benchmark),
}


EVERY = [(name, dtype) for name in BINS for dtype in (torch.float32, torch.float64)]
QUICK = [case for case in EVERY if case[0] in ("plain", "moved") or case[1] == torch.float64]


@pytest.mark.parametrize("name, dtype", slow_but(QUICK, EVERY), ids=str)
def test_averages_counts_and_gradients_are_those_of_loops(name, dtype):
    bins = BINS[name]
    input, rois, offset = operands(bins, dtype)
    if bins.no_trans:
        offset = input.detach().new_empty(0)  # as the layers pass it
    output, count = DCNv2Pooling.apply(bins, input, rois, offset)
    wanted, numbers = by_loops(bins, input, rois, offset)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(count, numbers)
    assert count[:4].any()
    assert not count[4].any()
    torch.testing.assert_close(output, wanted, rtol=tolerance, atol=tolerance)
    leaves, grad = [input, offset][: 1 if bins.no_trans else 2], torch.randn_like(output)
    found, exact = (torch.autograd.grad(result, leaves, grad) for result in (output, wanted))
    torch.testing.assert_close(found, exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", LAYERS)
@every
def test_other_layers_are_the_same(bins, name):
    input, rois, offset = operands(bins, torch.float64)
    outcomes = []
    for layer in (LAYERS[name], DCNv2Pooling.apply):
        output, count = layer(bins, input, rois, offset)
        leaves = [input, offset][: 1 if bins.no_trans else 2]
        outcomes.append([output, count, *torch.autograd.grad(output.square().sum(), leaves)])
    torch.testing.assert_close(*outcomes)


def test_blocks_of_regions_change_nothing(monkeypatch):
    bins = BINS["moved"]
    given = operands(bins, torch.float64)
    results = []
    for block in (1 << 24, 1):
        monkeypatch.setattr(psroi_pooling, "BLOCK", block)
        output, _ = DCNv2Pooling.apply(bins, *given)
        results.append([output, *torch.autograd.grad(output.square().sum(), [given[0], given[2]])])
    torch.testing.assert_close(results[1], results[0])


def test_more_offsets_than_regions():
    """DCNv2's own test passes them; those that are left over have a gradient of 0."""
    bins = BINS["moved"]
    input, rois, offset = operands(bins, torch.float64)
    output, _ = DCNv2Pooling.apply(bins, input, rois[:2], offset)
    (grad,) = torch.autograd.grad(output.sum(), offset)
    wanted, _ = DCNv2Pooling.apply(bins, input, rois[:2], offset[:2])
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(grad, torch.autograd.grad(wanted.sum(), offset)[0])
    assert grad[:2].any()
    assert not grad[2:].any()


def test_no_regions():
    bins = BINS["moved"]
    input, rois, offset = operands(bins, torch.float32)
    none = offset.detach()[:0].requires_grad_()
    output, _ = DCNv2Pooling.apply(bins, input, rois[:0], none)
    assert output.shape == (0, 4, 3, 3)
    grads = torch.autograd.grad(output.sum(), [input, none])
    assert not grads[0].any()
    assert grads[1].shape == none.shape


def test_wrong_arguments():
    bins = BINS["moved"]
    input, rois, offset = (t.detach() for t in operands(bins, torch.float32))
    forward = dcnv2.dcn_v2_psroi_pooling_forward
    with pytest.raises(ValueError, match=r"input must have shape \(B, 16, H, W\), got \(2, 4, 7, 5\)"):
        forward(input, rois, offset, *bins._replace(group_size=2))
    with pytest.raises(ValueError, match=r"offset must have shape \(5, 2 \* K, 2, 2\), got \(5, 4, 3, 3\)"):
        forward(input, rois, offset, *bins._replace(part_size=2))
    with pytest.raises(ValueError, match="offset must have 2 \\* K channels, where K divides output_dim 4, got 3"):
        forward(input, rois, offset[:, :3], *bins)
    with pytest.raises(ValueError, match="rois must name images from 0 to 0, got 0 to 1"):
        forward(input[:1], rois, offset, *bins)
    with pytest.raises(TypeError, match=r"the numbers must be no_trans, spatial_scale, .*, got"):
        forward(input, rois, offset, *bins[:7])
