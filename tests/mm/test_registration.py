"""Our layers, built by mmcv's and mmdet's builders."""

from __future__ import annotations

import textwrap

import mmdet.models
import pytest
import torch
from mmcv.cnn import ConvModule, build_conv_layer, build_plugin_layer
from mmdet.registry import MODELS as MMDET_MODELS
from mmengine.model import BaseModule
from mmengine.registry import MODELS

import attn_plugins.mmcv
from attn_plugins import modules
from attn_plugins.modules.maps.generalized_attention import GeneralizedAttention2d


def resnet(**options):
    return mmdet.models.ResNet(50, base_channels=8, **options)


ATTENDED = dict(
    plugins=[
        dict(
            cfg=dict(type="GeneralizedAttention2d", num_heads=4, attention_type="0010"),
            stages=(False, False, True, True),
            position="after_conv2",
        )
    ],
    dcn=dict(type="DeformableConv2d", offset_groups=1),
    stage_with_dcn=(False, False, True, True),
)


def test_names_are_registered_and_seen_from_mmdet():
    for name in attn_plugins.mmcv.__all__:
        assert MODELS.get(name).__name__ == name
        assert MMDET_MODELS.get(name) is MODELS.get(name)
    name, layer = build_plugin_layer(dict(type="GeneralizedAttention2d", num_heads=4), in_channels=16)
    assert name == "gen_attention_block"
    assert isinstance(layer, GeneralizedAttention2d)
    assert (layer.in_channels, layer.num_heads) == (16, 4)


def test_conv_layers_take_both_names_of_the_offset_groups():
    for option in ("offset_groups", "deform_groups"):
        layer = build_conv_layer({"type": "DeformableConv2d", option: 2}, 8, 6, 3, stride=2, padding=1, bias=False)
        assert isinstance(layer, modules.DeformableConv2d)
        assert layer.offset_groups == layer.deform_groups == 2
        assert layer.bias is None
        assert layer(torch.randn(1, 8, 9, 13)).shape == (1, 6, 5, 7)
    with pytest.raises(ValueError, match="deform_groups=2 and offset_groups=4"):
        build_conv_layer(dict(type="DeformableConv2d", deform_groups=2, offset_groups=4), 8, 8, 3)


def test_conv_modules():
    one = ConvModule(4, 6, 3, padding=1, conv_cfg=dict(type="DeformableConv1d"))
    assert one(torch.randn(2, 4, 11)).shape == (2, 6, 11)
    bilateral = dict(type="LocalBilateralConv2d", num_heads=4)
    module = ConvModule(8, 12, 3, stride=2, padding=1, conv_cfg=bilateral, norm_cfg=dict(type="BN"))
    module.init_weights()
    assert isinstance(module.conv, modules.LocalBilateralConv2d)
    assert module(torch.randn(2, 8, 9, 13)).shape == (2, 12, 5, 7)
    assert build_conv_layer(dict(type="LocalBilateralConv2d"), 8, 16, 3, padding=1, bias=False).query[0].bias is None


def test_every_convolution_of_a_resnet_can_be_ours():
    model = resnet(conv_cfg=dict(type="DeformableConv2d"))
    assert all(f.isfinite().all() for f in model(torch.randn(1, 3, 64, 96)))


def test_bad_arguments_surface_with_their_names():
    with pytest.raises(ValueError, match="attention_type"):
        resnet(plugins=[dict(cfg=dict(type="GeneralizedAttention2d", attention_type="01012"), position="after_conv2")])
    with pytest.raises(ValueError, match="offset_groups"):
        resnet(dcn=dict(type="DeformableConv2d", offset_groups=3), stage_with_dcn=(False, False, True, True))


def test_initialized_from_scratch_the_block_still_starts_as_the_plain_one():
    torch.manual_seed(0)
    attended = resnet(**ATTENDED)
    attended.init_weights()  # Kaiming for every Conv2d, including predictors and projections
    for name, parameter in attended.named_parameters():
        if "conv_offset" in name or name.endswith("gamma"):
            assert not parameter.any(), name
        elif "gen_attention_block" in name and not name.endswith("bias"):
            assert parameter.any(), name
    assert_same_as_plain(attended)


