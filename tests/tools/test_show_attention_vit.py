"""Attention of timm's vision transformers on a photograph: its numbers, the command, and the page in a browser."""

from __future__ import annotations

import base64
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

timm = pytest.importorskip("timm")

from skimage import data  # noqa: E402

from attn_plugins.modules import capture_attention  # noqa: E402
from attn_plugins.timm import ViTAttention  # noqa: E402
from tests.tools.test_show_attention import maps_in, page_data, painted, same_picture  # noqa: E402
from tools.attention_view import view, vit  # noqa: E402
from tools.pictures import open_picture  # noqa: E402
from tools.show_attention import main  # noqa: E402

SMALL = dict(img_size=(48, 64), embed_dim=32, depth=3, num_heads=2)
NAME = "vit_tiny_patch16_224"


@pytest.fixture(scope="module")
def photograph(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("photograph") / "cat.png"
    Image.fromarray(data.chelsea()).save(file)
    return file


def build(name: str = NAME, sharp: float = 8, **options) -> nn.Module:
    """A small model whose weights are far from uniform, and whose terms of ours are at work."""
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL, **options}).eval()
    with torch.no_grad():
        for layer in vit.vit_layers(model).values():
            layer.qkv.weight *= sharp
            for key, parameter in layer.named_parameters():
                if key.split(".")[0] not in ("qkv", "proj", "norm", "q_norm", "k_norm", "gate_proj"):
                    nn.init.normal_(parameter, std=0.5)
    return model


def seen_by(model: nn.Module, x: Tensor, **keywords) -> tuple[dict[str, vit.PatchMaps], dict[str, Tensor]]:
    """What was captured, and what every layer itself returned."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, _: nn.Module, inputs: tuple, output: Tensor) -> None:
        outputs[name] = output

    hooks = [layer.register_forward_hook(partial(keep, name)) for name, layer in vit.vit_layers(model).items()]
    with torch.no_grad(), vit.capture_vit(model) as captured:
        model(x, **keywords)
    for hook in hooks:
        hook.remove()
    return captured, outputs


def output_of(layer: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
    """The layer's output from its values and these weights."""
    B, T, _ = x.shape
    value = layer.qkv(x).view(B, T, 3, layer.num_heads, -1)[:, :, 2].transpose(1, 2)
    return layer.proj(layer.norm((weights @ value).transpose(1, 2).reshape(B, T, -1)))


def check(model: nn.Module, x: Tensor, **keywords) -> dict[str, vit.PatchMaps]:
    """Whether every layer's weights and values give its own output."""
    captured, outputs = seen_by(model, x, **keywords)
    assert list(captured) == list(outputs) == list(vit.vit_layers(model))
    assert captured
    for name, found in captured.items():
        weights = found.weights()
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:3]), rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            expected = output_of(model.get_submodule(name), found.x, weights)
        torch.testing.assert_close(expected, outputs[name], rtol=1e-3, atol=1e-4)
    return captured


# --- the numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, dict(qk_norm=True, scale_attn_norm=True)], ids=["plain", "norms"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_stock_layers_weights_give_its_output(fused, options):
    model = build(reg_tokens=2, **options)
    for layer in vit.vit_layers(model).values():
        assert not isinstance(layer, ViTAttention)
        layer.fused_attn = fused
    captured = check(model, torch.randn(2, 3, 48, 64))
    assert {(n.size, n.cls, len(n.prefix)) for n in captured.values()} == {((3, 4), True, 3)}
    assert max(float(n.weights().max()) for n in captured.values()) > 0.5


@pytest.mark.parametrize("reg_tokens", [0, 2])
@pytest.mark.parametrize("kind", ["attn0000", "attn0110", "attn1111", "attn_bilateral", "attn_range7"])
def test_our_layers_weights_give_their_output(kind, reg_tokens):
    model = build(attn_layer=kind, reg_tokens=reg_tokens)
    assert all(isinstance(layer, ViTAttention) for layer in vit.vit_layers(model).values())
    captured = check(model, torch.randn(2, 3, 48, 64))
    assert {(n.size, n.cls, len(n.prefix)) for n in captured.values()} == {((3, 4), True, 1 + reg_tokens)}


