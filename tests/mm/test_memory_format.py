"""Every layer that we register with mmengine, and every drop-in, keeps the memory format of its input."""

from __future__ import annotations

import pytest
import torch
from mmengine.registry import MODELS

import attn_plugins.mmcv
from tests.helpers.memory_format_checks import check_memory_format, has_format
from tests.mm.drop_in_helpers import STOCK, drop_in

CONVOLUTIONS = dict(
    AAConv2d=dict(out_channels=24, kernel_size=3, kappa=0.25, nu=0.5, num_heads=2, input_size=(6, 9)),
    DeformableConv2d=dict(out_channels=24, kernel_size=3, padding=1, deform_groups=2),
    LocalBilateralConv2d=dict(out_channels=24, kernel_size=3, padding=1),
)
PLUGINS = dict(
    BilateralCrissCross2d=dict(kernel_size=5),
    BilateralNonLocal2d=dict(kernel_size=5),
    CrissCrossAttention2d=dict(),
    DynamicConv2d=dict(kernel_size=3),
    GeneralizedAttention2d=dict(num_heads=2, kv_stride=2),
    NonLocalAttention2d=dict(sub_sample=True),
)
REPLACEMENTS = dict(
    CrissCrossAttention=dict(),
    DCN=dict(out_channels=24, kernel_size=3, padding=1),
    DCNv2=dict(out_channels=24, kernel_size=3, padding=1),
    GeneralizedAttention=dict(num_heads=2),
)


def test_every_layer_on_maps_is_here():
    others = {"AAResNet", "DeformableConv1d"}  # a backbone, and layers for sequences and clips
    others |= {"NonLocalAttention1d", "NonLocalAttention3d"}
    assert {*attn_plugins.mmcv.__all__, "NonLocalAttention2d"} == {*CONVOLUTIONS, *PLUGINS, *others}
    assert set(drop_in.REPLACEMENTS) == set(REPLACEMENTS) == set(STOCK)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("size", [(6, 9), (9, 6)])
@pytest.mark.parametrize("name", [*CONVOLUTIONS, *PLUGINS])
def test_a_registered_layer_answers_in_the_format_of_its_input(name, size, autocast):
    torch.manual_seed(0)
    arguments = {**CONVOLUTIONS, **PLUGINS}[name]
    check_memory_format(MODELS.build(dict(type=name, in_channels=16, **arguments)), (2, 16, *size), autocast)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("size", [(6, 9), (9, 6)])
@pytest.mark.parametrize("name", REPLACEMENTS)
def test_a_drop_in_answers_in_the_format_of_its_input(name, size, autocast):
    torch.manual_seed(0)
    check_memory_format(drop_in.REPLACEMENTS[name](in_channels=16, **REPLACEMENTS[name]), (2, 16, *size), autocast)


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_mmcvs_layer_answers_a_contiguous_map_with_one(name):
    """Users may rely on this, for example by ``output.view(-1)``."""
    torch.manual_seed(0)
    x = torch.randn(2, 16, 6, 6)
    for layer in (STOCK[name], drop_in.REPLACEMENTS[name]):
        output = layer(in_channels=16, **REPLACEMENTS[name])(x)
        assert has_format(output, "contiguous")
        assert output.view(-1).shape == (output.numel(),)
