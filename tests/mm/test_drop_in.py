"""The drop-in: mmdet's empirical_attention and mmseg's CCNet configs on our operators, with mmcv's checkpoint keys."""

from __future__ import annotations

import mmseg.models.backbones.swin as mmseg_swin
import pytest
import torch
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmdet.registry import MODELS as MMDET_MODELS
from mmengine.config import Config

from attn_plugins.modules import GeneralizedAttention2d, capture_attention
from attn_plugins.replacement import accelerate
from tests.helpers.memory_format_checks import check_memory_format, has_format
from tests.helpers.verdicts import Watch
from tests.mm.drop_in_helpers import FORWARDS, STOCK, drop_in, ours, stock_layers  # noqa: F401 - a fixture
from tests.mm.mm_helpers import upstream

pytestmark = pytest.mark.usefixtures("stock_layers")


def narrow(name: str) -> Config:
    """Load an upstream config with a quarter of its widths."""
    config = upstream(f"mmdet::empirical_attention/{name}")
    config.model.backbone.base_channels = 16
    config.model.neck.update(in_channels=[64, 128, 256, 512], out_channels=32)
    config.model.rpn_head.update(in_channels=32, feat_channels=32)
    return config


def randomize(model: torch.nn.Module) -> None:
    """Give parameters that start at zero random values, so that attention and offsets have an effect."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(("gamma", "conv_offset.weight", "conv_offset.bias", "norm3.weight", "bn3.weight")):
            parameter.data = 0.1 + 0.1 * torch.rand(parameter.shape, generator=generator)


@pytest.mark.parametrize(
    "name, by",
    [
        ("faster-rcnn_r50-attn1111_fpn_1x_coco", "drop-in"),
        pytest.param("faster-rcnn_r50-attn1111_fpn_1x_coco", "accelerate", marks=pytest.mark.slow),
        pytest.param("faster-rcnn_r50-attn0010-dcn_fpn_1x_coco", "drop-in", marks=pytest.mark.slow),
        ("faster-rcnn_r50-attn0010-dcn_fpn_1x_coco", "accelerate"),
    ],
)
def test_upstream_config_has_the_same_outputs_and_gradients(name, by):
    torch.manual_seed(0)
    model = MMDET_MODELS.build(narrow(name).model).eval()
    randomize(model)
    model.double()
    layers = [name for name, m in model.named_modules() if type(m) in STOCK.values()]
    assert len(layers) == (9 + 13 if "dcn" in name else 9)
    # In float64: in float32, a sample within rounding of a pixel border takes its gradient from the other side.
    x = torch.randn(2, 3, 96, 160, dtype=torch.float64)

    def run() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        model.zero_grad()
        features = model.extract_feat(x)
        sum(f.square().mean() for f in features).backward()
        return features, {key: p.grad for key, p in model.named_parameters() if p.grad is not None}

    features, gradients = run()
    if by == "drop-in":
        drop_in.replace()
    else:
        assert accelerate(model, onednn=False) == layers
    with Watch("attn_plugins") as watch:
        found, found_gradients = run()
    assert watch.seen
    for got, expected in zip(found, features, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    assert gradients.keys() == found_gradients.keys()
    for key, expected in gradients.items():
        scale = expected.abs().max().item()
        torch.testing.assert_close(found_gradients[key], expected, rtol=1e-2, atol=1e-3 * scale, msg=key)


@pytest.mark.parametrize("attention_type", ["0100", "0110", "1100", "1110"])
def test_what_mmcv_computes_otherwise_than_the_paper_stays(attention_type):
    """A model may have been trained with it; ``GeneralizedAttention2d.mmcv_compatible`` computes the paper's terms."""
    layer = STOCK["GeneralizedAttention"](16, num_heads=2, kv_stride=1, attention_type=attention_type)
    randomize(layer)
    x = torch.rand(1, 16, 6, 6)
    expected = layer(x)
    with pytest.raises(ValueError, match="must contain layers to accelerate"):
        accelerate(layer)
    drop_in.replace()
    assert torch.equal(layer(x), expected)
    right = GeneralizedAttention2d.mmcv_compatible(16, num_heads=2, kv_stride=1, attention_type=attention_type)
    right.load_state_dict(layer.state_dict(), strict=True)
    assert not torch.allclose(right(x), expected)


