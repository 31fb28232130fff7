"""Gradients of the drop-in, the stand-in and our deformable layers equal mmcv's, also for samples on the border."""

from __future__ import annotations

from typing import Any

import mmcv.ops
import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor

from attn_plugins import mmcv_ext, ops
from attn_plugins.modules import DeformableConv2d
from attn_plugins.ops.deform_conv.edge_rule import without_edge_gradients
from tests.mm import mmcv_deform_conv
from tests.mm.drop_in_helpers import STOCK, drop_in
from tests.mm.mmcv_deform_conv import PEERS, RECORDED, RECORDED_CASES, by_torchvision, case_name, offset_gradient, peer
from tests.mm.mmcv_ext_helpers import extension

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
    """Return input, offset, weight, mask, bias and the gradient of the output, in float64."""
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


def our_deform_conv2d(input, offset, weight, stride, padding, dilation, *_):
    geometry = [(n, n) for n in (stride, padding, dilation)]
    settled = without_edge_gradients(offset, weight.shape[2:], *geometry)
    return ops.deform_conv2d(input, settled, weight, None, *geometry)


def our_modulated_deform_conv2d(input, offset, mask, weight, bias, stride, padding, dilation, *_):
    geometry = [(n, n) for n in (stride, padding, dilation)]
    settled = without_edge_gradients(offset, weight.shape[2:], *geometry)
    return ops.deform_conv2d(input, settled, weight, bias, *geometry, mask)


@pytest.mark.parametrize("kind", PEERS)
@pytest.mark.parametrize("modulated", [True, False])
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_gradients_equal_those_of_mmcvs_operator(name, offsets, modulated, kind):
    theirs_of = mmcv.ops if kind == "compiled mmcv" else mmcv_deform_conv
    _, _, _, _, _, K, stride, padding, dilation, groups, D = GEOMETRIES[name]
    (input, offset, weight, mask, bias), grad = operands(name, offsets)
    geometry = (stride, padding, dilation, groups, D)
    if modulated:
        leaves, more = [input, offset, weight, mask, bias], (mask, weight, bias)
        theirs = theirs_of.modulated_deform_conv2d(input, offset, *more, *geometry)
        ours = our_modulated_deform_conv2d(input, offset, *more, *geometry)
    else:
        leaves = [input, offset, weight]
        theirs = theirs_of.deform_conv2d(*leaves, *geometry)
        ours = our_deform_conv2d(*leaves, *geometry)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(torch.autograd.grad(ours, leaves, grad), torch.autograd.grad(theirs, leaves, grad)):
        torch.testing.assert_close(a, b)


def test_the_operator_itself_has_torchvisions_rule():
    (input, offset, weight, _, _), grad = operands("padding", "zero")
    rule = without_edge_gradients(offset, (3, 3), (1, 1), (1, 1), (1, 1))
    (stock,) = torch.autograd.grad(ops.deform_conv2d(input, offset, weight, padding=1), offset, grad)
    (edge,) = torch.autograd.grad(ops.deform_conv2d(input, rule, weight, padding=1), offset, grad)
    changed = (stock != edge).unflatten(1, (3, 3, 2))
    assert changed[:, 0, 1, 0, 0].all()  # row offset of taps above the map
    assert changed[:, 1, 0, 1, :, 0].all()  # column offset of taps left of the map
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
    # No gradient reaches these: the slope of an offset on the border is the constant 0.
    on_edge = torch.autograd.grad(without_edge_gradients(offset, *geometry).sum(), offset)[0] == 0
    assert on_edge.any()
    assert (expected[1][on_edge] == 0).all()
    (second,) = torch.autograd.grad(expected[2].sum(), offset)
    assert (second[on_edge] == 0).all()
    assert second.isfinite().all()
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", PEERS)
@pytest.mark.parametrize("options", [dict(), dict(stride=2, groups=2), dict(dilation=2, padding=2, deform_groups=2)])
@pytest.mark.parametrize("start", ["as made", "whole offsets", "trained"])
@pytest.mark.parametrize("name", ["DCN", "DCNv2"])
def test_a_layers_gradients_equal_mmcvs(name, start, options, kind):
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
    results = []
    for layer in (ours, stock):
        input = x.clone().requires_grad_()
        with peer(kind):
            output = layer(input)
        results.append([output, *torch.autograd.grad(output, [input, *layer.parameters()], grad)])
    for a, b in zip(*results, strict=True):
        assert b.any()
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", PEERS)
@pytest.mark.parametrize("modulated", [True, False])
def test_layer_takes_mmcvs_weights_and_gives_its_output(modulated, kind):
    torch.manual_seed(0)
    theirs = STOCK["DCNv2" if modulated else "DCN"](
        8, 6, 3, stride=2, padding=1, groups=2, deform_groups=2, bias=modulated
    )
    ours = DeformableConv2d(
        8, 6, 3, stride=2, padding=1, groups=2, offset_groups=2, bias=modulated, modulated=modulated
    )
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(std=0.5)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(2, 8, 9, 12)
    with peer(kind):
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    theirs.load_state_dict(ours.state_dict(), strict=True)


