"""``python -m tools.view`` on transformers of mmdet and mmseg: objects, sampling points, masks and slots."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("timm")
pytest.importorskip("mmdet", reason="mmdet is not installed")
pytest.importorskip("mmseg", reason="mmseg is not installed")

from tests.tools.view_helpers import box_of, choose, click, names_in, numbers, open_page, page_data, painted, run
from tools.view import figures, models, objects, page

PIPELINE = """
pipeline = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=(192, 128), keep_ratio=True),
            dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'))]
test_pipeline, test_dataloader = pipeline, dict(dataset=dict(pipeline=pipeline))
"""
# Models of two layers, on pictures of 128 rows and 192 columns in an input of 128 by 256.
STACKS = "encoder=dict(num_layers=2), decoder=dict(num_layers=2)"
MASKED = "pixel_decoder=dict(encoder=dict(num_layers=1)), transformer_decoder=dict(num_layers=3)"
UPSTREAM = dict(
    detr=("detr/detr_r50_8xb2-150e_coco", STACKS),
    deformable=("deformable_detr/deformable-detr-refine_r50_16xb2-50e_coco", STACKS),
    mask2former=("mask2former/mask2former_r50_8xb2-lsj-50e_coco", f"panoptic_head=dict({MASKED})"),
)
OURS = """
_base_ = './detr.py'
custom_imports = dict(imports=['attn_plugins.mmcv'])
model = dict(type='Attended', of='DETR', attention={
    'encoder.layers.*.self_attn': dict(type='SpatialSelfAttention', attention_type='1111')})
"""
SEGMENTOR = f"""
_base_ = 'mmseg::mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py'
model = dict(backbone=dict(init_cfg=None), decode_head=dict({MASKED}))
test_pipeline = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=(192, 128), keep_ratio=True),
                 dict(type='PackSegInputs')]
