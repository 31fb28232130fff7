"""``python -m tools.view`` on timm's models, detectors and segmentors: the files it writes, and what it refuses."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

timm = pytest.importorskip("timm")

from tests.tools.view_helpers import (  # noqa: E402
    CLIP,
    SMALL_CLIP,
    SMALL_VIT,
    VIT,
    bytes_of,
    names_in,
    options_of,
    page_data,
    run,
    weights_of,
)
from tools.pictures import open_picture  # noqa: E402
from tools.train.checkpoint import read_weights, save_weights  # noqa: E402
from tools.train.config import Config  # noqa: E402
from tools.view import figures, models, page  # noqa: E402

ROOT = Path(__file__).parents[2]
NARROW = dict(depth=10, width=1, img_size=16, kappa=0.5, nu=0.5)
SWIN = dict(img_size=(64, 96), window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4))
NO_CLS = options_of(dict(class_token="false", global_pool="avg"))


def red_in(file: Path) -> int:
    """Return the number of red pixels: crosses."""
    picture = np.asarray(Image.open(file).convert("RGB")).astype(int)
    return int(((picture[..., 0] > 200) & (picture[..., 1:] < 60).all(-1)).sum())


# --- pictures -----------------------------------------------------------------------------------------------------


def test_a_grid_for_every_stage(photograph, tmp_path):
    picture = tmp_path / "cat <1>.png"
    Image.open(photograph).save(picture)
    output = tmp_path / "out"
    arguments = ["--output", output, "--input-size", 96, 128, "--model-args", "img_size=[96, 128]"]
    assert run("aa_resnet34", picture, *arguments, "--pixels", "60,80", "--pixels", "299,450") == 0
    stages = ["layer2.3.conv1", "layer3.5.conv1", "layer4.2.conv1"]
    assert names_in(output) == {*(f"{name}.png" for name in stages), "attention.html"}
    grid = Image.open(output / "layer3.5.conv1.png")
    assert grid.height > grid.width  # nine rows, two columns
    assert red_in(output / "layer3.5.conv1.png") > 50
    text = (output / "attention.html").read_text()
    assert "cat &lt;1&gt;.png" in text
    assert "cat <1>" not in text
    assert [layer["name"] for layer in page_data(output / "attention.html")["layers"]] == stages


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "attn_swinv2_tiny_window8_256"])
def test_swin(name, photograph, tmp_path, capsys):
    assert run(name, photograph, *options_of(SWIN), "--output", tmp_path, "--pixels", "150,200") == 0
    assert names_in(tmp_path) == {"layers.0.blocks.1.attn.png", "layers.1.blocks.1.attn.png", "attention.html"}
    assert capsys.readouterr().out.startswith("input: 64×96 pixels, the model's own; --input-size H W takes another")


@pytest.mark.parametrize("pixels, columns", [(["cls"], 1), (["cls", "10,20"], 2), (["10,20"], 1)])
def test_queries_of_a_vision_transformer(pixels, columns, photograph, tmp_path):
    chosen = [part for pixel in pixels for part in ("--pixels", pixel)]
    more = [*options_of(dict(attn_layer="attn1111", reg_tokens=1)), "--rollout", "--layers", "blocks.[02].*"]
    assert run(VIT, photograph, "--output", tmp_path, *options_of(SMALL_VIT), *more, *chosen) == 0
    names = ["blocks.0.attn", "blocks.2.attn", "rollout"]
    assert names_in(tmp_path) == {*(f"{name}.png" for name in names), "attention.html"}
    assert (red_in(tmp_path / "rollout.png") > 30) == ("10,20" in pixels)
    widths = [Image.open(tmp_path / f"{name}.png").width for name in names]
    assert [round((width - 72) / 360) for width in widths] == [columns] * 3  # 180 dpi: 2 inches per panel
    layers = page_data(tmp_path / "attention.html")["layers"]
    assert [(n["name"], n["names"], n["queries"], n["without"]) for n in layers] == [
        *((name, ["mean of heads", "head 1", "head 2"], [3, 4], "cls and registers") for name in names[:2]),
        ("rollout", ["rollout"], [3, 4], "cls and registers"),
    ]


def test_a_model_without_a_cls_token(photograph, tmp_path, capsys):
    assert run(VIT, photograph, *options_of(SMALL_VIT), *NO_CLS, "--output", tmp_path, "--rollout") == 0
    assert capsys.readouterr().out.splitlines()[1] == "no cls token: its patches alone are queries"
    layers = page_data(tmp_path / "attention.html")["layers"]
    assert [(n["name"], n["cls"], n["elsewhere"]) for n in layers] == [
        ("blocks.2.attn", None, None),
        ("rollout", None, None),
    ]


def test_the_picture_is_padded_as_the_patches_are(photograph):
    model = timm.create_model(VIT, **SMALL_VIT, dynamic_img_size=True, dynamic_img_pad=True)
    seen = models.view_timm(model, [open_picture(photograph)], [], (70, 33))
    assert (seen.size, seen.inside) == ((80, 48), (70, 33))
    assert [seen.cell((5, 3), pixel) for pixel in [(0, 0), (149, 112), (299, 450)]] == [(0, 0), (2, 0), (4, 2)]
    assert not seen.picture[70:].any()


def test_large_maps_are_thinned_with_a_note(photograph):
    model = timm.create_model("aa_wide_resnet28_10", depth=10, width=5, img_size=36).eval()
    (layer,) = models.view_timm(model, [open_picture(photograph)], ["layer1.0.conv1"], (36, 12)).maps
    data = page.layer_data(layer)
    assert data["note"] == "16×12 of 36×12 queries; 36×12 keys averaged to 28×12"
    maps = weights_of({**data, "keys": (28, 12)})
    assert maps.shape == (8, 16, 12, 28, 12)
    whole = layer.look([((2 * 5 + 1) * 36 // 32, 7)])
    expected = torch.nn.functional.adaptive_avg_pool2d(whole.maps[:, 0], (28, 12)).numpy()
    np.testing.assert_allclose(maps[:, 5, 7], expected, atol=0.51 / 255 * expected.max())


def test_parts(photograph, tmp_path, capsys):
    model = timm.create_model("aa_wide_resnet28_10", **NARROW)
    nn.init.normal_(model.layer3[0].conv1.qkv.weight, std=0.5)  # far from uniform maps
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    arguments = ["--checkpoint", tmp_path / "weights.pth", *options_of(NARROW), "--input-size", 16, 16]
    output = tmp_path / "out"
    arguments += ["--parts", "--pixels", "5,7", "--layers", "layer3.*", "--output", output]
    assert run("aa_wide_resnet28_10", photograph, *arguments) == 0
    assert names_in(output) == {"layer3.0.conv1.png", "layer3.0.conv1.parts.png", "attention.html"}
    grid = Image.open(output / "layer3.0.conv1.parts.png").convert("HSV")
    assert grid.width > 3 * grid.height  # the picture, two parts and the whole in one row
    (layer,) = page_data(output / "attention.html")["layers"]
    content, position, whole = map(weights_of, (layer["parts"]["content"], layer["parts"]["position"], layer))
    product = content * position / (content * position).sum((-2, -1), keepdims=True)
    assert np.abs(product - whole).max() < 0.02 * whole.max()
    assert np.abs(position - whole).max() > 0.05 * whole.max()
    assert run("aa_wide_resnet28_10", photograph, *arguments, "--cut", 0.999) == 0  # no weight is left
    coloured, grey = (
        np.asarray(one)[:, one.width // 2 :, 1] > 100
        for one in (grid, Image.open(output / "layer3.0.conv1.parts.png").convert("HSV"))
    )
    assert coloured.sum() > 10 * grey.sum()
    arguments = ["--parts", "--input-size", 32, 32, "--layers", "layer4.2.*", "--model-args", "attention_type='1000'"]
    assert run("attn_resnet50", photograph, *arguments, "--output", tmp_path / "one") == 0
    assert "no layer shown has more than one term in its logits" in capsys.readouterr().out
    assert names_in(tmp_path / "one") == {"layer4.2.attention.png", "attention.html"}


# --- checkpoints and folders --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """Save a small model like ``tools.train``, by input size: 16×24, and one without a recorded size."""
    root, options, files = tmp_path_factory.mktemp("checkpoints"), dict(depth=10, width=5, position="sine"), {}
    for name, size in (("sized", (16, 24)), ("unsized", None)):
        model = timm.create_model("aa_wide_resnet28_10", num_classes=3, img_size=size or 32, **options)
        files[name] = root / name / "best.safetensors"
        save_weights(files[name], model, Config("aa_wide_resnet28_10", options, input_size=size), ["a", "b", "c"])
    return files


def test_a_trained_checkpoint_brings_its_own_arguments_and_size(checkpoints, photograph, tmp_path, capsys):
    loaded = models.load_timm("aa_wide_resnet28_10", checkpoints["sized"], {})
    weights = read_weights(checkpoints["sized"])[0]
    assert all(torch.equal(value, weights[key]) for key, value in loaded.state_dict().items())
    assert (loaded.num_classes, loaded.layer1[0].conv1.position) == (3, "sine")
    for name, more, words in (
        ("sized", [], "16×24 pixels, at which the checkpoint was trained"),
        ("unsized", [], "32×32 pixels, the model's own; --input-size H W takes another"),
        ("sized", ["--input-size", 40, 32], "40×32 pixels, as given"),
    ):
        arguments = ["--checkpoint", checkpoints[name], *more, "--output", tmp_path / name, "--pixels", "0,0"]
        assert run("aa_wide_resnet28_10", photograph, *arguments) == 0
        assert capsys.readouterr().out.splitlines()[0] == f"input: {words}"


def test_every_model_and_picture_has_a_folder_of_its_own(checkpoints, photograph, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        Image.open(photograph).resize((40, 30)).save(tmp_path / folder / "1.jpg")

    def folder_of(image: str, *arguments: object) -> str:
        assert run("aa_wide_resnet28_10", image, "--pixels", "0,0", "--layers", "layer3.0.*", *arguments) == 0
        files = [Path(line) for line in capsys.readouterr().out.splitlines() if line.endswith((".png", ".html"))]
        (folder,) = {file.parent for file in files}
        assert names_in(folder) == {"shown.json", *(file.name for file in files)}
        return folder.relative_to("work_dirs/attention").as_posix()

    sized, unsized = (["--checkpoint", file] for file in checkpoints.values())
    for _ in range(2):  # the same again: in the same place
        assert folder_of("a/1.jpg", *sized) == "aa_wide_resnet28_10-sized-best/1"
        assert folder_of("b/1.jpg", *sized) == "aa_wide_resnet28_10-sized-best/1-2"
        assert folder_of("b/1.jpg", *unsized) == "aa_wide_resnet28_10-unsized-best/1"


# --- clips --------------------------------------------------------------------------------------------------------


def test_a_row_of_frames_for_every_step_and_query(clip, tmp_path, capsys):
    model = timm.create_model(CLIP, **SMALL_CLIP, num_classes=3)
    options = {key: SMALL_CLIP[key] for key in ("embed_dim", "depth", "num_heads")}
    config = Config(CLIP, model_args=options, dataset="clips", frames=4, input_size=(48, 64))
    save_weights(tmp_path / "best.safetensors", model, config, ["a", "b", "c"])
    output = tmp_path / "out"
    assert run(CLIP, clip, "--checkpoint", tmp_path / "best.safetensors", "--output", output, "--rollout") == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "input: 4 frames of 48×64 pixels, at which the checkpoint was trained"
    layers = ["blocks.1.temporal_attn", "blocks.1.attn", "rollout"]
    names = {f"{layer}_{place}.png" for layer in layers for place in ("cls", "2-48-80")}
    names -= {"blocks.1.temporal_attn_cls.png"}
    assert names_in(output) == {*names, "attention.html"}
    assert all((red_in(output / name) > 20) == ("cls" not in name) for name in names)
    data = page_data(output / "attention.html")
    assert (data["frames"], data["file"]) == ([2, 2], [192, 320])
    assert [(n["name"], n["queries"], n["keys"], n["cls"] is None) for n in data["layers"]] == [
        (name, [6, 8], [6, 8], "temporal" in name) for name in layers
    ]


def test_long_clips_are_thinned(clip, tmp_path, monkeypatch):
    """On the page alike in every frame; of many frames, a PNG shows some, including the query's."""
    for name, most in (("MOST_CLIP_QUERIES", 16), ("MOST_CLIP_KEYS", 24)):
        monkeypatch.setattr(page, name, most)
    monkeypatch.setattr(figures, "MOST_FRAMES", 4)
    model = timm.create_model(CLIP, **{**SMALL_CLIP, "num_frames": 8}).eval()
    view = models.view_timm(model, models.open_input(model, clip, CLIP), [], (48, 64))
    data = page.layer_data(view.maps[-1])
    assert data["note"] == "2×8 of 6×16 queries; 6×16 keys averaged to 2×12"
    assert bytes_of(data).shape == (3, 2, 8, 2, 12)
    widths = []
    for query in ((7, 95, 80), (6, 95, 80)):  # 1, 3, 5 and 7, and the query's
        figures.draw_clip(view, view.maps[0], query, tmp_path / "some.png")
        widths.append(Image.open(tmp_path / "some.png").width)
    assert (widths[1] - widths[0]) / 180 == pytest.approx(1.3 * 64 / 48, abs=0.2)


