"""Our deformable convolution and its layers against mmcv's, with the same operands and weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torchvision
from mmcv.ops import DeformConv2dPack, ModulatedDeformConv2dPack, deform_conv2d, modulated_deform_conv2d

from attn_plugins import mmcv_ext, ops
from attn_plugins.mmcv_ext.edge_rule import without_edge_gradients
from attn_plugins.modules import DeformableConv2d
from tests.mm import mmcv_deform_conv
from tests.mm.mmcv_deform_conv import PEERS, RECORDED, RECORDED_CASES, case_name, offset_gradient, peer
from tests.mm.mmcv_ext_helpers import extension

# (B, C, H, W, C_out, kernel, stride, padding, dilation, groups, offset groups)
GEOMETRIES = {
    "square": (2, 4, 6, 6, 4, 3, 1, 1, 1, 1, 1),
    "wide, groups": (2, 8, 5, 9, 4, 3, 1, 1, 1, 2, 4),
    "stride and dilation": (1, 6, 11, 8, 3, 3, 2, 2, 2, 3, 2),
}


def gradients(output: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    return [output, *torch.autograd.grad(output, leaves, grad)]


@pytest.mark.peers
@pytest.mark.parametrize("modulated", [True, False])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_operator_equals_mmcv(name: str, modulated: bool) -> None:
    """tests/ops compares with torchvision."""
    B, C, H, W, C_out, K, stride, padding, dilation, groups, D = GEOMETRIES[name]
    torch.manual_seed(0)
    size = [(n + 2 * padding - dilation * (K - 1) - 1) // stride + 1 for n in (H, W)]
    input = torch.randn(B, C, H, W).requires_grad_()
    offset = (2 * torch.randn(B, 2 * D * K * K, *size)).requires_grad_()
    weight = torch.randn(C_out, C // groups, K, K).requires_grad_()
    if modulated:
        mask, bias = torch.rand(B, D * K * K, *size).requires_grad_(), torch.randn(C_out).requires_grad_()
        leaves = (input, offset, weight, mask, bias)
        theirs = modulated_deform_conv2d(input, offset, mask, weight, bias, stride, padding, dilation, groups, D)
        ours = ops.deform_conv2d(input, offset, weight, bias, stride, padding, dilation, mask)
    else:
        leaves = (input, offset, weight)
        theirs = deform_conv2d(input, offset, weight, stride, padding, dilation, groups, D)
        ours = ops.deform_conv2d(input, offset, weight, None, stride, padding, dilation)
    for a, b in zip(gradients(ours, *leaves), gradients(theirs, *leaves)):
        assert float((a - b).norm() / b.norm()) < 2e-6


@pytest.mark.parametrize("kind", PEERS)
@pytest.mark.parametrize("modulated", [True, False])
def test_layer_takes_mmcvs_weights_and_gives_its_output(modulated: bool, kind: str) -> None:
    torch.manual_seed(0)
    pack = ModulatedDeformConv2dPack if modulated else DeformConv2dPack
    theirs = pack(8, 6, 3, stride=2, padding=1, groups=2, deform_groups=2, bias=modulated)
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


# --- gradients of offsets on the border, as compiled mmcv gave them ---------------------------------------------------


def our_deform_conv2d(input, offset, weight, stride, padding, dilation, *_):
    geometry = [(n, n) for n in (stride, padding, dilation)]
    return ops.deform_conv2d(
        input, without_edge_gradients(offset, weight.shape[2:], *geometry), weight, None, *geometry
    )


def our_modulated_deform_conv2d(input, offset, mask, weight, bias, stride, padding, dilation, *_):
    geometry = [(n, n) for n in (stride, padding, dilation)]
    settled = without_edge_gradients(offset, weight.shape[2:], *geometry)
    return ops.deform_conv2d(input, settled, weight, bias, *geometry, mask)


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    with np.load(RECORDED) as arrays:
        found = dict(arrays)
    assert list(found) == [case_name(*case) for case in RECORDED_CASES]
    return found


@pytest.mark.parametrize("case", RECORDED_CASES, ids=lambda case: case_name(*case))
@pytest.mark.parametrize(
    "kind", ["ours", "stand-in", "torchvision", pytest.param("compiled mmcv", marks=pytest.mark.peers)]
)
def test_offset_gradients_equal_the_recorded_ones(kind, case, recorded):
    """The tests' own definition as well, and compiled mmcv, for which the records would else be out of date."""
    if kind == "ours":
        found = offset_gradient(our_deform_conv2d, our_modulated_deform_conv2d, case)
    elif kind == "stand-in":
        with extension(mmcv_ext):
            found = offset_gradient(deform_conv2d, modulated_deform_conv2d, case)
    elif kind == "torchvision":
        found = offset_gradient(mmcv_deform_conv.deform_conv2d, mmcv_deform_conv.modulated_deform_conv2d, case)
    else:
        found = offset_gradient(deform_conv2d, modulated_deform_conv2d, case)
    expected = torch.from_numpy(recorded[case_name(*case)])
    assert torch.equal(found == 0, expected == 0)
    torch.testing.assert_close(found.float(), expected)


def test_the_records_hold_the_rule(recorded):
    """Torchvision's own gradients, those of the inner side, differ in the records' zeros."""
    case = RECORDED_CASES[0]

    def theirs(input, offset, weight, stride, padding, dilation, *_):
        return torchvision.ops.deform_conv2d(input, offset, weight, None, stride, padding, dilation)

    inner, outer = offset_gradient(theirs, theirs, case), torch.from_numpy(recorded[case_name(*case)])
    differing = ~torch.isclose(inner.float(), outer)
    assert differing.any()
    assert (outer[differing] == 0).all()
