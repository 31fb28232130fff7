"""Attention maps of real models on a photograph: in Python, as PNG grids, and on the page in a browser."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

timm = pytest.importorskip("timm")

from skimage import data  # noqa: E402

from attn_plugins.modules import (  # noqa: E402
    AAConv2d,
    BilateralNonLocal2d,
    CrissCrossAttention2d,
    GeneralizedAttention2d,
    LocalBilateralConv2d,
    NonLocal2d,
    capture_attention,
)
from tests.tools.show_attention_helpers import page_data, same_picture  # noqa: E402
from tools.attention_view import mm, page, view  # noqa: E402
from tools.pictures import open_picture  # noqa: E402
from tools.show_attention import main  # noqa: E402
from tools.train.checkpoint import read_weights, save_weights  # noqa: E402
from tools.train.config import Config  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def photograph(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("photograph") / "cat <1>.png"
    Image.fromarray(data.chelsea()).save(file)
    return file


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model("aa_resnet34", img_size=64).eval()


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown(photograph, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("shown")
    arguments = ["aa_resnet34", str(photograph), "--output", str(output), "--input-size", "96", "128"]
    torch.manual_seed(0)
    assert main([*arguments, "--pixels", "60,80", "--pixels", "299,450", "--model-args", "img_size=[96, 128]"]) == 0
    return output


def test_a_grid_for_every_stage(shown):
    assert {f.name for f in shown.iterdir()} == {
        "layer2.3.conv1.png", "layer3.5.conv1.png", "layer4.2.conv1.png", "attention.html"
    }  # fmt: skip
    grid = np.asarray(Image.open(shown / "layer3.5.conv1.png").convert("RGB")).astype(int)
    red = (grid[..., 0] > 200) & (grid[..., 1] < 60) & (grid[..., 2] < 60)
    assert red.sum() > 50  # the crosses
    assert grid.shape[0] > grid.shape[1]  # nine rows, two columns


def test_the_page_holds_the_maps_and_nothing_from_elsewhere(shown):
    text = (shown / "attention.html").read_text()
    assert "cat &lt;1&gt;.png" in text
    assert "cat <1>" not in text
    assert not re.search(r"(src|href|url)\s*[=(]\s*[\"']?(https?:)?//", text)
    assert "@" not in re.sub(r"@media[^{]*", "", text.partition("const data")[0])
    assert [layer["name"] for layer in page_data(shown / "attention.html")["layers"]] == [
        "layer2.3.conv1", "layer3.5.conv1", "layer4.2.conv1"
    ]  # fmt: skip


def test_large_maps_are_thinned_with_a_note(photograph):
    model = timm.create_model("aa_wide_resnet28_10", depth=10, width=5, img_size=36).eval()
    seen = view.view_timm(model, open_picture(photograph), ["layer1.0.conv1"], (36, 12))
    (layer,) = seen.captured.values()
    found, notes = page.thinned(layer)
    maps, uniform = found.maps.numpy(), found.uniform.numpy()
    assert maps.shape == (8, 16, 12, 28, 12)
    np.testing.assert_allclose(uniform, np.full((16, 12), 1 / (36 * 12)))
    assert notes == ["16×12 of 36×12 queries", "36×12 keys averaged to 28×12"]
    row = (2 * 5 + 1) * 36 // 32
    whole = layer.maps(torch.tensor([[row, 7]]))[0, :, 0]
    expected = torch.nn.functional.adaptive_avg_pool2d(whole, (28, 12)).numpy()
    np.testing.assert_allclose(maps[:, 5, 7], expected, rtol=1e-4)
    bytes_, peaks = page.quantised(maps)
    assert np.abs(bytes_ / 255 * peaks[..., None, None] - maps).max() <= 0.51 / 255 * peaks.max()


def test_pixels_find_their_cells(photograph):
    model = small()
    seen = view.view_timm(model, open_picture(photograph), ["layer4.2.conv1"], (64, 128))  # 2×4 cells
    (layer,) = seen.captured.values()
    assert seen.file_size == (300, 451)
    assert [seen.cell(layer.size, p) for p in [(0, 0), (149, 112), (150, 113), (299, 450)]] == [
        (0, 0), (0, 0), (1, 1), (1, 3)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """Save a small model like ``tools.train``, by input size: 16×24, and one without a recorded size."""
    root, options, found = tmp_path_factory.mktemp("checkpoints"), dict(depth=10, width=5, position="sine"), {}
    for name, size in (("sized", (16, 24)), ("unsized", None)):
        torch.manual_seed(1)
        model = timm.create_model("aa_wide_resnet28_10", num_classes=3, img_size=size or 32, **options)
        config = Config("aa_wide_resnet28_10", options, input_size=size)
        found[name] = root / name / "best.safetensors"
        save_weights(found[name], model, config, ["a", "b", "c"])
    return found


def test_a_trained_checkpoint_brings_its_own_arguments_and_size(checkpoints, photograph, tmp_path, capsys):
    loaded = view.load_timm("aa_wide_resnet28_10", checkpoints["sized"], {})
    weights = read_weights(checkpoints["sized"])[0]
    assert all(torch.equal(value, weights[key]) for key, value in loaded.state_dict().items())
    assert (loaded.num_classes, loaded.layer1[0].conv1.position) == (3, "sine")
    given = ["--input-size", "40", "32"]
    for name, more, words in (
        ("sized", [], "input: 16×24 pixels, at which the checkpoint was trained"),
        ("unsized", [], "input: 32×32 pixels, the model's own; --input-size H W takes another"),
        ("sized", given, "input: 40×32 pixels, as given"),
    ):
        arguments = ["aa_wide_resnet28_10", str(photograph), "--checkpoint", str(checkpoints[name]), *more]
        assert main([*arguments, "--output", str(tmp_path / name), "--pixels", "0,0"]) == 0
        assert capsys.readouterr().out.splitlines()[0] == words


def test_a_checkpoint_of_another_model(checkpoints, photograph, tmp_path, capsys):
    for model, words in (
        (["aa_resnet34"], "must be weights of aa_resnet34, but SIZED holds those of aa_wide_resnet28_10"),
        (["aa_wide_resnet28_10", "--model-args", "width=6"], "SIZED does not fit aa_wide_resnet28_10 {"),
    ):
        arguments = [model[0], str(photograph), *model[1:], "--checkpoint", str(checkpoints["sized"])]
        assert main([*arguments, "--output", str(tmp_path / "out")]) == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert words.replace("SIZED", str(checkpoints["sized"])) in error
    (tmp_path / "broken.safetensors").write_bytes(b"no weights")
    arguments = ["aa_resnet34", str(photograph), "--checkpoint", str(tmp_path / "broken.safetensors")]
    assert main(arguments) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("show_attention: --checkpoint must be weights in safetensors, got ")


@pytest.mark.slow
def test_every_model_and_picture_has_a_folder_of_its_own(checkpoints, photograph, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        Image.open(photograph).resize((40, 30)).save(tmp_path / folder / "1.jpg")

    def folder_of(image: str, *arguments: str) -> str:
        assert main(["aa_wide_resnet28_10", image, "--pixels", "0,0", *arguments]) == 0
        files = [Path(line) for line in capsys.readouterr().out.splitlines() if line.endswith((".png", ".html"))]
        (found,) = {file.parent for file in files}
        assert {file.name for file in found.iterdir()} == {"shown.json", *(file.name for file in files)}
        return found.relative_to("work_dirs/attention").as_posix()

    weights = [["--checkpoint", str(checkpoints[name])] for name in ("sized", "unsized")]
    for _ in range(2):  # the same again: in the same place
        assert folder_of("a/1.jpg", *weights[0]) == "aa_wide_resnet28_10-sized-best/1"
        assert folder_of("b/1.jpg", *weights[0]) == "aa_wide_resnet28_10-sized-best/1-2"
        assert folder_of("b/1.jpg", *weights[1]) == "aa_wide_resnet28_10-unsized-best/1"
        assert folder_of("b/1.jpg", "--model-args", "depth=10") == "aa_wide_resnet28_10/1"
        assert folder_of("b/1.jpg", "--model-args", "depth=16") == "aa_wide_resnet28_10/1-2"


@pytest.mark.parametrize(
    "layer, keys",
    [
        (AAConv2d(8, 8, 3, 4, 4, 2, input_size=(6, 5)), np.full((6, 5), 30)),
        (NonLocal2d(8), np.full((6, 5), 30)),
        (BilateralNonLocal2d(8), np.full((6, 5), 30)),
        (GeneralizedAttention2d(8, 2, "1111", kv_stride=2), np.full((6, 5), 9)),
        (GeneralizedAttention2d(8, 2, "1111", spatial_range=3), np.outer([2, 3, 3, 3, 3, 2], [2, 3, 3, 3, 2])),
        (CrissCrossAttention2d(8), np.full((6, 5), 10)),
        (LocalBilateralConv2d(8, 8, 3, num_heads=2), np.outer([2, 3, 3, 3, 3, 2], [2, 3, 3, 3, 2])),
    ],
    ids=["augmented", "non-local", "bilateral", "strided", "range", "criss-cross", "window"],
)
def test_the_uniform_weight_counts_the_keys_of_a_query(layer, keys):
    x = 100 * torch.randn(1, 8, 6, 5)  # sharp attention: the weights of most keys round to 0
    with capture_attention(torch.nn.ModuleDict({"layer": layer.eval()})) as captured, torch.no_grad():
        layer(x)
    queries = torch.cartesian_prod(torch.arange(6), torch.arange(5))
    uniform = view.uniform_weights(captured["layer"], queries)
    np.testing.assert_allclose(uniform.view(6, 5).numpy(), 1 / keys, rtol=1e-6)


def test_listing(capsys):
    assert main(["attn1111_resnet50", "--list"]) == 0
    assert capsys.readouterr().out.split() == [f"layer{s}.{n}.attention" for s, m in ((3, 6), (4, 3)) for n in range(m)]


def test_a_detector_by_its_config(photograph, tmp_path, capsys):
    pytest.importorskip("mmdet", reason="mmdet is not installed")
    config = ROOT / "configs/mmdet/digits/atss_narrow-r50-attn0010-dcn_fpn_digits.py"
    pixels = ["--pixels", "10,20", "--pixels", "200,300"]
    assert main([str(config), str(photograph), "--output", str(tmp_path), *pixels]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines() if line.endswith((".png", ".html"))]
    assert len(written) >= 2
    assert all(file.is_file() for file in written)
    assert all("backbone" in layer["name"] for layer in page_data(tmp_path / "attention.html")["layers"])


def test_the_picture_is_what_the_detector_sees(photograph):
    pytest.importorskip("mmdet", reason="mmdet is not installed")
    config = ROOT / "configs/mmdet/digits/atss_narrow-r50-attn0010-dcn_fpn_digits.py"
    seen = mm.view_mm(mm.load_mm(str(config), None), photograph, [])
    h, w = (round(n * s) for n, s in zip(seen.file_size, seen.scale))
    assert seen.file_size == (300, 451)
    assert seen.picture.shape[0] >= h
    resized = Image.open(photograph).convert("RGB").resize((w, h), Image.Resampling.BILINEAR)
    difference = np.abs(seen.picture[:h, :w].astype(int) - np.asarray(resized).astype(int))
    assert difference.mean() < 6  # colours in order, the picture in its place
    padding = seen.picture[h:].reshape(-1, 3)
    assert (padding == padding[:1]).all()


def test_a_segmentor_by_its_config(photograph, tmp_path):
    pytest.importorskip("mmseg", reason="mmseg is not installed")
    config = tmp_path / "segmentor.py"
    config.write_text(
        "_base_ = 'mmseg::_base_/models/fcn_r50-d8.py'\n"
        "custom_imports = dict(imports='attn_plugins.mmcv')\n"
        "default_scope = 'mmseg'\n"
        "norm = dict(type='BN', requires_grad=True)\n"
        "model = dict(pretrained=None, data_preprocessor=dict(size=(64, 96)), backbone=dict(norm_cfg=norm, plugins=[\n"
        "    dict(cfg=dict(type='GeneralizedAttention2d', num_heads=8, attention_type='1111'),\n"
        "         stages=(False, False, False, True), position='after_conv2')]),\n"
        "    decode_head=dict(norm_cfg=norm), auxiliary_head=dict(norm_cfg=norm))\n"
        "test_pipeline = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=(96, 64)),\n"
        "                 dict(type='PackSegInputs')]\n"
        "test_dataloader = dict(dataset=dict(type='CityscapesDataset', pipeline=test_pipeline))\n"
    )
    assert main([str(config), str(photograph), "--output", str(tmp_path / "out")]) == 0
    (layer,) = page_data(tmp_path / "out/attention.html")["layers"]
    assert layer["heads"] == 8


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["resnet18", "IMAGE"], "ResNet has none"),
        (
            ["no_such_model", "IMAGE"],
            "MODEL must be a model of timm or a config file (*.py) of mmdet or mmseg, got 'no_such_model'",
        ),
        (["nowhere.py", "IMAGE"], "MODEL nowhere.py cannot be read as a config"),
        (["aa_resnet34", "IMAGE", "--layers", "stage*"], "none is called 'stage*'"),
        (["aa_resnet34", "IMAGE", "--pixels", "300,10"], "must lie in the picture of 300 rows and 451 columns"),
        (["aa_resnet34", "IMAGE", "--pixels", "3;4"], "--pixels must be Y,X in pixels of the picture, got '3;4'"),
        (["aa_resnet34", "nowhere.png"], "nowhere.png cannot be read as a picture"),
        (["aa_resnet34"], "IMAGE is missing: name a picture, --slots or --list"),
        (["aa_resnet43", "IMAGE"], "got 'aa_resnet43': did you mean aa_resnet34"),
        (["aa_resnet34", "IMAGE", "--checkpoint", "IMAGE"], "--checkpoint PHOTO does not fit aa_resnet34 {}: "),
        (["aa_resnet34", "IMAGE", "--input-size", "0", "32"], "--input-size must be H W, at least 1 each, got [0, 32]"),
        (["aa_resnet34", "IMAGE", "--checkpoint", "nowhere.pth"], "--checkpoint must be a file, got nowhere.pth"),
        (["aa_resnet34", "IMAGE", "--model-args", "kappa"], "--model-args must be KEY=VALUE, got 'kappa'"),
        (["aa_resnet34", "IMAGE", "--model-args", "nu=2"], "nu must be from 0 to 1, got 2"),
    ],
)
def test_bad_arguments(arguments, words, photograph, tmp_path, capsys):
    if arguments[0].endswith(".py"):
        pytest.importorskip("mmengine", reason="mmengine is not installed")
    arguments = [str(photograph) if a == "IMAGE" else a for a in arguments]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert words.replace("PHOTO", str(photograph)) in line
    assert not (tmp_path / "out").exists()


# --- the page in a browser ----------------------------------------------------------------------------------------


def test_a_click_and_the_arrow_keys_change_every_map(shown, browser):
    file = shown / "attention.html"
    browser.open(file)
    browser.run("image.decode()")
    browser.run("(() => { opacity.value = 0; opacity.dispatchEvent(new Event('input')); })()")
    assert browser.run("panels.length") == 24
    box = browser.run(
        "(() => { const b = picture.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
    )
    browser.click(box[0] + 0.9 * box[2], box[1] + 0.2 * box[3])
    # Maps of 6×8 (pooled), 6×8 and 3×4 cells.
    for layer, cell in ((0, (1, 7)), (1, (1, 7)), (2, (0, 3))):
        for head in (0, 5):
            same_picture(browser, file, 8 * layer + head, head, layer, cell)
    assert browser.run("where.textContent") == "Query: pixel (60, 405) of 300 rows and 451 columns"
    browser.run("picture.focus()")
    browser.key("ArrowLeft")
    browser.key("ArrowDown")
    browser.key("ArrowDown")
    for layer, cell in ((0, (3, 6)), (2, (1, 3))):
        same_picture(browser, file, 8 * layer + 2, 2, layer, cell)
    for _ in range(9):
        browser.key("ArrowUp")
    same_picture(browser, file, 3, 3, 0, (0, 6))
    browser.key("ArrowLeft", modifiers=8)
    same_picture(browser, file, 3, 3, 0, (0, 2))
    assert browser.run("where.getAttribute('aria-live')") == "polite"
    assert file.as_uri() in browser.requests
    assert all(url.startswith(("file:", "data:")) for url in browser.requests)


def test_the_controls_work_by_keyboard_and_on_a_narrow_screen(shown, browser):
    browser.send("Emulation.setDeviceMetricsOverride", width=360, height=700, deviceScaleFactor=1, mobile=True)
    browser.open(shown / "attention.html")
    browser.run("image.decode()")
    assert browser.run("document.documentElement.scrollWidth") <= 360
    order = []
    for _ in range(4):
        browser.send("Input.dispatchKeyEvent", type="rawKeyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        order.append(browser.run("document.activeElement.id || document.activeElement.className"))
        assert browser.run("getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert order == ["picture", "layer", "opacity", "head"]
    browser.run("(() => { select.value = '2'; select.dispatchEvent(new Event('change')); })()")
    assert browser.run("panels.map(p => p.section.hidden)") == [True] * 16 + [False] * 8
    browser.run("panels[16].canvas.closest('button').click()")
    wide, other = (browser.run(f"panels[{n}].canvas.getBoundingClientRect().width") for n in (16, 17))
    assert wide > 1.5 * other
    assert browser.run("panels[16].canvas.closest('button').getAttribute('aria-pressed')") == "true"
    assert re.fullmatch(
        r"head 1: max [\d.]+ % at row \d+, column \d+ \(uniform [\d.]+ %\)", browser.run("panels[16].text.textContent")
    )
    browser.send("Emulation.clearDeviceMetricsOverride")