def assert_same_as_plain(attended):
    """Compare with a ResNet-50 with the same weights, without the layers that are ours."""
    plain = resnet()
    missing, unexpected = plain.load_state_dict(attended.state_dict(), strict=False)
    assert not missing
    assert unexpected
    x = torch.randn(1, 3, 64, 96)
    for block in [*attended.modules(), *plain.modules()]:
        if hasattr(block, "norm3_name"):  # zero-initialized, which would hide the effect of the block
            torch.nn.init.ones_(block.norm3.weight)
    attended.eval()
    plain.eval()
    with torch.no_grad():
        for got, expected in zip(attended(x), plain(x)):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name, options",
    [
        ("BilateralCrissCross2d", dict(gate_init=0.5)),
        ("BilateralNonLocal2d", {}),
        ("CrissCrossAttention2d", dict(position="relative", input_size=(5, 7), gate_init=0.5)),
        ("DynamicConv2d", dict(norm_cfg=dict(type="BN"))),
        ("GeneralizedAttention2d", {}),
        ("NeighborhoodAttention1d", {}),
        ("NeighborhoodAttention2d", dict(kernel_size=3, gate_init=0.5)),
        ("NonLocalAttention1d", {}),
        ("NonLocalAttention2d", {}),
        ("NonLocalAttention3d", {}),
    ],
)
def test_plugin_layers_keep_their_own_start_under_any_init_cfg(name, options):
    layers = "Conv1d Conv2d Conv3d Linear Gamma PositionPredictor".split()
    model = BaseModule(init_cfg=dict(type="Constant", layer=layers, val=7.0, bias=7.0))
    model.layer = MODELS.build(dict(type=name, in_channels=16, **options))
    start = {key: float(value.std(correction=0)) for key, value in model.layer.named_parameters()}
    model.init_weights()
    for key, value in model.layer.named_parameters():
        assert not (value == 7.0).any(), key
        assert value.dim() < 2 or float(value.std(correction=0)) == pytest.approx(start[key], rel=0.5), key
        assert (value.max() == value.min()) == (start[key] == 0), key


@pytest.mark.parametrize(
    "name", ["DynamicConv2d", "BilateralNonLocal2d", "BilateralCrissCross2d", "NeighborhoodAttention2d"]
)
def test_plugin_layers_in_a_resnet(name):
    plugin = dict(cfg=dict(type=name, kernel_size=3), stages=(False, False, True, True), position="after_conv2")
    assert_same_as_plain(resnet(plugins=[plugin]))


REPEATED = """
    import importlib, sys
    from mmengine.registry import METRICS, MODELS
    sys.modules["attn_plugins.mmcv.backbones"] = None  # the first import fails
    for _ in range(2):
        try:
            import attn_plugins.mmcv
        except ImportError as error:
            assert "backbones" in str(error), error
        else:
            raise AssertionError
    del sys.modules["attn_plugins.mmcv.backbones"]
    import attn_plugins.mmcv.drop_in
    for _ in range(2):
        for name in [name for name in sys.modules if name.startswith("attn_plugins.mmcv.")]:
            importlib.reload(sys.modules[name])
        importlib.reload(attn_plugins.mmcv)
    for name in [name for name in sys.modules if name.startswith("attn_plugins.mmcv")]:
        del sys.modules[name]
    import attn_plugins.mmcv as again
    assert MODELS.get("AAConv2d") is again.AAConv2d
    assert type(METRICS.build(dict(type="FaceParsingMetric"))).__module__ == "attn_plugins.mmcv.face_parsing"

    class AAConv2d: pass
    MODELS.register_module(module=AAConv2d, force=True)
    try:
        importlib.reload(again)
    except KeyError as error:
        assert "AAConv2d is already registered" in str(error)
    else:
        raise AssertionError
"""


@pytest.mark.slow
def test_a_repeated_import_registers_again(python):
    python(textwrap.dedent(REPEATED))