@pytest.mark.parametrize("kind", ["attn", "attn1111"])
@pytest.mark.parametrize("added", [True, False])
def test_masked_tokens(kind, added):
    mask = torch.rand(13, 13) > 0.3
    mask.fill_diagonal_(True)
    given = torch.zeros(13, 13).masked_fill(~mask, -torch.inf) if added else mask
    captured = check(build(attn_layer=kind), torch.randn(2, 3, 48, 64), attn_mask=given)
    for layer in captured.values():
        assert (layer.weights()[:, :, ~mask] == 0).all()
        np.testing.assert_allclose(layer.look(["cls", (2, 1)]).uniform, 1 / mask[[0, 10]].sum(1), rtol=1e-6)


def test_causal_weights():
    layer = next(iter(vit.vit_layers(build()).values()))
    x = torch.randn(2, 13, 32)
    with torch.no_grad():
        weights = vit.stock_weights(layer, x, is_causal=True)
        torch.testing.assert_close(output_of(layer, x, weights), layer(x, is_causal=True), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "name, options, size, prefix, grid",
    [
        (NAME, dict(dynamic_img_size=True), (80, 32), ["cls"], (5, 2)),
        (NAME, dict(dynamic_img_size=True, dynamic_img_pad=True), (70, 33), ["cls"], (5, 3)),
        (NAME, dict(class_token=False, global_pool="avg", reg_tokens=3), (48, 64), ["registers"] * 3, (3, 4)),
        (NAME, dict(class_token=False, global_pool="avg"), (48, 64), [], (3, 4)),
        ("deit_tiny_distilled_patch16_224", {}, (48, 64), ["cls", "dist"], (3, 4)),
        ("naflexvit_base_patch16_gap", {}, (64, 48), ["registers"] * 4, (4, 3)),
        ("naflexvit_base_patch16_gap", dict(class_token=True, reg_tokens=1), (64, 48), ["cls", "registers"], (4, 3)),
    ],
    ids=["dynamic", "padded", "registers alone", "patches alone", "distilled", "naflex", "naflex with cls"],
)
@pytest.mark.parametrize("kind", ["attn", "attn1111"])
def test_where_tokens_lie(kind, name, options, size, prefix, grid):
    captured = check(build(name, attn_layer=kind, **options), torch.randn(1, 3, *size))
    for layer in captured.values():
        assert (layer.prefix, layer.size) == (prefix, grid)


def test_a_look_is_rows_of_the_weights():
    captured, _ = seen_by(build(reg_tokens=2, attn_layer="attn1111"), torch.randn(1, 3, 48, 64))
    layer = captured["blocks.1.attn"]
    weights, found = layer.weights()[0], layer.look(["cls", (2, 1)])
    assert found.names == ["mean of heads", "head 1", "head 2"]
    for q, token in enumerate((0, 3 + 2 * 4 + 1)):
        for head in range(2):
            expected = weights[head, token]
            torch.testing.assert_close(found.maps[1 + head, q].flatten(), expected[3:])
            torch.testing.assert_close(found.elsewhere[1 + head, q], expected[:3].sum())
        torch.testing.assert_close(found.maps[0, q].flatten(), weights[:, token, 3:].mean(0))
    torch.testing.assert_close(found.uniform, torch.full((2,), 1 / 15))


def test_uniform_weight_of_a_range():
    with_range = build(attn_layer="attn_range7", img_size=(160, 16), sharp=30)  # 10 rows, 3 to each side
    captured, _ = seen_by(with_range, torch.randn(1, 3, 160, 16))
    found = captured["blocks.0.attn"].look(["cls", (0, 0), (5, 0)])
    np.testing.assert_allclose(1 / found.uniform, [11, 5, 8], rtol=1e-6)


