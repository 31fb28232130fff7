"""Attention of timm's Swin and of ours on a photograph: the weights give the layers' outputs, and the command runs."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from torch import nn

timm = pytest.importorskip("timm")

from skimage import data  # noqa: E402

from attn_plugins.timm import accelerate  # noqa: E402
from tools.attention_view.swin import StockWindows, capture_swin, swin_layers  # noqa: E402
from tools.attention_view.view import timm_layers, timm_size, view_timm  # noqa: E402
from tools.show_attention import main  # noqa: E402

SMALL = dict(img_size=(64, 96), window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4), num_classes=5)
V1, V2 = "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"
NAMES = [f"layers.{stage}.blocks.{block}.attn" for stage in range(2) for block in range(2)]


def build(name: str, **options) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL, **options}).eval()
    for key, parameter in model.named_parameters():
        if "table" in key or "cpb_mlp" in key or key.endswith("_bias"):
            nn.init.normal_(parameter, std=0.5)
    return model


@torch.no_grad()
@pytest.mark.parametrize("faster", [False, True])
@pytest.mark.parametrize("name", [V1, V2])
def test_a_stock_layers_weights_give_its_output(name, faster):
    """Maps of 16 × 24 and 8 × 12 in windows of 4, shifted in every second block."""
    model = build(name)
    if faster:
        accelerate(model)
    x = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    with capture_swin(model) as captured:
        model(x)
    assert list(captured) == NAMES == timm_layers(model)
    for key, layer in captured.items():
        assert isinstance(layer.layer, StockWindows)
        block, given = swin_layers(model)[key], layer.arguments[0]
        attn, maps = block.attn, layer.maps()
        bias = attn.qkv.bias
        if name == V2:
            bias = torch.cat((attn.q_bias, torch.zeros_like(attn.q_bias), attn.v_bias))
        qkv = nn.functional.linear(given, attn.qkv.weight, bias)
        v = qkv.unflatten(3, (3, attn.num_heads, -1))[:, :, :, 2]
        output = attn.proj(torch.einsum("bmhwyx,byxmd->bhwmd", maps, v).flatten(3))
        torch.testing.assert_close(output, block._attn(given), rtol=1e-4, atol=1e-5)
        assert layer.size == tuple(given.shape[1:3])
        queries = torch.tensor([[0, 1], [5, 7]])
        torch.testing.assert_close(layer.maps(queries), maps[:, :, queries[:, 0], queries[:, 1]])


@pytest.mark.parametrize("name", [V1, V2, f"attn_{V1}", f"attn_{V2}"])
def test_the_last_layer_of_every_stage(name):
    model = build(name)
    picture = Image.fromarray(data.chelsea())
    size, why = timm_size(model, None, None)
    assert size == (64, 96)
    assert "the model's own" in why
    view = view_timm(model, picture, [], size)
    assert [(layer.name, layer.size) for layer in view.maps] == [(NAMES[1], (16, 24)), (NAMES[3], (8, 12))]
    ours = view_timm(model, picture, ["layers.0.*"], size)
    assert list(ours.captured) == NAMES[:2]


@pytest.mark.parametrize(
    "name, arguments", [(V1, []), (f"attn_{V1}", ["window=centred", "position=table+bilateral", "window_size=5"])]
)
def test_the_command(name, arguments, tmp_path, capsys):
    file = tmp_path / "cat.png"
    Image.fromarray(data.chelsea()).save(file)
    given = ["img_size=[64, 96]", "window_size=4", "embed_dim=16", "depths=[2, 2]", "num_heads=[2, 4]", *arguments]
    options = [part for argument in given for part in ("--model-args", argument)]
    assert main([name, str(file), "--output", str(tmp_path / "out"), "--pixels", "150,200", *options]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {f"{NAMES[1]}.png", f"{NAMES[3]}.png"}
    assert (tmp_path / "out/attention.html").stat().st_size > 10_000
    assert "input: 64×96 pixels" in capsys.readouterr().out
