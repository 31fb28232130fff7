"""``python -m tools.view`` on timm's models: its numbers, its files, the page in a browser, and what it refuses."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

timm = pytest.importorskip("timm")

import attn_plugins.timm  # noqa: E402, F401
from attn_plugins.modules import (  # noqa: E402
    AAConv2d,
    BilateralNonLocal2d,
    CrissCrossAttention2d,
    GeneralizedAttention2d,
    LocalBilateralConv2d,
    MultiScaleDeformableAttention,
    NonLocal2d,
    capture_attention,
)
from tests.tools.view_helpers import click, names_in, numbers, page_data, run, weights_of  # noqa: E402
from tools.pictures import open_picture  # noqa: E402
from tools.train.checkpoint import save_weights  # noqa: E402
from tools.train.config import Config  # noqa: E402
from tools.view import layers, models, page  # noqa: E402

VIT, NARROW = "vit_tiny_patch16_224", dict(depth=10, width=1, img_size=16, kappa=0.5, nu=0.5)
SMALL_VIT = dict(img_size=(48, 64), embed_dim=32, depth=3, num_heads=2, attn_layer="attn1111", reg_tokens=2)
SWIN = dict(img_size=(64, 64), window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4))
PADDED = dict(SMALL_VIT, dynamic_img_size=True, dynamic_img_pad=True)


def options_of(arguments: dict) -> list[str]:
    return [f"--model-args={key}={list(n) if isinstance(n, tuple) else n}" for key, n in arguments.items()]


def sharp(name: str, **options) -> nn.Module:
    """Build a model with weights far from uniform."""
    torch.manual_seed(0)
    model = timm.create_model(name, **options).eval()
    for layer in layers.known_layers(model).values():
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.3)
    return model


# --- numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "size", "names"),
    [
        ("aa_wide_resnet28_10", NARROW, (16, 16), ["layer2.0.conv1", "layer3.0.conv1"]),
        (VIT, SMALL_VIT, (48, 64), ["blocks.2.attn"]),
        (VIT, PADDED, (70, 33), ["blocks.2.attn"]),
        ("attn_swinv2_tiny_window8_256", SWIN, (64, 64), ["layers.0.blocks.0.attn", "layers.1.blocks.0.attn"]),
    ],
    ids=["augmented", "vit", "padded vit", "swin"],
)
def test_the_page_holds_the_maps_of_capture_attention(name, options, size, names, photograph, tmp_path):
    model, image = sharp(name, **options), open_picture(photograph)
    config = timm.data.resolve_model_data_config(model)
    mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
    x = torch.from_numpy(np.array(image.resize(size[::-1], Image.Resampling.BICUBIC))).permute(2, 0, 1) / 255
    with capture_attention(model, names) as captured, torch.no_grad():
        model(((x - mean) / std).unsqueeze(0))
    seen = models.view_timm(model, image, names, size)
    page.write_page(seen, "", tmp_path / "a.html")
    held = page_data(tmp_path / "a.html")["layers"]
    assert [layer["name"] for layer in held] == list(captured) == names
    for layer, call in zip(held, captured.values()):
        expected = call.maps()[0]
        assert (layer["heads"], *layer["queries"], *layer["keys"]) == expected.shape
        np.testing.assert_allclose(weights_of(layer), expected, atol=0.51 / 255 * float(expected.max()))
        extra = 1 + options.get("reg_tokens", -1)  # keys that are no patches; a window has 16
        keys = 16 if name.startswith("attn_swin") else expected[0, 0, 0].numel()
        np.testing.assert_allclose(numbers(layer["uniform"], "<f4"), 1 / (keys + extra), rtol=1e-6)


def test_the_picture_is_padded_as_the_patches_are(photograph):
    image = open_picture(photograph)
    seen = models.view_timm(sharp(VIT, **PADDED), image, [], (70, 33))
    assert (seen.size, seen.inside, seen.file_size) == ((80, 48), (70, 33), (300, 451))
    assert seen.cells((5, 3), [(0, 0), (149, 112), (299, 450)]).tolist() == [[0, 0], [2, 0], [4, 2]]
    assert not seen.picture[70:].any()


def test_large_maps_are_thinned_with_a_note(photograph):
    model = sharp("aa_wide_resnet28_10", depth=10, width=5, img_size=36)
    seen = models.view_timm(model, open_picture(photograph), ["layer1.0.conv1"], (36, 12))
    (call,) = seen.layers
    data = page.layer_data(call)
    assert data["note"] == "16×12 of 36×12 queries; 36×12 keys averaged to 28×12"
    expected = F.adaptive_avg_pool2d(call.maps(torch.tensor([[(2 * 5 + 1) * 36 // 32, 7]]))[0, :, 0], (28, 12))
    np.testing.assert_allclose(weights_of(data)[:, 5, 7], expected, atol=0.51 / 255 * float(expected.max()))


@pytest.mark.parametrize(
    ("layer", "keys"),
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
    model, x = nn.ModuleDict({"layer": layer.eval()}), 100 * torch.randn(1, 8, 6, 5)  # most weights round to 0
    with layers.capture(model) as captured, torch.no_grad():
        layer(x)
    queries = torch.cartesian_prod(torch.arange(6), torch.arange(5))
    np.testing.assert_allclose(layers.uniform(captured["layer"], queries).view(6, 5), 1 / keys, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "size", "titles"),
    [
        ("aa_wide_resnet28_10", NARROW, (16, 16), ["content", "position"]),
        (VIT, SMALL_VIT, (48, 64), list(layers.FOUR_TERMS.values())),
    ],
)
def test_parts_multiply_to_the_whole_attention(name, options, size, titles, photograph):
    """The normalized product of the terms' softmaxes is the softmax of the sum of their logits."""
    seen = models.view_timm(sharp(name, **options), open_picture(photograph), [], size)
    queries, call = torch.tensor([[1, 2], [0, 0]]), seen.layers[-1]
    parts = layers.parts(call, queries)
    assert list(parts) == titles
    joint, whole = torch.stack([part.double() for part in parts.values()]).prod(0), call.maps(queries)[0].double()
    sums = [maps.sum((-2, -1), keepdim=True) for maps in (joint, whole)]  # without class tokens and registers
    torch.testing.assert_close(joint / sums[0], whole / sums[1], rtol=1e-4, atol=1e-6)


