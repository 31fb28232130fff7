"""Attention of timm's vision transformers on a photograph: the command, and the page in a browser."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("timm")

from tests.tools.show_attention_helpers import SMALL_VIT, VIT, maps_in, page_data, painted, same_picture
from tools.show_attention import main

ARGUMENTS = [f"--model-args={key}={list(n) if isinstance(n, tuple) else n}" for key, n in SMALL_VIT.items()]


@pytest.fixture(scope="module")
def shown(photograph, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("shown")
    torch.manual_seed(0)
    arguments = [*ARGUMENTS, "--model-args=attn_layer=attn1111", "--model-args=reg_tokens=1", "--rollout"]
    assert main([VIT, str(photograph), "--output", str(output), *arguments, "--layers", "blocks.[02].*"]) == 0
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
    assert main([VIT, str(photograph), "--output", str(tmp_path), *ARGUMENTS, *chosen]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "input: 48×64 pixels, the model's own; --input-size H W takes another"
    assert [Path(line).name for line in lines[1:]] == ["blocks.2.attn.png", "attention.html"]
    grid = np.asarray(Image.open(tmp_path / "blocks.2.attn.png").convert("RGB")).astype(int)
    red = (grid[..., 0] > 200) & (grid[..., 1] < 60) & (grid[..., 2] < 60)
    assert (red.sum() > 30) == ("10,20" in pixels)
    assert round((grid.shape[1] - 72) / 360) == columns  # 180 dpi: 2 inches per panel, 0.4 of margin


def test_a_model_without_a_cls_token(photograph, tmp_path, capsys):
    arguments = [VIT, str(photograph), *ARGUMENTS, "--model-args=class_token=false", "--model-args=global_pool=avg"]
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
        ([VIT, *ARGUMENTS, "--layers", "stage*"], "none is called 'stage*': blocks.0.attn, blocks.1.attn"),
        (
            [VIT, *ARGUMENTS, "--input-size", "64", "64"],
            "VisionTransformer does not accept an input of 64×64 pixels: Input height (64) doesn't match model (48).",
        ),
        ([VIT, *ARGUMENTS, "--model-args=attn_layer=diff"], "VisionTransformer has none"),
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
    assert main([VIT, *ARGUMENTS, f"--model-args=attn_layer={kind}", "--list"]) == 0
    assert capsys.readouterr().out.split() == [f"blocks.{n}.attn" for n in range(3)]


@pytest.mark.parametrize("kind", ["attn", "attn1111"])
def test_a_segmentor_with_a_vision_transformer(kind, photograph, tmp_path, capsys):
    pytest.importorskip("mmseg", reason="mmseg is not installed")
    config = tmp_path / "segmentor.py"
    config.write_text(
        "custom_imports = dict(imports=['attn_plugins.mmcv', 'attn_plugins.timm'])\n"
        "default_scope = 'mmseg'\n"
        "model = dict(type='EncoderDecoder', data_preprocessor=dict(type='SegDataPreProcessor', size=(64, 96)),\n"
        f"    backbone=dict(type='TIMMBackbone', model_name='{VIT}', features_only=True, pretrained=False,\n"
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

    places = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]  # layer and head of each panel
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
    assert main([VIT, str(photograph), "--output", str(tmp_path), *arguments]) == 0
    browser.open(tmp_path / "attention.html")
    browser.run("image.decode()")
    assert browser.run("getComputedStyle(clsButton).display") == "none"
    assert browser.run("where.textContent").startswith("Query: pixel (")
    assert "cls" not in browser.run("panels[0].text.textContent")
