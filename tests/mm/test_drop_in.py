"""The drop-in: mmdet's empirical_attention and mmseg's CCNet configs on our operators, with mmcv's checkpoint keys."""

from __future__ import annotations

import sys

import mmcv.ops
import mmseg.models.backbones.swin as mmseg_swin
import pytest
import torch
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmdet.registry import MODELS as MMDET_MODELS
from mmengine.config import Config
from mmengine.registry import MODELS

from tests.helpers.memory_format_checks import check_memory_format, has_format
from tests.mm.drop_in_helpers import STOCK, STOCK_FORWARDS, drop_in, stock_layers  # noqa: F401 - a fixture
from tests.mm.mm_helpers import upstream

pytestmark = pytest.mark.usefixtures("stock_layers")


def narrow(name: str) -> Config:
    """Load an upstream config with a quarter of its widths."""
    config = upstream(f"mmdet::empirical_attention/{name}")
    config.model.backbone.base_channels = 16
    config.model.neck.update(in_channels=[64, 128, 256, 512], out_channels=32)
    config.model.rpn_head.update(in_channels=32, feat_channels=32)
    return config


def randomise(model: torch.nn.Module) -> None:
    """Give parameters that start at zero random values, so that attention and offsets have an effect."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(("gamma", "conv_offset.weight", "conv_offset.bias", "norm3.weight", "bn3.weight")):
            parameter.data = 0.1 + 0.1 * torch.rand(parameter.shape, generator=generator)


@pytest.mark.parametrize("kind", ["DCN", "DCNv2"])
def test_a_predictor_starts_at_zero_whatever_rules_came_before(kind):
    drop_in.replace()
    layer = MODELS.build(dict(type=kind, in_channels=4, out_channels=4, kernel_size=3))
    torch.nn.init.ones_(layer.conv_offset.weight)
    torch.nn.init.ones_(layer.conv_offset.bias)
    layer.init_weights()
    assert not layer.conv_offset.weight.any()
    assert not layer.conv_offset.bias.any()


@pytest.mark.parametrize("name", ["faster-rcnn_r50-attn1111_fpn_1x_coco", "faster-rcnn_r50-attn0010-dcn_fpn_1x_coco"])
def test_upstream_config_has_the_same_keys_outputs_and_gradients(name):
    torch.manual_seed(0)
    config = narrow(name)
    stock = MMDET_MODELS.build(config.model)
    drop_in.replace()
    ours = MMDET_MODELS.build(config.model)
    replaced = [type(m) for m in ours.modules() if type(m) in drop_in.REPLACEMENTS.values()]
    assert len(replaced) == (9 + 13 if "dcn" in name else 9)
    assert not [m for m in ours.modules() if type(m) in STOCK.values()]

    randomise(stock)
    weights = stock.state_dict()
    assert {n: v.shape for n, v in ours.state_dict().items()} == {n: v.shape for n, v in weights.items()}
    assert list(ours.state_dict()) == list(weights)
    ours.load_state_dict(weights, strict=True)
    stock.load_state_dict(ours.state_dict(), strict=True)

    # In float64: in float32, a sample within rounding of a pixel border takes its gradient from the other side.
    x = torch.randn(2, 3, 96, 160, dtype=torch.float64)
    features = {}
    for which, model in (("stock", stock), ("ours", ours)):
        model.double().eval()
        features[which] = model.extract_feat(x)
        sum(f.square().mean() for f in features[which]).backward()
    for got, expected in zip(features["ours"], features["stock"]):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    gradients = dict(ours.named_parameters())
    for key, parameter in stock.named_parameters():
        expected = parameter.grad
        if expected is not None and "rpn_head" not in key and "roi_head" not in key:
            scale = expected.abs().max().item()
            torch.testing.assert_close(gradients[key].grad, expected, rtol=1e-2, atol=1e-3 * scale, msg=key)


@pytest.mark.parametrize("name", ["DCN", "DCNv2"])
def test_old_checkpoints_load(name):
    layer = drop_in.REPLACEMENTS[name](4, 6, 3, padding=1)
    model = torch.nn.ModuleDict({"conv1": torch.nn.Conv2d(3, 4, 1), "conv2": layer})
    wanted = {key: torch.randn_like(value) for key, value in model.state_dict().items()}
    old = {key.replace("conv2.conv_offset", "conv2_offset"): value for key, value in wanted.items()}
    assert "conv2_offset.weight" in old
    model.load_state_dict(drop_in.upgrade_keys(old), strict=True)
    for key, value in model.state_dict().items():
        assert torch.equal(value, wanted[key])
    assert drop_in.upgrade_keys(wanted) == wanted


def state() -> tuple[dict, dict, type]:
    """Return what the drop-in replaces: registered layers, forward methods, and layers under their names."""
    forwards = {layer: layer.forward for layer in STOCK_FORWARDS}
    return dict(MODELS.module_dict), forwards, sys.modules["mmcv.ops.cc_attention"].CrissCrossAttention


def test_replacing_twice_changes_nothing():
    drop_in.replace()
    once = state()
    drop_in.replace()
    assert state() == once


@pytest.mark.parametrize(
    "holder, name, message",
    [
        (MODELS.module_dict, "DCNv2", r"DCNv2.*Theirs.*"),
        (mmcv.ops, "CrissCrossAttention", r"CrissCrossAttention, but mmcv\.ops holds .*Theirs.*"),
        (MultiheadAttention, "forward", r"replaces mmcv's MultiheadAttention\.forward, but .* "),
        (mmseg_swin.ShiftWindowMSA, "forward", r"forward of ShiftWindowMSA, but mmseg.*\.swin holds .*"),
    ],
    ids=["registered layer", "layer under a name", "forward of mmcv", "forward of a toolkit"],
)
def test_a_foreign_layer_is_an_error_and_nothing_is_replaced(monkeypatch, holder, name, message):
    class Theirs(torch.nn.Module):
        pass

    replace = monkeypatch.setitem if isinstance(holder, dict) else monkeypatch.setattr
    replace(holder, name, Theirs)
    before = state()
    with pytest.raises(RuntimeError, match=message + "nothing was replaced"):
        drop_in.replace()
    assert state() == before


# --- memory formats --------------------------------------------------------------------------------------------------

LAYERS = dict(
    CrissCrossAttention=dict(),
    DCN=dict(out_channels=24, kernel_size=3, padding=1),
    DCNv2=dict(out_channels=24, kernel_size=3, padding=1),
    GeneralizedAttention=dict(num_heads=2),
)


@pytest.mark.parametrize("name", drop_in.REPLACEMENTS)
def test_a_drop_in_answers_in_the_format_of_its_input(name):
    """As mmcv's layers, it answers a contiguous map with one; users may rely on that by ``output.view(-1)``."""
    torch.manual_seed(0)
    for autocast in (False, True):
        check_memory_format(drop_in.REPLACEMENTS[name](in_channels=16, **LAYERS[name]), (2, 16, 6, 9), autocast)
    assert has_format(STOCK[name](in_channels=16, **LAYERS[name])(torch.randn(2, 16, 6, 6)), "contiguous")