# --- files --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_grid_for_every_stage(photograph, tmp_path, capsys):
    picture, output = tmp_path / "cat <1>.png", tmp_path / "out"
    Image.open(photograph).save(picture)
    arguments = ["--input-size", 16, 16, *options_of(NARROW), "--parts", "--output", output]
    assert run("aa_wide_resnet28_10", picture, *arguments, "--pixels", "299,450") == 0
    stages = ["layer1.0.conv1", "layer2.0.conv1", "layer3.0.conv1"]
    assert names_in(output) == {*(f"{name}{kind}.png" for name in stages for kind in ("", ".parts")), "attention.html"}
    assert capsys.readouterr().out.splitlines()[0] == "input: 16×16 pixels, as given"
    grid, parts = (Image.open(output / f"layer3.0.conv1{kind}.png").convert("RGB") for kind in ("", ".parts"))
    assert grid.height > grid.width
    assert parts.width > 2 * parts.height  # one row of four
    red = np.asarray(grid).astype(int)
    assert ((red[..., 0] > 200) & (red[..., 1:] < 60).all(-1)).sum() > 20  # crosses
    text = (output / "attention.html").read_text()
    assert "cat &lt;1&gt;.png" in text
    assert "cat <1>" not in text


@pytest.mark.slow
def test_logits_of_one_term_have_no_parts(photograph, tmp_path, capsys):
    arguments = ["--parts", "--input-size", 32, 32, "--layers", "layer4.2.*", "--model-args", "attention_type='1000'"]
    assert run("attn_resnet50", photograph, *arguments, "--output", tmp_path) == 0
    assert "no layer shown has more than one term in its logits" in capsys.readouterr().out
    assert names_in(tmp_path) == {"layer4.2.attention.png", "attention.html"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Save a small model like ``tools.train``, for 16×24 pixels."""
    options, file = dict(depth=10, width=5, position="sine"), tmp_path_factory.mktemp("out") / "run/best.safetensors"
    model = timm.create_model("aa_wide_resnet28_10", num_classes=3, img_size=(16, 24), **options)
    save_weights(file, model, Config("aa_wide_resnet28_10", options, input_size=(16, 24)), ["a", "b", "c"])
    return file


def test_a_trained_checkpoint_brings_its_own_arguments_and_size(trained, photograph, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("aa_wide_resnet28_10", photograph, "--checkpoint", trained, "--pixels", "0,0") == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "input: 16×24 pixels, at which the checkpoint was trained"
    assert printed[-1] == "work_dirs/attention/aa_wide_resnet28_10-run-best/cat/attention.html"
    assert models.load_timm("aa_wide_resnet28_10", trained, {})[0].num_classes == 3


@pytest.mark.slow
def test_so_does_a_checkpoint_of_timms_train_py(photograph, tmp_path, monkeypatch, capsys):
    """Saved by timm's own class; its options are those of train.py's parser that describe the model."""
    monkeypatch.chdir(tmp_path)
    options = dict(depth=10, width=5, img_size=24)
    model = timm.create_model("aa_wide_resnet28_10", num_classes=3, **options)
    args = Namespace(model="aa_wide_resnet28_10", num_classes=3, gp=None, img_size=24, input_size=None, lr=0.1)
    args.model_kwargs = options
    (tmp_path / "run").mkdir()
    optimizer = torch.optim.SGD(model.parameters(), args.lr)
    timm.utils.CheckpointSaver(model, optimizer, args, checkpoint_dir="run").save_checkpoint(0, metric=50.0)
    assert run(args.model, photograph, "--checkpoint", "run/model_best.pth.tar") == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "input: 24×24 pixels, at which the checkpoint was trained"
    assert printed[-1] == "work_dirs/attention/aa_wide_resnet28_10-run-model_best/cat/attention.html"
    loaded, _ = models.load_timm(args.model, Path("run/model_best.pth.tar"), {})
    torch.testing.assert_close(loaded.state_dict(), model.state_dict())
    args.input_size = (3, 16, 32)
    torch.save(dict(arch=args.model, args=args, state_dict={}), "wide.pth.tar")
    assert models.training_of(Path("wide.pth.tar")).size == (16, 32)
    assert run("aa_resnet34", photograph, "--checkpoint", "run/model_best.pth.tar") == 2
    assert "holds those of aa_wide_resnet28_10" in capsys.readouterr().err


def test_other_weights_bring_no_arguments(tmp_path):
    torch.save({"weight": torch.ones(1)}, tmp_path / "weights.pth")
    torch.save(torch.ones(1), tmp_path / "tensor.pth")
    torch.save(timm.create_model("test_vit"), tmp_path / "module.pth")
    torch.save({}, tmp_path / "legacy.pth", _use_new_zipfile_serialization=False)
    (tmp_path / "empty.pth").touch()
    for file in tmp_path.iterdir():
        assert models.training_of(file) == models.Training()


OURS = ["aa_resnet34", "IMAGE"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["resnet18", "IMAGE"], "ResNet has none"),
        (["no_such_model", "IMAGE"], "MODEL must be a model of timm or a config file (*.py) of mmdet or mmseg, got"),
        (["aa_resnet34", "nowhere.png"], "nowhere.png cannot be read as a picture"),
        (["nowhere.py", "IMAGE"], "--checkpoint is missing: nowhere.py has no weights"),
        ([*OURS, "--layers", "stage*"], "none is called 'stage*'"),
        ([*OURS, "--pixels", "300,10"], "must lie in the picture of 300 rows and 451 columns"),
        ([*OURS, "--pixels", "3;4"], "--pixels must be Y,X in pixels of the picture, got '3;4'"),
        ([VIT, "IMAGE", *options_of(SMALL_VIT), "--input-size", "64", "64"],
         "VisionTransformer does not accept 64×64 pixels; a ViT accepts any with --model-args dynamic_img_size=true"),
        ([*OURS, "--model-args", "kappa"], "--model-args must be KEY=VALUE, got 'kappa'"),
        ([*OURS, "--model-args", "kappa=["], "--model-args must be KEY=VALUE with a value in YAML, got 'kappa=[': "),
        ([VIT, "IMAGE", "--model-args", "attn_layer=attn9999"], f"MODEL {VIT} with {{'attn_layer': 'attn9999'}}: "),
        ([*OURS, "--checkpoint", "nowhere.pth"], "--checkpoint must be a file, got nowhere.pth"),
        ([*OURS, "--checkpoint", "IMAGE"], " does not fit aa_resnet34 {}: "),
        ([*OURS, "--checkpoint", "TRAINED"], " holds those of aa_wide_resnet28_10"),
        ([*OURS, "--follow"], "--follow needs a config of mmdet"),
    ],
)  # fmt: skip
def test_bad_arguments(arguments, words, photograph, trained, tmp_path, capsys):
    names = dict(IMAGE=photograph, TRAINED=trained)
    assert run(*(names.get(a, a) for a in arguments), "--output", tmp_path / "out") == 2
    assert words in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_no_folder(photograph, capsys):
    assert run("attn_resnet50", photograph, "--input-size", 32, 32, "--output", photograph) == 2
    assert capsys.readouterr().err == f"view: [Errno 17] File exists: '{photograph}'\n"


# --- the page in a browser ----------------------------------------------------------------------------------------


def test_a_click_and_the_arrow_keys_change_every_map(photograph, tmp_path, browser):
    model = timm.create_model("aa_resnet34", img_size=(96, 128)).eval()
    page.write_page(models.view_timm(model, open_picture(photograph), [], (96, 128)), "", tmp_path / "a.html")
    browser.open(tmp_path / "a.html")
    browser.run("image.decode()")
    assert browser.run("panels.length") == 24
    maps = list(map(weights_of, page_data(tmp_path / "a.html")["layers"]))

    def check(*cells: tuple[int, int]) -> None:
        """Check text and picture of head 6 of every layer, whose query is in these cells."""
        for n, (y, x) in enumerate(cells):
            values, peak = browser.run(f"(({{ values, peak }}) => [[...values], peak])(mapOf(data.layers[{n}], 5))")
            np.testing.assert_allclose(np.array(values) / 255 * peak, maps[n][5, y, x].ravel(), rtol=1e-5)
            words = browser.run(f"panels[{8 * n + 5}].text.textContent")
            assert re.fullmatch(r"head 6: max [\d.]+ % \(uniform [\d.]+ %\)", words)

    click(browser, "picture", 0.9, 0.2)
    check((1, 7), (1, 7), (0, 3))  # maps of 6×8 (pooled), 6×8 and 3×4 cells
    assert browser.run("where.textContent") == "Query: pixel (60, 405) of 300 rows and 451 columns"
    drawn = browser.run("panels[5].canvas.toDataURL()")
    browser.run("picture.focus()")
    for key in ("ArrowLeft", "ArrowDown", "ArrowDown"):
        browser.key(key)
    check((3, 6), (3, 6), (1, 3))
    assert browser.run("panels[5].canvas.toDataURL()") != drawn
    browser.key("Shift+ArrowLeft")
    check((3, 2), (3, 2), (1, 1))
    browser.run("panels[16].canvas.closest('button').click()")
    wide, other = (browser.run(f"panels[{n}].canvas.getBoundingClientRect().width") for n in (16, 17))
    assert wide > 1.5 * other
    assert all(url.startswith(("file:", "data:")) for url in browser.requests)
    browser.send("Emulation.setDeviceMetricsOverride", width=360, height=700, deviceScaleFactor=1, mobile=True)
    assert browser.run("document.documentElement.scrollWidth") <= 360
    browser.send("Emulation.clearDeviceMetricsOverride")


@torch.no_grad()
def test_sampling_points_on_the_page(photograph, tmp_path, browser):
    """A layer whose every point lies at its reference plus one pixel to the right of each level."""
    layer, shapes = MultiScaleDeformableAttention(8, 2, 2, 3, batch_first=True).eval(), [(4, 6), (2, 3)]
    nn.init.zeros_(layer.sampling_offsets.weight)
    layer.sampling_offsets.bias.copy_(torch.tensor([1.0, 0.0]).repeat(12))
    centres = [torch.cartesian_prod((torch.arange(h) + 0.5) / h, (torch.arange(w) + 0.5) / w) for h, w in shapes]
    references = torch.cat(centres).flip(1)[None, :, None].expand(-1, -1, 2, -1)
    model = nn.ModuleDict({"encoder": layer})
    with layers.capture(model) as captured:
        layer(torch.randn(1, 30, 8), reference_points=references, spatial_shapes=torch.tensor(shapes))
    image = open_picture(photograph)
    page.write_page(models.view_of(image, (40, 60), (40, 60), list(captured.values())), "", tmp_path / "a.html")
    browser.open(tmp_path / "a.html")
    browser.run("image.decode()")
    click(browser, "picture", 0.9, 0.1)
    assert browser.run("panels[0].text.textContent") == "query (0, 5) of 4×6: 12 points"
    blank = browser.run("panels[1].canvas.toDataURL()")
    first = browser.run("[...data.points[0].levels[1].places.slice(0, 12)]")  # of cell (0, 0): level 1, then level 2
    np.testing.assert_allclose(np.reshape(first, (2, 3, 2))[:, 0], [(1 / 6 + 1 / 6, 0.25), (1 / 6 + 1 / 3, 0.25)], 1e-5)
    click(browser, "picture", 0.1, 0.9)
    assert browser.run("panels[1].text.textContent") == "query (1, 0) of 2×3: 12 points"
    assert browser.run("panels[1].canvas.toDataURL()") != blank