# --- detectors and segmentors -------------------------------------------------------------------------------------

SEGMENTOR = """
custom_imports = dict(imports=['attn_plugins.mmcv', 'attn_plugins.timm'])
default_scope = 'mmseg'
model = dict(type='EncoderDecoder', data_preprocessor=dict(type='SegDataPreProcessor', size=(64, 96)),
    backbone=dict(type='TIMMBackbone', model_name='NAME', features_only=True, pretrained=False,
        out_indices=(0, 1), attn_layer='KIND', img_size=(64, 96), embed_dim=32, depth=3, num_heads=2),
    decode_head=dict(type='FCNHead', in_channels=32, in_index=1, channels=8, num_convs=1, num_classes=19),
    test_cfg=dict(mode='whole'))
test_pipeline = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=(96, 64), keep_ratio=False),
                 dict(type='PackSegInputs')]
test_dataloader = dict(dataset=dict(type='CityscapesDataset', pipeline=test_pipeline))
"""


@pytest.mark.parametrize("kind", ["attn", "attn1111"])
def test_a_segmentor(kind, photograph, tmp_path, capsys):
    pytest.importorskip("mmseg", reason="mmseg is not installed")
    config, output = tmp_path / "segmentor.py", tmp_path / "out"
    config.write_text(SEGMENTOR.replace("NAME", VIT).replace("KIND", kind))
    assert run(config, "--list") == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "blocks" in line]
    assert [name.partition("blocks.")[2] for name in listed] == ["0.attn", "1.attn"]
    assert run(config, photograph, "--output", output, "--rollout", "--pixels", "cls") == 0
    first, second = page_data(output / "attention.html")["layers"]
    assert first["name"] == listed[1]
    assert second["name"].endswith(".rollout")
    assert (first["heads"], first["queries"], first["cls"] is None) == (3, [4, 6], False)
    config.write_text(config.read_text().replace("scale=(96, 64)", "scale=(128, 64)"))
    assert run(config, photograph, "--output", tmp_path / "no") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "the model does not accept the picture: Input width (128) doesn't match model (96)." in error