def test_our_layers_are_captured_in_python():
    model = build(attn_layer="attn1111", reg_tokens=2)
    x = torch.randn(2, 3, 48, 64)
    with capture_attention(model, "blocks.2.*") as captured, torch.no_grad():
        model(x)
    found, other = captured["blocks.2.attn"], seen_by(model, x)[0]["blocks.2.attn"]
    assert found.size == (3, 4)
    whole = found.maps()
    torch.testing.assert_close(whole.flatten(4).flatten(2, 3), other.weights()[:, :, 3:, 3:])
    torch.testing.assert_close(found.maps(torch.tensor([[2, 1], [0, 3]])), whole[:, :, [2, 0], [1, 3]])
    with pytest.raises(ValueError, match="queries must lie on the map of 3 rows and 4 columns"):
        found.maps(torch.tensor([[3, 0]]))
    layer = model.blocks[0].attn
    with pytest.raises(ValueError, match="is_causal must be False"):
        layer.attention_maps(torch.randn(1, 15, 32), is_causal=True)
    with pytest.raises(ValueError, match="grid must hold the 13 tokens behind the prefix of 3"):
        layer.attention_maps(torch.randn(1, 16, 32))
    with pytest.raises(ValueError, match="this layer is in no such model"):
        ViTAttention(32, 2).attention_maps(torch.randn(1, 15, 32))