def test_accelerated_attention_can_be_looked_at():
    model = torch.nn.Sequential(STOCK["GeneralizedAttention"](16, num_heads=2), STOCK["CrissCrossAttention"](16))
    randomize(model)
    accelerate(model)
    with capture_attention(model) as captured:
        model(torch.rand(1, 16, 5, 7))
    assert [call.maps().shape for call in captured.values()] == [(1, 2, 5, 7, 3, 4), (1, 1, 5, 7, 5, 7)]
    for call in captured.values():
        torch.testing.assert_close(call.maps().sum((-2, -1)), torch.ones(call.maps().shape[:4]))


@pytest.mark.parametrize("name", ["DCN", "DCNv2"])
def test_old_checkpoints_load(name):
    layer = STOCK[name](4, 6, 3, padding=1)
    model = torch.nn.ModuleDict({"conv1": torch.nn.Conv2d(3, 4, 1), "conv2": layer})
    wanted = {key: torch.randn_like(value) for key, value in model.state_dict().items()}
    old = {key.replace("conv2.conv_offset", "conv2_offset"): value for key, value in wanted.items()}
    assert "conv2_offset.weight" in old
    model.load_state_dict(drop_in.upgrade_keys(old), strict=True)
    for key, value in model.state_dict().items():
        assert torch.equal(value, wanted[key])
    assert drop_in.upgrade_keys(wanted) == wanted


def state() -> dict:
    """Return what the drop-in replaces."""
    return {layer: layer.forward for layer in FORWARDS}


def test_replacing_twice_changes_nothing():
    drop_in.replace()
    once = state()
    drop_in.replace()
    assert state() == once


@pytest.mark.parametrize("layer", [STOCK["DCNv2"], MultiheadAttention, mmseg_swin.ShiftWindowMSA])
def test_foreign_code_is_an_error_and_nothing_is_replaced(layer, monkeypatch):
    monkeypatch.setattr(layer, "forward", lambda self, x: x)
    before = state()
    with pytest.raises(RuntimeError, match=f"the forward of {layer.__name__}, but .* holds .*nothing was replaced"):
        drop_in.replace()
    assert state() == before


# --- memory formats --------------------------------------------------------------------------------------------------

LAYERS = dict(
    CrissCrossAttention=dict(),
    DCN=dict(out_channels=24, kernel_size=3, padding=1),
    DCNv2=dict(out_channels=24, kernel_size=3, padding=1),
    GeneralizedAttention=dict(num_heads=2),
)


@pytest.mark.parametrize("name", STOCK)
def test_a_layer_answers_in_the_format_of_its_input(name):
    """As mmcv's layers, it answers a contiguous map with one; users may rely on that by ``output.view(-1)``."""
    torch.manual_seed(0)
    for autocast in (False, True):
        check_memory_format(ours(STOCK[name](in_channels=16, **LAYERS[name])), (2, 16, 6, 9), autocast)
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
config.model.backbone.update(init_cfg=None, base_channels=16)
block = MODELS.build(config.model.backbone).layer4[2]
assert "mmseg" not in sys.modules
import attn_plugins.import_hooks
waiting = [name for name in attn_plugins.import_hooks._finder.waiting if name.endswith("swin")]
import mmseg.models
kinds = [type(block.conv2), type(block.gen_attention_block), mmseg.models.decode_heads.cc_head.CrissCrossAttention]
kinds += [toolkit.models.backbones.swin.ShiftWindowMSA for toolkit in (mmdet, mmseg)]
from attn_plugins.replacement import stock_of
print(*waiting, *(stock_of(kind.forward) is not kind.forward for kind in kinds))
""")
    assert result.stdout.split()[-6:] == ["mmseg.models.backbones.swin", *["True"] * 5]
