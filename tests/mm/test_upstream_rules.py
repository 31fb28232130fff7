"""Rules of mmengine, mmcv and mmseg that ask for a layer's class apply to our layers as to the stock ones."""

from __future__ import annotations

import copy

import mmdet.models
import pytest
import torch
from mmcv.cnn import fuse_conv_bn
from mmengine.model import revert_sync_batchnorm
from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.registry import MODELS
from mmseg.engine.optimizers.force_default_constructor import ForceDefaultOptimWrapperConstructor

import attn_plugins.mmcv  # noqa: F401
from tests.mm.drop_in_helpers import stock_layers  # noqa: F401

RULES = [
    dict(dcn_offset_lr_mult=0.1, bias_lr_mult=2.0, bias_decay_mult=0.0, norm_decay_mult=0.5, dwconv_decay_mult=0.25),
    dict(dcn_offset_lr_mult=0.1, flat_decay_mult=0.0, custom_keys={"layer4": dict(lr_mult=3.0)}),
    dict(bias_lr_mult=2.0, bias_decay_mult=0.0),
]


@pytest.mark.usefixtures("stock_layers")
@pytest.mark.parametrize("modulated", [False, True])
def test_parameters_get_the_rates_that_they_have_in_mmcvs_layers(modulated):
    for constructor in (DefaultOptimWrapperConstructor, ForceDefaultOptimWrapperConstructor):
        for rules in RULES:
            stock = _rates(dict(type="DCNv2" if modulated else "DCN", deform_groups=1), constructor, rules)
            ours = _rates(dict(type="DeformableConv2d", deform_groups=1, modulated=modulated), constructor, rules)
            assert ours == stock
            assert any("conv_offset" in name for name in ours)


def _rates(dcn, constructor, rules):
    model = mmdet.models.ResNet(50, base_channels=8, dcn=dcn, stage_with_dcn=(False, False, True, True))
    optimizer = dict(type="SGD", lr=1.0, weight_decay=1.0)
    groups = constructor(dict(optimizer=optimizer), rules)(model).optimizer.param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}


@pytest.mark.parametrize("name", ["DynamicConv2d", "GeneralizedAttention2d", "LocalBilateralConv2d"])
def test_converted_and_fused_normalizations_compute_the_same(name):
    shape = dict(out_channels=16, kernel_size=3, padding=1) if name == "LocalBilateralConv2d" else {}
    norm = {} if shape else dict(norm_cfg=dict(type="SyncBN"))
    layer = revert_sync_batchnorm(MODELS.build(dict(type=name, in_channels=16, **shape, **norm)))
    norms = [module for module in layer.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for module in norms:
        module.running_mean.normal_()
        module.running_var.uniform_(0.5, 2.0)
    x = torch.randn(2, 16, 6, 5)
    fused = fuse_conv_bn(copy.deepcopy(layer.eval()))
    torch.testing.assert_close(fused(x), layer(x), rtol=1e-4, atol=1e-5)
    assert norms
    assert not any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in fused.modules())