test_dataloader = dict(dataset=dict(pipeline=test_pipeline))
"""


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> dict[str, str]:
    texts = {"attended": OURS, "segmentor": SEGMENTOR}
    for name, (base, small) in UPSTREAM.items():
        model = f"model = dict(backbone=dict(init_cfg=None), data_preprocessor=dict(pad_size_divisor=128), {small})\n"
        texts[name] = f"_base_ = 'mmdet::{base}.py'\n{PIPELINE}{model}"
    folder = tmp_path_factory.mktemp("configs")
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    return {name: str(folder / f"{name}.py") for name in texts}


@pytest.fixture(scope="module")
def shown(configs, photograph, tmp_path_factory) -> Callable[[str], Path]:
    """Return the folder of what the command writes for a model with random weights."""

    @functools.cache
    def folder(name: str) -> Path:
        result = tmp_path_factory.mktemp(name)
        arguments = [configs[name], photograph, "--output", result, "--objects", 4, "--least-score", 0, "--parts"]
        assert run(*arguments, "--pixels", "60,80", "--pixels", "290,440") == 0
        return result

    return folder


MASKS = ["pixel_decoder.encoder.layers.0.self_attn", *(f"transformer_decoder.layers.{n}.cross_attn" for n in range(3))]
BOTH = ["encoder.layers.1.self_attn", "decoder.layers.1.cross_attn"]


@pytest.mark.parametrize(
    ("name", "files", "counts"),  # of layers, points, object_maps and object_points on the page
    [
        pytest.param("detr", BOTH, (1, 0, 1, 0), marks=pytest.mark.slow),
        ("attended", [*BOTH, f"{BOTH[0]}.parts"], (1, 0, 1, 0)),
        pytest.param("deformable", BOTH, (0, 1, 0, 1), marks=pytest.mark.slow),
        pytest.param(
            "mask2former", [*(f"panoptic_head.{n}" for n in MASKS), "masks"], (0, 1, 3, 0), marks=pytest.mark.slow
        ),
        pytest.param(
            "segmentor", [*(f"decode_head.{n}" for n in MASKS), "masks"], (0, 1, 3, 0), marks=pytest.mark.slow
        ),
    ],
)
def test_a_picture_for_every_kind_of_attention(shown, name, files, counts):
    assert names_in(shown(name)) == {"attention.html", *(f"{n}.png" for n in files)}
    for file in shown(name).glob("*.png"):
        picture = np.asarray(Image.open(file).convert("RGB"))
        assert picture.shape[1] > 300
        assert picture.std() > 20
    held = page_data(shown(name) / "attention.html")
    on_page = held["objects"]
    assert tuple(map(len, (held["layers"], held["points"], on_page["maps"], on_page["points"]))) == counts
    assert len(on_page["list"]) == 4
    assert (on_page["masks"] is not None) == ("masks" in files)
    assert held["share"] == [1.0, 1.0 if name == "segmentor" else 0.75]
    assert (held["height"], held["width"]) == (128, 192)


def test_the_pages_numbers_are_the_layers(configs, photograph):
    torch.manual_seed(0)
    model = models.load_mm(configs["deformable"], None)
    for layer in (model.encoder.layers[1].self_attn, model.decoder.layers[1].cross_attn):
        torch.nn.init.normal_(layer.sampling_offsets.weight, std=0.3)
        torch.nn.init.normal_(layer.attention_weights.weight, std=0.3)
    seen = models.view_mm(model, photograph, [], 3, 0.0)
    held = page.objects_data(seen)
    (layer,), (sampled,) = held["points"], seen.points(objects=True)
    locations, weights = sampled.points(seen.objects.queries)

    def same_places(text: str, shape: tuple[int, ...], expected: np.ndarray) -> None:
        places = numbers(text, "<u2").reshape(shape) / 65535 * 3 - 1
        near = (np.abs(expected - 0.5) < 1.4).all(-1)
        assert near.mean() > 0.5
        np.testing.assert_allclose(places[near], expected[near], atol=1e-4)

    expected = sampled.in_pixels(locations[0], seen.size, seen.inside).numpy() / [192, 128]
    same_places(layer["places"], (3, 8, 4, 4, 2), expected)
    peaks = numbers(layer["peaks"], "<f4")
    shares = numbers(layer["weights"]).reshape(3, 8, 4, 4) / 255
    np.testing.assert_allclose(shares * peaks[:, None, None, None], weights[0].numpy(), atol=0.003)
    boxes = [[n["box"][k] * (192, 128)[k % 2] for k in range(4)] for n in held["list"]]
    np.testing.assert_allclose(boxes, seen.objects.boxes, rtol=1e-4)
    (encoder,) = seen.points(objects=False)
    level = page.points_data(seen, encoder)["levels"][1]
    assert level["queries"] == (8, 12)
    cells = torch.cartesian_prod(torch.tensor(level["rows"]), torch.tensor(level["columns"])).tolist()
    locations, _ = encoder.points(encoder.number(1, cells))
    expected = encoder.in_pixels(locations[0], seen.size, seen.inside).numpy() / [192, 128]
    same_places(level["places"], (96, 8, 4, 4, 2), expected)


def test_layers_and_objects_are_chosen(configs, photograph, tmp_path, capsys):
    assert run(configs["mask2former"], "--list") == 0
    kinds = ["pixels to sampled points", *["objects to pixels"] * 3]
    listed = capsys.readouterr().out.strip().splitlines()
    assert listed[-4:] == [f"panoptic_head.{name}  ({kind})" for name, kind in zip(MASKS, kinds)]
    arguments = [configs["detr"], photograph, "--output", tmp_path, "--layers", "*.0.*"]
    assert run(*arguments, "--least-score", 1) == 0
    assert {file.stem for file in tmp_path.glob("*.png")} == {n.replace("1", "0") for n in BOTH}
    assert "no object has a score of 1: the surest is shown, " in capsys.readouterr().out
    assert len(page_data(tmp_path / "attention.html")["objects"]["list"]) == 1


def test_weights_are_drawn_without_a_checkpoint_and_finite_with_one(configs, photograph, tmp_path, capsys):
    """mmdet leaves parameters that it allocates empty uninitialised."""
    model = models.load_mm(configs["deformable"], None)
    assert float(model.level_embed.std()) == pytest.approx(1, abs=0.1)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    with torch.no_grad():
        model.bbox_head.cls_branches[1].bias.fill_(torch.nan)
    torch.save(dict(state_dict=model.state_dict()), tmp_path / "diverged.pth")
    arguments = [configs["deformable"], photograph, "--checkpoint", tmp_path / "diverged.pth"]
    assert run(*arguments, "--output", tmp_path / "out") == 2
    assert "must be finite numbers: has its training diverged?" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["detr", "IMAGE", "--layers", "neck.*"], "none is called 'neck.*': encoder.layers.0.self_attn, "),
        (["detr", "IMAGE", "--objects", "0"], "--objects must be at least 1, got 0"),
        (["detr", "--slots", "nowhere"], "--slots must name pictures or folders of pictures, got nowhere"),
        (["atss", "--slots", "IMAGE"], "--slots needs a model with object queries, and ATSS has none"),
        (["detr", "IMAGE", "--follow"], "--follow needs a DeformableConv2d of attn_plugins, and DETR has none"),
    ],
)
def test_bad_arguments(arguments, words, configs, photograph, tmp_path, capsys):
    atss = Path(__file__).parents[2] / "configs/mmdet/digits/atss_narrow-r50_fpn_digits.py"
    names = {**configs, "IMAGE": photograph, "atss": atss}
    assert run(*(names.get(a, a) for a in arguments), "--output", tmp_path / "out") == 2
    assert words in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "out").exists()


# --- query slots --------------------------------------------------------------------------------------------------


def test_slots_of_many_pictures(configs, photograph, tmp_path, capsys):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for n, size in enumerate([(120, 80), (80, 120), (100, 100)]):
        Image.open(photograph).resize(size).save(folder / f"{n}.png")
    (folder / "labels.txt").write_text("no picture")
    assert run(configs["detr"], "--slots", folder, "--output", tmp_path / "out") == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "out/slots.png")
    assert Image.open(tmp_path / "out/slots.png").height > 400


def test_slots_are_in_the_order_of_queries_and_of_three_kinds():
    boxes = torch.tensor([[0.0, 0, 200, 50], [10, 10, 20, 20], [0, 0, 50, 100]])
    seen = objects.Objects(torch.tensor([2, 0, 1]), torch.zeros(3), ["a"] * 3, torch.tensor([0.9, 0.5, 0.1]), boxes)
    slots = objects.collect(lambda file: (seen, (100, 200)), [Path("a"), Path("b")])
    np.testing.assert_allclose(slots.boxes[0], [[0.075, 0.15, 0.05, 0.1], [0.125, 0.5, 0.25, 1], [0.5, 0.25, 1, 0.5]])
    np.testing.assert_allclose(slots.scores, [[0.5, 0.1, 0.9]] * 2)
    assert objects.kind_of_box(slots.boxes[1]).tolist() == [0, 2, 1]


def test_a_panel_for_each_of_the_surest_slots(tmp_path):
    rng = np.random.default_rng(0)
    boxes = np.concatenate((rng.uniform(0, 1, (40, 30, 2)), np.full((40, 30, 2), 0.3)), -1)
    slots = objects.Slots(boxes, np.tile(np.arange(30) / 30, (40, 1)))
    assert figures.draw_slots(slots, tmp_path / "slots.png") == list(range(10, 30))
    drawn = np.asarray(Image.open(tmp_path / "slots.png").convert("RGB")).astype(int)
    red = (drawn[..., 0] > 180) & (drawn[..., 1:] < 90).all(-1)
    assert red.sum() > 20 * 40  # 0.3 by 0.3 counts as large and horizontal


# --- the page in a browser ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_click_and_the_arrow_keys_choose_the_object(browser, shown):
    file = shown("mask2former") / "attention.html"
    open_page(browser, file)
    held = page_data(file)["objects"]
    assert browser.run("objectPanels.length") == 1 + 3 * 9
    browser.run("found.focus()")
    for n in (1, 2, 3, 0):
        browser.key("ArrowRight")
        assert browser.run("chosen.textContent") == f"Object {n + 1} of 4: {held['list'][n]['title']}"
    browser.key("ArrowUp")
    assert browser.run("[chosenObject, objectSelect.value]") == [3, "3"]
    layer = held["maps"][2]
    H, W = layer["keys"][0], layer["keys"][1] * 3 // 4  # the padding is cut off
    shares = numbers(layer["maps"]).reshape(9, 4, *layer["keys"])[5, 3, :, :W]
    colours = numbers(page_data(file)["colours"]).reshape(256, 3).astype(int)
    same = np.abs(painted(browser, "objectPanels[1 + 2 * 9 + 5]", (H, W)) - colours[shares]).max(-1) <= 2
    assert same.mean() > 0.7  # the box covers some
    for left, top, right, bottom in [n["box"] for n in held["list"]]:
        x, y = (left + right) / 2, (top + bottom) / 2
        click(browser, "found", x, y)
        chosen = held["list"][browser.run("chosenObject")]["box"]
        inside = [n["box"] for n in held["list"] if n["box"][0] <= x <= n["box"][2] and n["box"][1] <= y <= n["box"][3]]
        area = min((box[2] - box[0]) * (box[3] - box[1]) for box in inside)
        assert (chosen[2] - chosen[0]) * (chosen[3] - chosen[1]) == pytest.approx(area)


def test_points_follow_the_pixel_the_object_and_the_head(browser, shown):
    file = shown("deformable") / "attention.html"
    open_page(browser, file)
    assert browser.run("pointPanels.length") == 4
    click(browser, "picture", 0.3, 0.6)
    assert browser.run("where.textContent") == "Query: pixel (180, 135) of 300 rows and 451 columns"
    # The finest map has 16×32 cells, of which the page stores 12×12; the picture fills three quarters of the width.
    level = page_data(file)["points"][0]["levels"][0]
    row, column = level["rows"][int(0.6 * 12)], level["columns"][int(0.3 * 0.75 * 12)]
    words = browser.run("pointPanels[0].text.textContent")
    assert words.startswith(f"query ({row}, {column}) of 16×32: 128 points")
    pictures = "[pointPanels[0], objectPanels[0]].map(panel => panel.canvas.toDataURL())"
    first = browser.run(pictures)
    browser.run("picture.focus()")
    browser.key("ArrowDown")
    browser.run("found.focus()")
    browser.key("ArrowLeft")
    assert all(before != after for before, after in zip(first, browser.run(pictures)))
    assert browser.run("objectPanels[0].text.textContent").startswith("128 points")
    choose(browser, "headSelect", 3)
    assert browser.run("objectPanels[0].text.textContent").startswith("16 points")
    assert browser.run("pointPanels[2].text.textContent").split(": ")[1].startswith("16 points")


@pytest.mark.slow
def test_a_page_of_objects_alone(browser, configs, photograph, tmp_path):
    arguments = [configs["deformable"], photograph, "--output", tmp_path, "--layers", "decoder.*"]
    assert run(*arguments, "--least-score", 0) == 0
    open_page(browser, tmp_path / "attention.html")
    visible = browser.run("[picture, found, headLabel, opacity].map(n => n.checkVisibility())")
    assert visible == [False, True, True, True]
    assert box_of(browser, "found")[2] > 100