@pytest.mark.parametrize("kind", ["attn", "attn1111"])
def test_rollout_by_plain_loops(kind):
    model = build(attn_layer=kind, reg_tokens=1, depth=3)
    captured, _ = seen_by(model, torch.randn(1, 3, 48, 64))
    (found,) = vit.rollouts(model, captured).values()
    T, product = 14, None
    for layer in captured.values():
        weights = layer.weights()[0].double().numpy()
        mixed = np.zeros((T, T))
        for i in range(T):
            for j in range(T):
                mixed[i, j] = sum(weights[m, i, j] for m in range(2)) / 2 + (i == j)
            mixed[i] /= mixed[i].sum()
        if product is None:
            product = mixed
            continue
        after = np.zeros((T, T))
        for i in range(T):
            for j in range(T):
                after[i, j] = sum(mixed[i, n] * product[n, j] for n in range(T))
        product = after
    np.testing.assert_allclose(found.weights()[0, 0], product, rtol=1e-4, atol=1e-6)
    look = found.look(["cls", (1, 2)])
    assert look.names == ["rollout"]
    np.testing.assert_allclose(look.maps[0].flatten(1), product[[0, 2 + 6], 2:], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(look.elsewhere[0], product[[0, 8], :2].sum(1), rtol=1e-4)


def test_nothing_stays_in_the_model():
    model = build(dynamic_img_size=True)
    seen_by(model, torch.randn(1, 3, 48, 64))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_picture_is_padded_as_the_patches_are(photograph):
    model = build(dynamic_img_size=True, dynamic_img_pad=True)
    seen = view.view_timm(model, open_picture(photograph), [], (70, 33))
    assert (seen.size, seen.inside) == ((80, 48), (70, 33))
    assert seen.cell((5, 3), (299, 450)) == (4, 2)
    assert not seen.picture[70:].any()


# --- the command --------------------------------------------------------------------------------------------------

ARGUMENTS = [f"--model-args={key}={list(n) if isinstance(n, tuple) else n}" for key, n in SMALL.items()]


@pytest.fixture(scope="module")
def shown(photograph, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("shown")
    torch.manual_seed(0)
    arguments = [*ARGUMENTS, "--model-args=attn_layer=attn1111", "--model-args=reg_tokens=1", "--rollout"]
    assert main([NAME, str(photograph), "--output", str(output), *arguments, "--layers", "blocks.[02].*"]) == 0
    return output


def test_a_grid_for_every_layer_and_the_rollout(shown):
    names = ["blocks.0.attn", "blocks.2.attn", "rollout"]
    assert {f.name for f in shown.iterdir()} == {*(f"{name}.png" for name in names), "attention.html"}
    layers = page_data(shown / "attention.html")["layers"]
    assert [(n["name"], n["names"], n["queries"], n["without"]) for n in layers] == [
        *((name, ["mean of heads", "head 1", "head 2"], [3, 4], "cls and registers") for name in names[:2]),
        ("rollout", ["rollout"], [3, 4], "cls and registers"),
    ]
    heights = [Image.open(shown / f"{name}.png").height for name in names]
    assert heights[0] == heights[1] > heights[2]


@pytest.mark.parametrize("pixels, columns", [(["cls"], 1), (["cls", "10,20"], 2), (["10,20"], 1)])
def test_chosen_queries(pixels, columns, photograph, tmp_path, capsys):
    chosen = [part for pixel in pixels for part in ("--pixels", pixel)]
    assert main([NAME, str(photograph), "--output", str(tmp_path), *ARGUMENTS, *chosen]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "input: 48×64 pixels, the model's own; --input-size H W takes another"
    assert [Path(line).name for line in lines[1:]] == ["blocks.2.attn.png", "attention.html"]
    grid = np.asarray(Image.open(tmp_path / "blocks.2.attn.png").convert("RGB")).astype(int)
    red = (grid[..., 0] > 200) & (grid[..., 1] < 60) & (grid[..., 2] < 60)
    assert (red.sum() > 30) == ("10,20" in pixels)
    assert round((grid.shape[1] - 72) / 360) == columns  # 180 dots an inch: 2 inches a panel, 0.4 for the margin


def test_a_model_without_a_cls_token(photograph, tmp_path, capsys):
    arguments = [NAME, str(photograph), *ARGUMENTS, "--model-args=class_token=false", "--model-args=global_pool=avg"]
    assert main([*arguments, "--output", str(tmp_path), "--rollout"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "no cls token: its patches alone are queries"
    layers = page_data(tmp_path / "attention.html")["layers"]
    assert [(n["name"], n["cls"], n["elsewhere"]) for n in layers] == [
        ("blocks.2.attn", None, None), ("rollout", None, None)
    ]  # fmt: skip
    assert main([*arguments, "--output", str(tmp_path / "out"), "--pixels", "cls"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "show_attention: --pixels cls needs a vision transformer of timm with a cls token: this model has none"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["aa_resnet34", "--rollout"], "--rollout needs a vision transformer of timm, and AAResNet has none"),
        (["aa_resnet34", "--pixels", "cls"], "--pixels cls needs a vision transformer of timm with a cls token"),
        ([NAME, *ARGUMENTS, "--layers", "stage*"], "none is called 'stage*': blocks.0.attn, blocks.1.attn"),
        (
            [NAME, *ARGUMENTS, "--input-size", "64", "64"],
            "VisionTransformer does not accept an input of 64×64 pixels: Input height (64) doesn't match model (48).",
        ),
        ([NAME, *ARGUMENTS, "--model-args=attn_layer=diff"], "VisionTransformer has none"),
        (
            ["vit_small_patch16_18x2_224", "--rollout", "--model-args=depth=1"],
            "--rollout needs blocks of one attention layer that can be shown, blocks.0 has 2",
        ),
    ],
)
def test_bad_arguments(arguments, words, photograph, tmp_path, capsys):
    assert main([*arguments[:1], str(photograph), *arguments[1:], "--output", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["attn", "attn1111"])
def test_listing(kind, capsys):
    assert main([NAME, *ARGUMENTS, f"--model-args=attn_layer={kind}", "--list"]) == 0
    assert capsys.readouterr().out.split() == [f"blocks.{n}.attn" for n in range(3)]


@pytest.mark.parametrize("kind", ["attn", "attn1111"])
def test_a_segmentor_with_a_vision_transformer(kind, photograph, tmp_path, capsys):
    pytest.importorskip("mmseg", reason="mmseg is not installed")
    config = tmp_path / "segmentor.py"
    config.write_text(
        "custom_imports = dict(imports=['attn_plugins.mmcv', 'attn_plugins.timm'])\n"
        "default_scope = 'mmseg'\n"
        "model = dict(type='EncoderDecoder', data_preprocessor=dict(type='SegDataPreProcessor', size=(64, 96)),\n"
        f"    backbone=dict(type='TIMMBackbone', model_name='{NAME}', features_only=True, pretrained=False,\n"
        f"        out_indices=(0, 1), attn_layer='{kind}', img_size=(64, 96), embed_dim=32, depth=3, num_heads=2),\n"
        "    decode_head=dict(type='FCNHead', in_channels=32, in_index=1, channels=8, num_convs=1, num_classes=19),\n"
        "    test_cfg=dict(mode='whole'))\n"
        "test_pipeline = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=(96, 64), keep_ratio=False),\n"
        "                 dict(type='PackSegInputs')]\n"
        "test_dataloader = dict(dataset=dict(type='CityscapesDataset', pipeline=test_pipeline))\n"
    )
    assert main([str(config), "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.partition("blocks.")[2] for line in listed] == ["0.attn", "1.attn"]
    output = tmp_path / "out"
    assert main([str(config), str(photograph), "--output", str(output), "--rollout", "--pixels", "cls"]) == 0
    first, second = page_data(output / "attention.html")["layers"]
    assert first["name"] == listed[1]
    assert second["name"].endswith(".rollout")
    assert (first["heads"], first["queries"]) == (3, [4, 6])
    assert first["cls"] is not None
    config.write_text(config.read_text().replace("scale=(96, 64)", "scale=(128, 64)"))
    assert main([str(config), str(photograph), "--output", str(tmp_path / "no")]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert "the model does not accept the picture: Input width (128) doesn't match model (96)." in line


# --- the page in a browser ----------------------------------------------------------------------------------------


def test_the_cls_token_and_patches_on_the_page(shown, browser):
    file = shown / "attention.html"
    browser.open(file)
    browser.run("image.decode()")
    browser.run("(() => { opacity.value = 0; opacity.dispatchEvent(new Event('input')); })()")
    layers = page_data(file)["layers"]
    table = np.frombuffer(base64.b64decode(page_data(file)["colours"]), np.uint8).reshape(256, 3).astype(int)

    def from_cls(panel: int, layer: int, head: int) -> None:
        held = np.frombuffer(base64.b64decode(layers[layer]["cls"]["maps"]), np.uint8).reshape(-1, 3, 4)
        found = np.array(painted(browser, panel)).reshape(3, 4, 3)
        assert np.abs(found - table[held[head]]).max() <= 2

    places = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]  # the panels' layers and heads
    assert browser.run("panels.length") == 7
    assert browser.run("where.textContent") == "Query: the cls token"
    for panel, (layer, head) in enumerate(places):
        from_cls(panel, layer, head)
    assert browser.run("getComputedStyle(cross).display") == "none"
    assert browser.run("panels.map(p => p.text.textContent.split(':')[0])") == [
        *(["mean of heads", "head 1", "head 2"] * 2), "rollout"
    ]  # fmt: skip
    share = np.frombuffer(base64.b64decode(layers[1]["cls"]["elsewhere"]), "<f4")[1]
    text = browser.run("panels[4].text.textContent")
    assert text.endswith(" % on cls and registers")
    assert abs(float(text.rpartition("; ")[2].split()[0]) - 100 * share) < 1
    box = browser.run(
        "(() => { const b = picture.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
    )
    browser.click(box[0] + 0.9 * box[2], box[1] + 0.5 * box[3])
    assert browser.run("where.textContent").startswith("Query: pixel (150, 405)")
    assert browser.run("getComputedStyle(cross).display") == "block"
    for panel, (layer, head) in enumerate(places):
        same_picture(browser, file, panel, head, layer, (1, 3))
    browser.run("clsButton.click()")
    assert browser.run("clsButton.getAttribute('aria-pressed')") == "true"
    from_cls(6, 2, 0)
    browser.run("clsButton.click()")
    same_picture(browser, file, 4, 1, 1, (1, 3))
    assert [maps.shape for maps in maps_in(file)] == [(3, 3, 4, 3, 4), (3, 3, 4, 3, 4), (1, 3, 4, 3, 4)]


def test_no_button_without_a_cls_token(photograph, tmp_path, browser):
    arguments = [*ARGUMENTS, "--model-args=class_token=false", "--model-args=global_pool=avg"]
    assert main([NAME, str(photograph), "--output", str(tmp_path), *arguments]) == 0
    browser.open(tmp_path / "attention.html")
    browser.run("image.decode()")
    assert browser.run("getComputedStyle(clsButton).display") == "none"
    assert browser.run("where.textContent").startswith("Query: pixel (")
    assert "cls" not in browser.run("panels[0].text.textContent")
