"""The drop-in for Swin: upstream detectors and segmenters compute the same, in any order of imports."""

from __future__ import annotations

import mmdet.models.backbones.swin
import mmseg.models.backbones.swin
import pytest
import torch
from mmdet.registry import MODELS as MMDET_MODELS
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.utils import get_installed_path
from mmseg.registry import MODELS as MMSEG_MODELS
from torch import nn

from attn_plugins.mmcv import window_attention
from tests.helpers.operator_checks import relative_error
from tests.mm.drop_in_helpers import STOCK, STOCK_FORWARDS, drop_in, restore
from tests.mm.mm_helpers import without_downloads
from tests.mm.test_drop_in_transformers import run

SWIN = {"mmdet": mmdet.models.backbones.swin, "mmseg": mmseg.models.backbones.swin}
CONFIGS = {
    "mmdet": "mask-rcnn_swin-t-p4-w7_fpn_1x_coco",
    "mmseg": "swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512",
}
WIDTHS = [16, 32, 64, 128]


@pytest.fixture(autouse=True)
def _stock_layers():
    """Start and end every test with the toolkits' own layers."""
    restore()
    yield
    restore()
    init_default_scope("mmdet")


def build(package: str) -> nn.Module:
    """Build the upstream model at a sixth of its width, with two blocks per stage and no drop path."""
    folder = get_installed_path(package)
    config = without_downloads(Config.fromfile(f"{folder}/.mim/configs/swin/{CONFIGS[package]}.py"))
    init_default_scope(package)
    model = config.model
    model.backbone.update(embed_dims=16, depths=[2, 2, 2, 2], num_heads=[1, 2, 4, 4], drop_path_rate=0.0)
    if package == "mmdet":
        model.neck.update(in_channels=WIDTHS, out_channels=32)
        model.rpn_head.update(in_channels=32, feat_channels=32)
        model.roi_head.bbox_roi_extractor.out_channels = model.roi_head.mask_roi_extractor.out_channels = 32
        model.roi_head.bbox_head.update(in_channels=32, fc_out_channels=32)
        model.roi_head.mask_head.update(in_channels=32, conv_out_channels=16)
    else:
        model.decode_head.update(in_channels=WIDTHS, channels=16, pool_scales=(2, 3))  # 1 fails: one value to normalise
        model.auxiliary_head.update(in_channels=64, channels=16)
    torch.manual_seed(0)
    built = (MMDET_MODELS if package == "mmdet" else MMSEG_MODELS).build(model)
    built.init_weights()
    for name, parameter in built.named_parameters():
        if name.endswith("relative_position_bias_table"):
            nn.init.normal_(parameter, std=0.5)
    for module in built.modules():
        if isinstance(module, (nn.Dropout, nn.Dropout2d)):
            module.p = 0.0
    return built


@pytest.mark.parametrize("package", CONFIGS)
def test_upstream_models_compute_the_same(package):
    """Images are 96 × 128, whose maps of 24 × 32 and less do not divide into windows of 7."""
    model = build(package)
    layers = [m for m in model.modules() if isinstance(m, SWIN[package].ShiftWindowMSA)]
    assert len(layers) == 8
    assert sorted({m.shift_size for m in layers}) == [0, 3]
    keys = list(model.state_dict())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    expected, losses, gradients = run(model, package)
    for name, buffer in model.named_buffers():  # buffers of batch norms
        buffer.copy_(buffers[name])
    drop_in.replace()
    assert all(type(m).forward.__module__ == window_attention.__name__ for m in layers)
    found, our_losses, our_gradients = run(model, package)
    assert list(model.state_dict()) == keys
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * max(1.0, b.abs().max().item()))
    assert our_losses.keys() == losses.keys()
    assert our_gradients.keys() == gradients.keys()
    checked = [key for key in gradients if "w_msa" in key and gradients[key].abs().max() > 1e-6]
    assert len(checked) >= 8 * 4
    for key in checked:
        assert relative_error(our_gradients[key], gradients[key]) < 1e-2, key


@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("package", CONFIGS)
def test_a_layer_equals_upstreams(package, shift):
    torch.manual_seed(0)
    layer = SWIN[package].ShiftWindowMSA(12, 3, 5, shift, qk_scale=0.3).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    for H, W in ((10, 15), (7, 11), (3, 12)):
        results = {}
        for kind in ("stock", "ours"):
            x = torch.randn(2, H * W, 12, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
            layer.zero_grad()
            output = layer(x, (H, W))
            output.square().sum().backward()
            results[kind] = [output, x.grad, *(p.grad.clone() for p in layer.parameters())]
            drop_in.replace()
        restore()
        for ours, stock in zip(results["ours"], results["stock"]):
            torch.testing.assert_close(ours, stock)
    drop_in.replace()
    with pytest.raises(AssertionError, match="input feature has wrong size"):
        layer(torch.zeros(2, 9, 12).double(), (3, 4))


def test_who_drops_or_looks_at_weights_gets_upstreams():
    torch.manual_seed(0)
    layer = SWIN["mmdet"].ShiftWindowMSA(12, 3, 5, 2, attn_drop_rate=0.4)
    x = torch.randn(2, 35, 12)
    torch.manual_seed(1)
    expected = layer(x, (5, 7))
    drop_in.replace()
    torch.manual_seed(1)
    torch.testing.assert_close(layer(x, (5, 7)), expected, rtol=0, atol=0)
    layer.eval()
    expected, seen = layer(x, (5, 7)), []
    layer.w_msa.softmax.register_forward_hook(lambda *call: seen.append(call[2].shape))
    torch.testing.assert_close(layer(x, (5, 7)), expected)
    assert seen == [(4, 3, 25, 25)]


def test_all_or_none(monkeypatch):
    monkeypatch.setattr(SWIN["mmseg"].ShiftWindowMSA, "forward", lambda self, query, hw_shape: query)
    with pytest.raises(
        RuntimeError, match=r"forward of ShiftWindowMSA, but mmseg\.models\.backbones\.swin holds .*nothing"
    ):
        drop_in.replace()
    assert SWIN["mmdet"].ShiftWindowMSA.forward is STOCK_FORWARDS[SWIN["mmdet"].ShiftWindowMSA]
    assert all(MODELS.module_dict[name] is layer for name, layer in STOCK.items())


def test_replacing_twice_keeps_upstreams_within_reach():
    drop_in.replace()
    once = {name: module.ShiftWindowMSA.forward for name, module in SWIN.items()}
    drop_in.replace()
    assert {name: module.ShiftWindowMSA.forward for name, module in SWIN.items()} == once


def test_a_toolkit_that_is_imported_later(python):
    """A toolkit that is not installed is ignored."""
    result = python(
        "import sys\n"
        "import attn_plugins.mmcv.drop_in\n"
        "assert not [name for name in sys.modules if name.startswith(('mmdet', 'mmseg'))]\n"
        "import mmdet.models.backbones.swin as swin\n"
        "print(swin.ShiftWindowMSA.forward.__module__)\n"
        "print('mmseg' in sys.modules)\n"
        "print(*(n for n in attn_plugins.autoload._finder.waiting if n.endswith('swin')))\n"
    )
    assert result.stdout.split() == [window_attention.__name__, "False", "mmseg.models.backbones.swin"]