def test_the_picture_is_what_the_detector_sees(photograph):
    pytest.importorskip("mmdet", reason="mmdet is not installed")
    config = ROOT / "configs/mmdet/digits/atss_narrow-r50-attn0010-dcn_fpn_digits.py"
    seen = models.view_mm(models.load_mm(str(config), None), photograph, [])
    assert all("backbone" in layer.name for layer in seen.maps)
    h, w = seen.inside
    assert seen.file_size == (300, 451)
    resized = Image.open(photograph).convert("RGB").resize((w, h), Image.Resampling.BILINEAR)
    difference = np.abs(seen.picture[:h, :w].astype(int) - np.asarray(resized).astype(int))
    assert difference.mean() < 6  # colours in order, the picture in its place
    assert len(np.unique(seen.picture[h:].reshape(-1, 3), axis=0)) <= 1  # the padding


# --- lists and bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, names",
    [
        (["attn1111_resnet50"], [f"layer{s}.{n}.attention" for s, m in ((3, 6), (4, 3)) for n in range(m)]),
        ([VIT, *options_of(SMALL_VIT)], [f"blocks.{n}.attn" for n in range(3)]),
        ([CLIP, *options_of(SMALL_CLIP)], [f"blocks.{n}.{step}attn" for n in range(2) for step in ("temporal_", "")]),
    ],
    ids=["ours", "vit", "clip"],
)
def test_listing(arguments, names, capsys):
    assert run(*arguments, "--list") == 0
    assert capsys.readouterr().out.split() == names


