"""Offsets that are not finite: on CPUs, where projects call ``grid_sample``, the stand-ins give NaN as well."""

from __future__ import annotations

import pytest
import torch

from attn_plugins.extensions import dcnv3, dcnv4
from tests.extensions.test_ms_deform_attn import SHAPES, STARTS, Attend, by_grid_sample, operands

BAD = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", ["value", "locations", "weights"])
def test_deformable_attention_is_finite_where_grid_sample_is(name, bad):
    results = []
    for attend in (Attend.apply, by_grid_sample):
        leaves = dict(zip(("value", "locations", "weights"), operands()))
        leaves[name].view(-1)[[3, 170]] = bad
        output = attend(*(leaf.requires_grad_() for leaf in leaves.values()))
        results.append([output, *torch.autograd.grad(output.sum(), list(leaves.values()))])
    for ours, expected in zip(*results):
        assert torch.equal(ours.isfinite(), expected.isfinite())
    assert not results[1][0].isfinite().all()


@pytest.mark.parametrize("bad", BAD)
def test_packed_locations_of_dcnv4(bad):
    value, locations, _ = operands(dtype=torch.float32)
    packed = torch.cat((locations.flatten(3), torch.randn(2, 7, 3, 12)), -1)
    packed[1, 2, 0, 5] = bad
    given = value, SHAPES, STARTS, packed
    output = dcnv4.flash_deform_attn_forward(*given, 64, 4, 8, 1).unflatten(2, (3, 5))
    assert output[1, 2, 0].isnan().all()
    assert output.isfinite().sum() == output.numel() - 5
    of_value, of_packed = dcnv4.flash_deform_attn_backward(*given, torch.ones(2, 7, 15), 64, 4, 8, 1)
    assert of_value.isfinite().all()
    assert of_packed[1, 2, 0].isnan().any()
    assert of_packed[0].isfinite().all()


@pytest.mark.parametrize("bad", BAD)
def test_offsets_of_dcnv3(bad):
    x, offset, mask = torch.randn(1, 5, 6, 8), torch.rand(1, 5, 6, 2 * 9 * 2), torch.rand(1, 5, 6, 2 * 9)
    offset[0, 2, 3, 7] = bad
    window = 3, 3, 1, 1, 1, 1, 1, 1, 2, 4, 1.0
    output = dcnv3.dcnv3_forward(x, offset, mask, *window, 256, 0)
    assert output[0, 2, 3, :4].isnan().all()
    assert output.isfinite().sum() == output.numel() - 4
    of_input, of_offset, of_mask = dcnv3.dcnv3_backward(x, offset, mask, *window, torch.ones_like(x), 256, 0)
    assert of_input.isfinite().all()
    assert of_offset[0, 2, 3].isnan().sum() == 1
    assert of_mask[0, 2, 3].isnan().sum() == 1
