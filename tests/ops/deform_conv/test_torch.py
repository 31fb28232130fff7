"""Deformable convolution without kernels: the path of deterministic mode on GPUs and of machines without a binary."""

from __future__ import annotations

import pytest
import torch

from attn_plugins.ops import backend, deform_conv2d
from tests.helpers.operator_checks import relative_error
from tests.ops.deform_conv.operands import GEOMETRIES, make, through_reference


def gradients(function, operands):
    leaves = {n: t.detach().requires_grad_() for n, t in operands.items() if isinstance(t, torch.Tensor)}
    output = function(**{**operands, **leaves})
    return output, *torch.autograd.grad(output, list(leaves.values()), torch.ones_like(output).cumsum(3))


@pytest.mark.parametrize("name", ["torch", "reference"])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_equals_the_reference(geometry, masked, name):
    """The gradient is computed one image at a time."""
    operands = make(GEOMETRIES[geometry], masked=masked)
    with backend(name):
        found = gradients(deform_conv2d, operands)
    for part, whole in zip(found, gradients(through_reference, operands)):
        assert part.shape == whole.shape
        assert relative_error(part, whole) < 1e-12 or whole.numel() == 0


@pytest.mark.parametrize("name", [None, "torch", "reference"])
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])
def test_any_memory_format_with_several_offset_groups(format, name):
    """Forward, gradient and second gradient for a channels-last mask of two offset groups and two images."""
    torch.manual_seed(0)
    x, offset, mask = (torch.randn(2, n, 5, 6, dtype=torch.float64) for n in (4, 2 * 2 * 9, 2 * 9))
    weight = torch.randn(3, 4, 3, 3, dtype=torch.float64)
    expected = through_reference(x, offset, weight, None, (1, 1), (1, 1), (1, 1), mask)
    x, offset, mask = (t.contiguous(memory_format=format).requires_grad_() for t in (x, offset, mask))

    def convolve(x, offset, mask):
        return deform_conv2d(x, offset, weight, padding=1, mask=mask)

    if name is None:
        assert relative_error(convolve(x, offset, mask), expected) < 1e-12
        (first,) = torch.autograd.grad(convolve(x, offset, mask).square().sum(), [mask], create_graph=True)
        assert torch.autograd.grad(first.square().sum(), [x])[0].isfinite().all()
        return
    with backend(name):
        assert relative_error(convolve(x, offset, mask), expected) < 1e-12
        assert torch.autograd.grad(convolve(x, offset, mask).sum(), [mask])[0].shape == mask.shape
