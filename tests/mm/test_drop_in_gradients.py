"""The gradients of the drop-in's deformable convolutions are mmcv's, also where a sample lies on the map's edge."""

from __future__ import annotations

import pytest
import torch
from mmcv.ops import deform_conv2d, modulated_deform_conv2d
from torch import Tensor

from attn_plugins import ops
from attn_plugins.mmcv.edge_rule import without_edge_gradients
from tests.mm.drop_in_helpers import STOCK, drop_in

# (B, C, H, W, C_out, kernel, stride, padding, dilation, groups, offset groups)
GEOMETRIES = {
    "padding": (2, 4, 5, 7, 4, 3, 1, 1, 1, 1, 1),
    "groups": (2, 8, 5, 6, 4, 3, 1, 1, 1, 2, 4),
    "stride and dilation": (1, 6, 11, 8, 3, 3, 2, 2, 2, 3, 2),
    "even kernel": (1, 2, 4, 5, 3, 2, 1, 1, 1, 1, 1),
    "wide padding": (1, 2, 4, 5, 3, 3, 1, 3, 1, 1, 1),
}
OFFSETS = {
    "zero": torch.zeros,
    "whole": lambda *shape: torch.randint(-3, 4, shape),  # onto pixels, -1, H and W, and beyond
    "random": lambda *shape: 2 * torch.randn(shape),
}