OURS, SMALL, FRAMES = ["aa_resnet34", "IMAGE"], [VIT, "IMAGE", *options_of(SMALL_VIT)], options_of(SMALL_CLIP)
FEATURES = [CLIP, "CLIP", *FRAMES]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["resnet18", "IMAGE"], "ResNet has none"),
        (["no_such_model", "IMAGE"], "MODEL must be a model of timm or a config file (*.py) of mmdet or mmseg, got"),
        (["nowhere.py", "IMAGE"], "MODEL nowhere.py cannot be read as a config"),
        (["aa_resnet34"], "IMAGE is missing: name a picture, --slots or --list"),
        (["aa_resnet43", "IMAGE"], "got 'aa_resnet43': did you mean aa_resnet34"),
        (["aa_resnet34", "nowhere.png"], "nowhere.png cannot be read as a picture"),
        (["aa_resnet34", "CLIP"], "IMAGE must be a picture, for aa_resnet34 sees no clips, got "),
        ([CLIP, "EMPTY", *FRAMES], "cannot be read as a clip: it holds no picture"),
        ([*OURS, "--layers", "stage*"], "none is called 'stage*'"),
        ([*OURS, "--pixels", "300,10"], "must lie in the picture of 300 rows and 451 columns"),
        ([*OURS, "--pixels", "3;4"], "--pixels must be Y,X in pixels of the picture, got '3;4'"),
        ([*OURS, "--pixels", "cls"], "--pixels cls needs a vision transformer of timm with a cls token: this model"),
        ([*SMALL, *NO_CLS, "--pixels", "cls"], "with a cls token: this model has none"),
        ([*FEATURES, *NO_CLS, "--pixels", "cls"], "--pixels cls needs a model with a cls token: this one has none"),
        ([*FEATURES, "--pixels", "4,0,0"], "--pixels must lie in the clip of 4 frames of 96×160 pixels, got '4,0,0'"),
        ([*FEATURES, "--pixels", "0,96,0"], "--pixels must lie in the clip of 4 frames of 96×160 pixels, got '0,96,0'"),
        ([*FEATURES, "--pixels", "3,4"], "--pixels must be FRAME,Y,X of a clip, frames counted from 0, or cls, got"),
        ([*FEATURES, "--input-size", "64", "64"], "TimeSformer does not accept frames of 64×64 pixels: Input height"),
        ([*SMALL, "--input-size", "64", "64"], "VisionTransformer does not accept an input of 64×64 pixels: Input"),
        ([*SMALL, "--model-args=attn_layer=diff"], "VisionTransformer has none"),
        ([*OURS, "--rollout"], "--rollout needs a vision transformer of timm, and AAResNet has none"),
        (
            ["vit_small_patch16_18x2_224", "IMAGE", "--rollout", "--model-args=depth=1"],
            "--rollout needs blocks of one attention layer that can be shown, blocks.0 has 2",
        ),
        ([*OURS, "--input-size", "0", "32"], "--input-size must be H W, at least 1 each, got [0, 32]"),
        ([*OURS, "--model-args", "kappa"], "--model-args must be KEY=VALUE, got 'kappa'"),
        ([*OURS, "--model-args", "nu=2"], "nu must be from 0 to 1, got 2"),
        ([*OURS, "--checkpoint", "nowhere.pth"], "--checkpoint must be a file, got nowhere.pth"),
        ([*OURS, "--checkpoint", "IMAGE"], " does not fit aa_resnet34 {}: "),
        ([*OURS, "--checkpoint", "BROKEN"], "view: --checkpoint must be weights in safetensors, got "),
        ([*OURS, "--checkpoint", "SIZED"], " holds those of aa_wide_resnet28_10"),
        ([*OURS, "--slots", "IMAGE"], "--slots is for detectors and segmentors with object queries"),
        ([*OURS, "--cut", "0.02"], "--cut must be a weight between 0 and 1, with --parts, got 0.02"),
        ([*OURS, "--parts", "--cut", "-1"], "--cut must be a weight between 0 and 1, with --parts, got -1"),
        ([*OURS, "--follow"], "--follow needs a config of mmdet"),
        ([*OURS, "--target", "a"], "--target is for sentences: it needs --fairseq"),
    ],
)
def test_bad_arguments(arguments, words, photograph, clip, checkpoints, tmp_path, capsys):
    if arguments[0].endswith(".py") and importlib.util.find_spec("mmengine") is None:
        pytest.skip("mmengine is not installed")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.safetensors").write_bytes(b"no weights")
    names = dict(IMAGE=photograph, CLIP=clip, EMPTY=tmp_path / "empty", BROKEN=tmp_path / "broken.safetensors")
    names["SIZED"] = checkpoints["sized"]
    assert run(*(names.get(a, a) for a in arguments), "--output", tmp_path / "out") == 2
    assert words in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "out").exists()