def test_a_batch_that_im2col_step_does_not_divide():
    torch.manual_seed(0)
    stock = STOCK["DCN"](4, 6, 3, padding=1, im2col_step=3)
    ours = drop_in.DCN(4, 6, 3, padding=1, im2col_step=3)
    torch.nn.init.normal_(stock.conv_offset.weight, std=0.3)
    ours.load_state_dict(stock.state_dict(), strict=True)
    x = torch.randn(10, 4, 5, 6)
    with pytest.raises(AssertionError, match="divisible by im2col_step"):
        stock(x)
    with by_torchvision():
        expected = torch.cat([stock(part) for part in x.split(2)])
    torch.testing.assert_close(ours(x), expected, rtol=1e-4, atol=1e-5)


# --- gradients of offsets on the border, as compiled mmcv gave them ---------------------------------------------------


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    with np.load(RECORDED) as arrays:
        gradients = dict(arrays)
    assert list(gradients) == [case_name(*case) for case in RECORDED_CASES]
    return gradients


@pytest.mark.parametrize("case", RECORDED_CASES, ids=lambda case: case_name(*case))
@pytest.mark.parametrize(
    "kind", ["ours", "stand-in", "torchvision", pytest.param("compiled mmcv", marks=pytest.mark.peers)]
)
def test_offset_gradients_equal_the_recorded_ones(kind, case, recorded):
    """The tests' own definition as well, and compiled mmcv, for which the records would else be out of date."""
    if kind == "ours":
        gradient = offset_gradient(our_deform_conv2d, our_modulated_deform_conv2d, case)
    elif kind == "stand-in":
        with extension(mmcv_ext):
            gradient = offset_gradient(mmcv.ops.deform_conv2d, mmcv.ops.modulated_deform_conv2d, case)
    elif kind == "torchvision":
        gradient = offset_gradient(mmcv_deform_conv.deform_conv2d, mmcv_deform_conv.modulated_deform_conv2d, case)
    else:
        gradient = offset_gradient(mmcv.ops.deform_conv2d, mmcv.ops.modulated_deform_conv2d, case)
    expected = torch.from_numpy(recorded[case_name(*case)])
    assert torch.equal(gradient == 0, expected == 0)
    torch.testing.assert_close(gradient.float(), expected)


def test_the_records_hold_the_rule(recorded):
    """Torchvision's own gradients, those of the inner side, differ in the records' zeros."""
    case = RECORDED_CASES[0]

    def theirs(input, offset, weight, stride, padding, dilation, *_):
        return torchvision.ops.deform_conv2d(input, offset, weight, None, stride, padding, dilation)

    inner, outer = offset_gradient(theirs, theirs, case), torch.from_numpy(recorded[case_name(*case)])
    differing = ~torch.isclose(inner.float(), outer)
    assert differing.any()
    assert (outer[differing] == 0).all()


# --- attention -------------------------------------------------------------------------------------------------------


def attention_pair(name: str, **options: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return mmcv's layer and ours with the same weights in float64, gamma not 0."""
    torch.manual_seed(0)
    stock, ours = STOCK[name](18, **options), drop_in.REPLACEMENTS[name](18, **options)
    for key, parameter in stock.named_parameters():
        if "gamma" in key:
            torch.nn.init.constant_(parameter, 0.7)
    ours.load_state_dict(stock.state_dict(), strict=True)
    return stock.double(), ours.double()


ATTENTION = {
    "CrissCrossAttention": [dict()],
    "GeneralizedAttention": [
        dict(attention_type="1111"), dict(attention_type="0010"), dict(attention_type="1000", q_stride=2),
        dict(attention_type="1010", kv_stride=1, num_heads=3), dict(attention_type="0001"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name, options", [(name, options) for name, all in ATTENTION.items() for options in all])
def test_a_loss_of_the_flat_output_has_mmcvs_gradients(name, options):
    """The output is contiguous like mmcv's, so that losses may view it, and so is the input's gradient."""
    if name == "GeneralizedAttention":
        options = {"position_embedding_dim": 20, **options}
    stock, ours = attention_pair(name, **options)
    x, target = torch.randn(2, 18, 8, 8).double(), torch.randn(2 * 18 * 8 * 8).double()
    results = []
    for layer in (ours, stock):
        input = x.clone().requires_grad_()
        loss = (layer(input).view(-1) - target).square().mean()
        grads = torch.autograd.grad(loss, [input, *layer.parameters()], allow_unused=True)
        assert grads[0].is_contiguous()
        results.append([loss, *grads])
    for (key, _), a, b in zip([("loss", 0), ("input", 0), *stock.named_parameters()], *results, strict=True):
        assert (a is None) == (b is None), key
        if b is not None:
            torch.testing.assert_close(a, b, msg=lambda text, key=key: f"{key}: {text}")