def operands(name: str, offsets: str) -> tuple[list[Tensor], Tensor]:
    """Input, offset, weight, mask and bias, and the gradient of the output, in float64."""
    B, C, H, W, C_out, K, stride, padding, dilation, groups, D = GEOMETRIES[name]
    torch.manual_seed(0)
    size = [(n + 2 * padding - dilation * (K - 1) - 1) // stride + 1 for n in (H, W)]
    leaves = [
        torch.randn(B, C, H, W),
        OFFSETS[offsets](B, 2 * D * K * K, *size),
        torch.randn(C_out, C // groups, K, K),
        torch.rand(B, D * K * K, *size),
        torch.randn(C_out),
    ]
    return [leaf.double().requires_grad_() for leaf in leaves], torch.randn(B, C_out, *size).double()


@pytest.mark.parametrize("modulated", [True, False])
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_gradients_equal_those_of_mmcvs_operator(name, offsets, modulated):
    _, _, _, _, _, K, stride, padding, dilation, groups, D = GEOMETRIES[name]
    (input, offset, weight, mask, bias), grad = operands(name, offsets)
    settled = without_edge_gradients(offset, (K, K), *[(n, n) for n in (stride, padding, dilation)])
    assert torch.equal(settled, offset)
    if modulated:
        leaves = [input, offset, weight, mask, bias]
        theirs = modulated_deform_conv2d(input, offset, mask, weight, bias, stride, padding, dilation, groups, D)
        ours = ops.deform_conv2d(input, settled, weight, bias, stride, padding, dilation, mask)
    else:
        leaves = [input, offset, weight]
        theirs = deform_conv2d(input, offset, weight, stride, padding, dilation, groups, D)
        ours = ops.deform_conv2d(input, settled, weight, None, stride, padding, dilation)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(torch.autograd.grad(ours, leaves, grad), torch.autograd.grad(theirs, leaves, grad)):
        torch.testing.assert_close(a, b)


def test_the_operator_itself_has_torchvisions_rule():
    (input, offset, weight, _, _), grad = operands("padding", "zero")
    rule = without_edge_gradients(offset, (3, 3), (1, 1), (1, 1), (1, 1))
    (stock,) = torch.autograd.grad(ops.deform_conv2d(input, offset, weight, padding=1), offset, grad)
    (edge,) = torch.autograd.grad(ops.deform_conv2d(input, rule, weight, padding=1), offset, grad)
    changed = (stock != edge).unflatten(1, (3, 3, 2))
    assert changed[:, 0, 1, 0, 0].all()  # the row's offset of taps above the map
    assert changed[:, 1, 0, 1, :, 0].all()  # the column's offset of taps left of it
    changed[:, 0, :, 0, 0] = changed[:, :, 0, 1, :, 0] = False
    assert not changed.any()
    torchvision = pytest.importorskip("torchvision.ops")
    (theirs,) = torch.autograd.grad(torchvision.deform_conv2d(input, offset, weight, padding=1), offset, grad)
    torch.testing.assert_close(stock, theirs)


def test_positions_are_rounded_as_the_kernels_round_them():
    """An offset too small to move a sample from -1 leaves it there, in float32 and for half offsets in float32."""
    for dtype, tiny, moves in (
        (torch.float32, 1e-9, False), (torch.float32, 1e-6, True), (torch.float64, 1e-9, True),
        (torch.bfloat16, 1e-3, True),
    ):  # fmt: skip
        offset = torch.full((1, 18, 4, 4), tiny, dtype=dtype).requires_grad_()
        settled = without_edge_gradients(offset, (3, 3), (1, 1), (1, 1), (1, 1))
        (grad,) = torch.autograd.grad(settled.sum(), offset)
        assert bool(grad.bool().all()) == moves, (dtype, tiny)


def test_second_gradients_and_compilation():
    (input, offset, weight, mask, bias), _ = operands("even kernel", "random")
    offset = torch.where(torch.rand(offset.shape) < 0.3, 0, offset).detach().requires_grad_()
    geometry = [(2, 2), (1, 1), (1, 1), (1, 1)]

    def convolve(input, offset, weight, mask):
        settled = without_edge_gradients(offset, *geometry)
        return ops.deform_conv2d(input, settled, weight, bias, padding=1, mask=mask)

    leaves = (input, offset, weight, mask)
    expected = convolve(*leaves)
    compiled = torch.compile(convolve, backend="aot_eager", fullgraph=True)(*leaves)
    torch.testing.assert_close(compiled, expected)
    expected, compiled = (
        torch.autograd.grad(y.square().sum(), leaves, create_graph=True) for y in (expected, compiled)
    )
    torch.testing.assert_close(compiled, expected)
    # What no gradient reaches: the slope of an edge's offset is the constant 0.
    on_edge = torch.autograd.grad(without_edge_gradients(offset, *geometry).sum(), offset)[0] == 0
    assert on_edge.any()
    assert (expected[1][on_edge] == 0).all()
    (second,) = torch.autograd.grad(expected[2].sum(), offset)
    assert (second[on_edge] == 0).all()
    assert second.isfinite().all()
    torch._dynamo.reset()


@pytest.mark.parametrize("options", [dict(), dict(stride=2, groups=2), dict(dilation=2, padding=2, deform_groups=2)])
@pytest.mark.parametrize("start", ["as made", "whole offsets", "trained"])
@pytest.mark.parametrize("name", ["DCN", "DCNv2"])
def test_a_layers_gradients_equal_mmcvs(name, start, options):
    torch.manual_seed(0)
    options = {"padding": 1, **options}
    stock = STOCK[name](4, 6, 3, **options).double()
    if start != "as made":
        torch.nn.init.normal_(stock.conv_offset.bias)
    if start == "whole offsets":
        stock.conv_offset.bias.data.round_()
    if start == "trained":
        torch.nn.init.normal_(stock.conv_offset.weight, std=0.3)
    ours = drop_in.REPLACEMENTS[name](4, 6, 3, **options).double()
    ours.load_state_dict(stock.state_dict(), strict=True)
    x = torch.randn(2, 4, 9, 12).double()
    grad = torch.randn_like(stock(x))
    found = []
    for layer in (ours, stock):
        input = x.clone().requires_grad_()
        output = layer(input)
        found.append([output, *torch.autograd.grad(output, [input, *layer.parameters()], grad)])
    for a, b in zip(*found, strict=True):
        assert b.any()
        torch.testing.assert_close(a, b)
