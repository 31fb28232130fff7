"""``show_attention --parts``: what each term of the logits attends to on its own, in PNGs and on the page."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

timm = pytest.importorskip("timm")

from attn_plugins.modules import BilateralNonLocal2d, capture_attention  # noqa: E402
from tools.attention_view import page, view  # noqa: E402
from tools.attention_view.parts import parts_of  # noqa: E402
from tools.attention_view.tokens import TokenMaps, probed_weights  # noqa: E402
from tools.pictures import open_picture  # noqa: E402
from tools.show_attention import main  # noqa: E402

TITLES = ["ε1: query and key content", "ε2: query content and position", "ε3: key content", "ε4: position"]


@pytest.fixture(scope="module")
def photograph(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("photograph") / "noise.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(file)
    return file


@pytest.fixture(scope="module")
def shown(photograph, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("shown")
    torch.manual_seed(0)
    options = dict(depth=10, width=1, img_size=16, kappa=0.5, nu=0.5)
    model = timm.create_model("aa_wide_resnet28_10", **options)
    nn.init.normal_(model.layer3[0].conv1.qkv.weight, std=0.5)  # far from uniform maps
    weights = output.parent / "weights.pth"
    torch.save(model.state_dict(), weights)
    arguments = ["aa_wide_resnet28_10", str(photograph), "--checkpoint", str(weights), "--output", str(output)]
    arguments += [part for key, value in options.items() for part in ("--model-args", f"{key}={value}")]
    arguments += ["--parts", "--pixels", "5,7", "--input-size", "16", "16", "--layers", "layer3.*"]
    assert main(arguments) == 0
    return output


def page_data(file: Path) -> dict:
    found = re.search(r"const data = (\{.*\});", file.read_text())
    assert found is not None
    return json.loads(found[1])


def decoded(layer: dict) -> np.ndarray:
    shape = layer["heads"], *layer["queries"], *layer["keys"]
    maps = np.frombuffer(base64.b64decode(layer["maps"]), np.uint8).reshape(shape) / 255
    peaks = np.frombuffer(base64.b64decode(layer["peaks"]), "<f4").reshape(shape[:3])
    return maps * peaks[..., None, None]


def test_a_picture_more_for_every_layer_and_the_parts_on_the_page(shown):
    names = {f.name for f in shown.iterdir()}
    assert names == {"layer3.0.conv1.png", "layer3.0.conv1.parts.png", "attention.html"}
    grid = Image.open(shown / "layer3.0.conv1.parts.png")
    assert grid.width > 3 * grid.height  # the picture, two parts and the whole in one row
    for layer in page_data(shown / "attention.html")["layers"]:
        assert list(layer["parts"]) == ["content", "position"]
        product = decoded(layer["parts"]["content"]) * decoded(layer["parts"]["position"])
        product /= product.sum((-2, -1), keepdims=True)  # the normalised product of softmaxes is the softmax of the sum
        whole = decoded(layer)
        assert np.abs(product - whole).max() < 0.02 * whole.max()
        assert np.abs(decoded(layer["parts"]["position"]) - whole).max() > 0.05 * whole.max()


def test_the_switch_shows_another_map_and_hides_layers_without_the_part(shown, browser):
    file = shown / "attention.html"
    browser.open(file)
    browser.run("image.decode()")
    browser.run("(() => { opacity.value = 0; opacity.dispatchEvent(new Event('input')); })()")
    assert browser.run("document.getElementById('partLabel').hidden") is False
    assert browser.run("document.getElementById('aboutParts').hidden") is False
    assert browser.run("[...partSelect.options].map(o => o.text)") == ["all terms", "content", "position"]
    before = browser.run("panels[0].canvas.toDataURL()")
    choose = "(() => {{ partSelect.value = '{}'; partSelect.dispatchEvent(new Event('change')); }})()"
    browser.run(choose.format("position"))
    assert browser.run("panels[0].canvas.toDataURL()") != before
    layer = page_data(file)["layers"][0]
    held = browser.run("Array.from(mapOf(panels[0].layer, 1).values)")
    y, x = browser.run("cellOf(panels[0].layer)")
    peak = browser.run("mapOf(panels[0].layer, 1).peak")
    np.testing.assert_allclose(
        np.array(held) / 255 * peak, decoded(layer["parts"]["position"])[1, y, x].ravel(), rtol=1e-5
    )
    browser.run("(() => { delete panels[0].layer.parts.position; show(); })()")
    assert browser.run("panels[0].section.hidden") is True
    browser.run(choose.format(""))
    assert browser.run("panels[0].canvas.toDataURL()") == before
    assert browser.run("panels[0].section.hidden") is False


def test_terms_of_a_vision_transformer_from_its_cls_token(photograph):
    torch.manual_seed(0)
    options = dict(img_size=32, patch_size=8, depth=1, embed_dim=32, num_heads=2)
    model = timm.create_model("vit_tiny_patch16_224", attn_layer="attn1111", **options).eval()
    nn.init.ones_(model.blocks[0].attn.gate)
    seen = view.view_timm(model, open_picture(photograph), [], (32, 32))
    (layer,) = seen.maps
    parts = parts_of(layer)
    assert list(parts) == TITLES
    whole = layer.weights().double()
    product = torch.stack([part.weights().double() for part in parts.values()]).prod(0)
    torch.testing.assert_close(product / product.sum(-1, keepdim=True), whole, rtol=1e-4, atol=1e-6)
    cells = ["cls", (1, 2)]
    found, of_whole = view.query_maps(parts[TITLES[1]], cells), view.query_maps(layer, cells)
    assert found.names == of_whole.names == ["mean of heads", "head 1", "head 2"]
    torch.testing.assert_close(found.uniform, of_whole.uniform)
    # The cls token has no position, so ε2 is 0 for all its keys.
    torch.testing.assert_close(found.maps[:, 0], torch.full((3, 4, 4), 1 / 17))
    torch.testing.assert_close(found.maps.sum((-2, -1)) + found.elsewhere, torch.ones(3, 2))
    data = page.layer_data(layer, True)
    assert list(data["parts"]) == TITLES
    assert data["parts"][TITLES[0]]["cls"] is not None
    assert parts_of(view.view_timm(model, open_picture(photograph), [], (32, 32), True).captured["rollout"]) == {}


def test_terms_of_a_detector_s_tokens():
    attended = pytest.importorskip("attn_plugins.mmcv.attended", reason="mmdet is not installed")
    torch.manual_seed(0)
    layer = attended.TokenAttention(8, 2, "1010", kernel_size=3).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    grids = attended.Grids()
    grids.seen[6] = (2, 3)
    layer.find_grid(grids, "encoder")
    tokens = torch.randn(6, 1, 8)
    masks = dict(key_padding_mask=torch.tensor([[False] * 5 + [True]]), attn_mask=None)
    maps = TokenMaps("encoder", probed_weights, layer, tokens, tokens, masks, (2, 3), (2, 3))
    parts = parts_of(maps)
    assert list(parts) == [TITLES[0], TITLES[2], "predicted position"]
    product = torch.stack([part.weights() for part in parts.values()]).prod(0)
    torch.testing.assert_close(product / product.sum(-1, keepdim=True), maps.weights())
    chosen = torch.tensor([[1, 2], [0, 0]])
    torch.testing.assert_close(
        parts[TITLES[0]].maps(chosen), parts[TITLES[0]].weights()[:, :, [5, 0]].unflatten(-1, (2, 3))
    )


def test_layers_of_one_term_have_no_parts(photograph, tmp_path, capsys):
    model = nn.ModuleDict({"layer": BilateralNonLocal2d(8, kernel_size=3)})
    with capture_attention(model) as captured:
        model["layer"](torch.randn(1, 8, 4, 4))
    assert list(parts_of(captured["layer"])) == ["content", "position"]
    arguments = ["attn_resnet50", str(photograph), "--parts", "--input-size", "32", "32", "--layers", "layer4.2.*"]
    arguments += ["--model-args", "attention_type='1000'"]
    assert main([*arguments, "--output", str(tmp_path), "--pixels", "0,0"]) == 0
    assert "no layer shown has more than one term in its logits" in capsys.readouterr().out
    assert {f.name for f in tmp_path.iterdir()} == {"layer4.2.attention.png", "attention.html"}
    assert all("parts" not in layer or not layer["parts"] for layer in page_data(tmp_path / "attention.html")["layers"])
