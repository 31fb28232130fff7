"""Gradients of the drop-in, the stand-in and our deformable layers equal mmcv's, also for samples on the border."""

from __future__ import annotations

from contextlib import nullcontext

import mmcv.ops
import numpy as np
import pytest
import torch

from attn_plugins import mmcv_ext, ops
from attn_plugins.modules import DeformableConv2d
from attn_plugins.ops.deform_conv.edge_rule import on_edge, without_edge_gradients
from tests.mm.drop_in_helpers import STOCK, ours
from tests.mm.mmcv_deform_conv import RECORDED, RECORDED_CASES, case_name, offset_gradient, recorded_operands
from tests.mm.mmcv_ext_helpers import extension


def our_deform_conv2d(input, offset, weight, stride, padding, dilation, *_):
    geometry = [(n, n) for n in (stride, padding, dilation)]
    settled = without_edge_gradients(offset, weight.shape[2:], *geometry)
    return ops.deform_conv2d(input, settled, weight, None, *geometry)


def our_modulated_deform_conv2d(input, offset, mask, weight, bias, stride, padding, dilation, *_):
    geometry = [(n, n) for n in (stride, padding, dilation)]
    settled = without_edge_gradients(offset, weight.shape[2:], *geometry)
    return ops.deform_conv2d(input, settled, weight, bias, *geometry, mask)


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


def test_second_gradients():
    """No gradient reaches an offset on the border again: its slope is the constant 0."""
    (input, offset, weight, mask, bias), _ = recorded_operands("even kernel, wide padding", "between")
    offset = torch.where(torch.rand(offset.shape) < 0.3, 0, offset).detach().requires_grad_()
    output = our_modulated_deform_conv2d(input, offset, mask, weight, bias, 1, 2, 1)
    (first,) = torch.autograd.grad(output.square().sum(), offset, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), offset)
    edge = on_edge(offset, (2, 2), (1, 1), (2, 2), (1, 1))
    assert edge.any()
    assert not first[edge].any()
    assert not second[edge].any()
    assert second[~edge].any()
    assert second.isfinite().all()


@pytest.mark.parametrize(
    "start, options",
    [
        ("as made", dict(padding=1)),
        ("as made", dict(padding=1, stride=2, groups=2)),
        ("whole offsets", dict(padding=2, dilation=2, deform_groups=2)),
        ("trained", dict(padding=1, stride=2, groups=2, deform_groups=2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["DCN", "DCNv2"])
def test_layers_take_mmcvs_weights_and_have_its_gradients(name, start, options):
    """On compiled mmcv where it is installed, else on the stand-in, whose gradients are those that mmcv recorded."""
    torch.manual_seed(0)
    stock = STOCK[name](4, 6, 3, **options).double()
    if start != "as made":
        torch.nn.init.normal_(stock.conv_offset.bias)
    if start == "whole offsets":
        stock.conv_offset.bias.data.round_()
    if start == "trained":
        torch.nn.init.normal_(stock.conv_offset.weight, std=0.3)
    x = torch.randn(2, 4, 9, 12).double()
    grad = torch.randn_like(stock(x))
    results = []
    for layer in (stock, ours(STOCK[name](4, 6, 3, **options)).double()):
        layer.load_state_dict(stock.state_dict(), strict=True)
        input = x.clone().requires_grad_()
        output = layer(input)
        results.append([output, *torch.autograd.grad(output, [input, *layer.parameters()], grad)])
    for expected, found in zip(*results, strict=True):
        assert expected.any()
        torch.testing.assert_close(found, expected)

    groups = {"offset_groups" if key == "deform_groups" else key: value for key, value in options.items()}
    layer = DeformableConv2d(4, 6, 3, **groups, bias=name == "DCNv2", modulated=name == "DCNv2").double()
    layer.load_state_dict(stock.state_dict(), strict=True)
    torch.testing.assert_close(layer(x), results[0][0])


def test_a_batch_that_im2col_step_does_not_divide():
    torch.manual_seed(0)
    stock = STOCK["DCN"](4, 6, 3, padding=1, im2col_step=3)
    layer = ours(STOCK["DCN"](4, 6, 3, padding=1, im2col_step=3))
    torch.nn.init.normal_(stock.conv_offset.weight, std=0.3)
    layer.load_state_dict(stock.state_dict(), strict=True)
    x = torch.randn(10, 4, 5, 6)
    with pytest.raises(AssertionError, match="divisible by im2col_step"):
        stock(x)
    expected = torch.cat([stock(part) for part in x.split(2)])
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["ours", "stand-in", pytest.param("compiled mmcv", marks=pytest.mark.peers)])
def test_offset_gradients_equal_the_recorded_ones(kind):
    """Those of compiled mmcv as well, or the records would be out of date."""
    operators = our_deform_conv2d, our_modulated_deform_conv2d
    functions = operators if kind == "ours" else (mmcv.ops.deform_conv2d, mmcv.ops.modulated_deform_conv2d)
    with np.load(RECORDED) as arrays, extension(mmcv_ext) if kind == "stand-in" else nullcontext():
        assert list(arrays) == [case_name(*case) for case in RECORDED_CASES]
        for case in RECORDED_CASES:
            gradient, expected = offset_gradient(*functions, case), torch.from_numpy(arrays[case_name(*case)])
            assert torch.equal(gradient == 0, expected == 0), case
            torch.testing.assert_close(gradient.float(), expected)