def test_one_line_over_an_upstream_config_and_toolkits_that_are_imported_later(python, tmp_path):
    """The line imports no toolkit; one that is not installed is ignored."""
    (tmp_path / "mine.py").write_text(
        '_base_ = "mmdet::empirical_attention/faster-rcnn_r50-attn0010-dcn_fpn_1x_coco.py"\n'
        'custom_imports = dict(imports=["attn_plugins.mmcv.drop_in"], allow_failed_imports=False)\n'
    )
    result = python("""
import sys
from mmengine.config import Config
from mmengine.registry import init_default_scope
config = Config.fromfile("mine.py")
assert not [name for name in sys.modules if name.startswith(("mmdet.models", "mmseg"))]
import mmdet.models
from mmdet.registry import MODELS
init_default_scope("mmdet")
config.model.backbone.init_cfg = None
block = MODELS.build(config.model.backbone).layer4[2]
assert "mmseg" not in sys.modules
import attn_plugins.import_hooks
waiting = [name for name in attn_plugins.import_hooks._finder.waiting if name.endswith("swin")]
import mmseg.models
owners = [type(block.conv2), type(block.gen_attention_block), mmseg.models.decode_heads.cc_head.CrissCrossAttention]
owners += [toolkit.models.backbones.swin.ShiftWindowMSA.forward for toolkit in (mmdet, mmseg)]
print(*waiting, *(owner.__module__ for owner in owners))
""")
    waiting, *owners = result.stdout.split()[-6:]
    assert waiting == "mmseg.models.backbones.swin"
    assert owners == ["attn_plugins.mmcv.drop_in"] * 3 + ["attn_plugins.mmcv.window_attention"] * 2
