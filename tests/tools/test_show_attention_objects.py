"""Objects of transformers, sampling points and masks: the command, the pictures, and the page in a browser."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("timm")
pytest.importorskip("mmdet", reason="mmdet is not installed")
pytest.importorskip("mmseg", reason="mmseg is not installed")

from tests.tools.show_attention_helpers import page_data
from tools.attention_view import mm, page_objects, slots
from tools.attention_view.objects import Objects
from tools.show_attention import main

PIPELINE = """
pipeline = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=(192, 128), keep_ratio=True),
            dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'))]
test_pipeline, test_dataloader = pipeline, dict(dataset=dict(pipeline=pipeline))
"""
# Models of two layers, on pictures of 128 rows and 192 columns in an input of 128 by 256.
STACKS = "encoder=dict(num_layers=2), decoder=dict(num_layers=2)"
UPSTREAM = dict(
    detr=("detr/detr_r50_8xb2-150e_coco", STACKS),
    deformable=("deformable_detr/deformable-detr-refine_r50_16xb2-50e_coco", STACKS),
    mask2former=(
        "mask2former/mask2former_r50_8xb2-lsj-50e_coco",
        "panoptic_head=dict(pixel_decoder=dict(encoder=dict(num_layers=1)), transformer_decoder=dict(num_layers=3))",
    ),
)


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("configs")
    for name, (base, small) in UPSTREAM.items():
        model = f"model = dict(backbone=dict(init_cfg=None), data_preprocessor=dict(pad_size_divisor=128), {small})\n"
        (folder / f"{name}.py").write_text(f"_base_ = 'mmdet::{base}.py'\n{PIPELINE}{model}")
    ours = "{'encoder.layers.*.self_attn': dict(type='SpatialSelfAttention', attention_type='1111')}"
    (folder / "attended.py").write_text(
        "_base_ = './detr.py'\ncustom_imports = dict(imports=['attn_plugins.mmcv'])\n"
        f"model = dict(type='Attended', of='DETR', attention={ours})\n"
    )
    (folder / "segmentor.py").write_text(
        "_base_ = 'mmseg::mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py'\n"
        "model = dict(backbone=dict(init_cfg=None), decode_head=dict(\n"
        "    pixel_decoder=dict(encoder=dict(num_layers=1)), transformer_decoder=dict(num_layers=3)))\n"
        "test_pipeline = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=(192, 128), keep_ratio=True),\n"
        "                 dict(type='PackSegInputs')]\n"
        "test_dataloader = dict(dataset=dict(pipeline=test_pipeline))\n"
    )
    return {name: str(folder / f"{name}.py") for name in (*UPSTREAM, "attended", "segmentor")}


@pytest.fixture(scope="module")
def shown(configs, photograph, tmp_path_factory) -> dict[str, Path]:
    """Return what the command wrote for every model with random weights."""
    found = {}
    for name, config in configs.items():
        found[name] = tmp_path_factory.mktemp(name)
        torch.manual_seed(0)
        arguments = [config, str(photograph), "--output", str(found[name]), "--objects", "4", "--least-score", "0"]
        assert main([*arguments, "--pixels", "60,80", "--pixels", "290,440"]) == 0
    return found


HEAD = "panoptic_head."
FILES = dict(
    detr=["encoder.layers.1.self_attn", "decoder.layers.1.cross_attn"],
    attended=["encoder.layers.1.self_attn", "decoder.layers.1.cross_attn"],
    deformable=["encoder.layers.1.self_attn", "decoder.layers.1.cross_attn"],
    mask2former=[
        f"{HEAD}pixel_decoder.encoder.layers.0.self_attn",
        *(f"{HEAD}transformer_decoder.layers.{n}.cross_attn" for n in range(3)),
        "masks",
    ],
)
FILES["segmentor"] = [name.replace(HEAD, "decode_head.") for name in FILES["mask2former"]]


@pytest.mark.parametrize("name", FILES)
def test_a_picture_for_every_kind_of_attention(shown, name):
    assert {file.name for file in shown[name].iterdir()} == {"attention.html", *(f"{n}.png" for n in FILES[name])}
    for file in shown[name].glob("*.png"):
        picture = np.asarray(Image.open(file).convert("RGB")).astype(int)
        assert picture.shape[1] > 300
        assert picture.std() > 20
        assert file.stat().st_size < 1_500_000


@pytest.mark.parametrize(
    ("name", "maps", "points", "object_maps", "object_points"),
    [("detr", 1, 0, 1, 0), ("attended", 1, 0, 1, 0), ("deformable", 0, 1, 0, 1), ("mask2former", 0, 1, 3, 0)],
)
def test_the_page_holds_them(shown, name, maps, points, object_maps, object_points):
    text = (shown[name] / "attention.html").read_text()
    assert not re.search(r"(src|href|url)\s*[=(]\s*[\"']?(https?:)?//", text)
    assert not re.search(r"@[A-Z]+@", text)
    held = page_data(shown[name] / "attention.html")
    objects = held["objects"]
    assert [len(part) for part in (held["layers"], held["points"], objects["maps"], objects["points"])] == [
        maps, points, object_maps, object_points
    ]  # fmt: skip
    assert len(objects["list"]) == 4
    assert (objects["masks"] is not None) == (name in ("mask2former", "segmentor"))
    assert held["share"] == [1.0, 1.0 if name == "segmentor" else 0.75]
    assert (held["height"], held["width"]) == (128, 192)


def numbers(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), kind)


def test_the_pages_numbers_are_the_layers(configs, photograph):
    torch.manual_seed(0)
    model = mm.load_mm(configs["deformable"], None)
    for layer in (model.encoder.layers[1].self_attn, model.decoder.layers[1].cross_attn):
        torch.nn.init.normal_(layer.sampling_offsets.weight, std=0.3)
        torch.nn.init.normal_(layer.attention_weights.weight, std=0.3)
    seen = mm.view_mm(model, photograph, [], 3, 0.0)
    objects = page_objects.objects_data(seen)
    (layer,), (sampled,) = objects["points"], seen.samples(objects=True)
    locations, weights = sampled.points(seen.objects.queries)
    places = numbers(layer["places"], "<u2").reshape(3, 8, 4, 4, 2) / 65535 * 3 - 1
    pixels = places * [192, 128]
    expected = sampled.in_pixels(locations[0], seen.size, seen.inside).numpy()
    near = (np.abs(expected / [192, 128] - 0.5) < 1.4).all(-1)
    assert near.mean() > 0.9
    np.testing.assert_allclose(pixels[near], expected[near], atol=0.01)
    peaks = numbers(layer["peaks"], "<f4")
    shares = numbers(layer["weights"], "u1").reshape(3, 8, 4, 4) / 255
    np.testing.assert_allclose(shares * peaks[:, None, None, None], weights[0].numpy(), atol=0.003)
    np.testing.assert_allclose(
        [[n["box"][k] * (192, 128)[k % 2] for k in range(4)] for n in objects["list"]], seen.objects.boxes, rtol=1e-4
    )
    (encoder,) = seen.samples(objects=False)
    level = page_objects.points_data(seen, encoder)["levels"][1]
    assert level["queries"] == (8, 12)
    chosen = encoder.number(1, [(level["rows"][5], level["columns"][9])])
    places = numbers(level["places"], "<u2").reshape(8, 12, 8, 4, 4, 2)[5, 9] / 65535 * 3 - 1
    expected = encoder.in_pixels(encoder.points(chosen)[0][0], seen.size, seen.inside)[0].numpy() / [192, 128]
    near = (np.abs(expected - 0.5) < 1.4).all(-1)
    np.testing.assert_allclose(places[near], expected[near], atol=1e-4)


def test_without_a_checkpoint_weights_are_drawn(configs):
    """mmdet leaves parameters that it allocates empty uninitialised."""
    found = mm.load_mm(configs["deformable"], None)
    assert float(found.level_embed.std()) == pytest.approx(1, abs=0.1)
    assert all(parameter.isfinite().all() for parameter in found.parameters())


def test_a_diverged_model_is_an_error(configs, photograph, tmp_path, capsys):
    model = mm.load_mm(configs["deformable"], None)
    with torch.no_grad():
        model.bbox_head.cls_branches[1].bias.fill_(torch.nan)
    torch.save(dict(state_dict=model.state_dict()), tmp_path / "diverged.pth")
    arguments = [configs["deformable"], str(photograph), "--checkpoint", str(tmp_path / "diverged.pth")]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 2
    assert "must be finite numbers: has its training diverged?" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_layers_are_listed_and_chosen(configs, photograph, tmp_path, capsys):
    assert main([configs["mask2former"], "--list"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[-4:] == [
        f"{HEAD}pixel_decoder.encoder.layers.0.self_attn  (pixels to sampled points)",
        *(f"{HEAD}transformer_decoder.layers.{n}.cross_attn  (objects to pixels)" for n in range(3)),
    ]
    arguments = [configs["detr"], str(photograph), "--output", str(tmp_path), "--layers", "*.0.*"]
    assert main([*arguments, "--least-score", "1"]) == 0
    assert {file.stem for file in tmp_path.glob("*.png")} == {f"{n}coder.layers.0.{m}" for n, m in (
        ("en", "self_attn"), ("de", "cross_attn")
    )}  # fmt: skip
    assert "no object has a score of 1: the surest is shown, " in capsys.readouterr().out
    assert len(page_data(tmp_path / "attention.html")["objects"]["list"]) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["detr", "IMAGE", "--layers", "neck.*"], "none is called 'neck.*': encoder.layers.0.self_attn, "),
        (["detr", "IMAGE", "--objects", "0"], "--objects must be at least 1, got 0"),
        (["detr", "--slots", "nowhere"], "--slots must name pictures or folders of pictures, got nowhere"),
        (["aa_resnet34", "--slots", "IMAGE"], "--slots is for detectors and segmentors with object queries"),
        (["atss", "--slots", "IMAGE"], "--slots needs a model with object queries, and ATSS has none"),
    ],
)
def test_bad_arguments(arguments, words, configs, photograph, tmp_path, capsys):
    atss = Path(__file__).parents[2] / "configs/mmdet/digits/atss_narrow-r50_fpn_digits.py"
    names = {**configs, "IMAGE": str(photograph), "atss": str(atss)}
    assert main([*(names.get(a, a) for a in arguments), "--output", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "out").exists()


# --- query slots --------------------------------------------------------------------------------------------------


def test_slots_of_many_pictures(configs, photograph, tmp_path, capsys):
    folder = tmp_path / "pictures"
    folder.mkdir()
    picture = Image.open(photograph)
    for n, size in enumerate([(120, 80), (80, 120), (100, 100)]):
        picture.resize(size).save(folder / f"{n}.png")
    (folder / "labels.txt").write_text("no picture")
    assert main([configs["detr"], "--slots", str(folder), "--output", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "out/slots.png")
    drawn = np.asarray(Image.open(tmp_path / "out/slots.png").convert("RGB")).astype(int)
    assert drawn.shape[0] > 400
    files = slots.pictures([folder])
    assert [file.name for file in files] == ["0.png", "1.png", "2.png"]


def test_slots_are_in_the_order_of_queries_and_of_three_kinds():
    def look(file: Path) -> tuple[Objects, tuple[int, int]]:
        boxes = torch.tensor([[0.0, 0, 200, 50], [10, 10, 20, 20], [0, 0, 50, 100]])
        return Objects(torch.tensor([2, 0, 1]), torch.zeros(3), ["a"] * 3, torch.tensor([0.9, 0.5, 0.1]), boxes), (
            100,
            200,
        )

    found = slots.collect(look, [Path("a"), Path("b")])
    np.testing.assert_allclose(found.boxes[0], [[0.075, 0.15, 0.05, 0.1], [0.125, 0.5, 0.25, 1], [0.5, 0.25, 1, 0.5]])
    np.testing.assert_allclose(found.scores, [[0.5, 0.1, 0.9]] * 2)
    assert slots.kind(found.boxes[1]).tolist() == [0, 2, 1]


def test_a_panel_for_each_of_the_surest_slots(tmp_path):
    rng = np.random.default_rng(0)
    boxes = np.concatenate((rng.uniform(0, 1, (40, 30, 2)), np.full((40, 30, 2), 0.3)), -1)
    scores = np.tile(np.arange(30) / 30, (40, 1))
    assert slots.draw_slots(slots.Slots(boxes, scores), tmp_path / "slots.png") == list(range(10, 30))
    drawn = np.asarray(Image.open(tmp_path / "slots.png").convert("RGB")).astype(int)
    red = (drawn[..., 0] > 180) & (drawn[..., 1] < 90) & (drawn[..., 2] < 90)
    assert red.sum() > 20 * 40  # 0.3 by 0.3 counts as large and horizontal


# --- the page in a browser ----------------------------------------------------------------------------------------


def middle(browser, element: str) -> tuple[float, float, float, float]:
    browser.run(f"{element}.scrollIntoView({{ block: 'center' }})")
    return browser.run(
        f"(() => {{ const b = {element}.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; }})()"
    )


def test_a_click_and_the_arrow_keys_choose_the_object(shown, browser):
    file = shown["mask2former"] / "attention.html"
    browser.open(file)
    browser.run("image.decode()")
    held = page_data(file)["objects"]
    assert browser.run("objectPanels.length") == 1 + 3 * 9
    browser.run("found.focus()")
    for n in (1, 2, 3, 0):
        browser.key("ArrowRight")
        assert browser.run("chosenObject") == n
        assert browser.run("chosen.textContent") == f"Object {n + 1} of 4: {held['list'][n]['title']}"
    browser.key("ArrowUp")
    assert browser.run("[chosenObject, objectSelect.value]") == [3, "3"]
    browser.run("(() => { opacity.value = 0; opacity.dispatchEvent(new Event('input')); })()")
    layer = held["maps"][2]
    H, W = layer["keys"]
    shares = numbers(layer["maps"], "u1").reshape(9, 4, H, W)
    colours = numbers(page_data(file)["colours"], "u1").reshape(256, 3).astype(int)
    painted = browser.run(
        f"""(() => {{
            const canvas = objectPanels[1 + 2 * 9 + 5].canvas, context = canvas.getContext('2d'), found = [];
            for (let y = 0; y < {H}; y++) for (let x = 0; x < {W * 3 // 4}; x++) {{
                const at = [(x + 0.5) * canvas.width / {W * 3 // 4}, (y + 0.5) * canvas.height / {H}].map(Math.floor);
                found.push(...context.getImageData(...at, 1, 1).data.slice(0, 3));
            }}
            return found;
        }})()"""
    )
    expected = colours[shares[5, 3, :, : W * 3 // 4]].reshape(-1, 3)  # the padding is cut off
    same = np.abs(np.array(painted).reshape(-1, 3) - expected).max(1) <= 2
    assert same.mean() > 0.7  # the box covers some
    left, top, width, height = middle(browser, "found")
    centres = [[(n["box"][0] + n["box"][2]) / 2, (n["box"][1] + n["box"][3]) / 2] for n in held["list"]]
    for x, y in centres:
        browser.click(left + x * width, top + y * height)
        chosen = held["list"][browser.run("chosenObject")]["box"]
        inside = [n["box"] for n in held["list"] if n["box"][0] <= x <= n["box"][2] and n["box"][1] <= y <= n["box"][3]]
        area = min((box[2] - box[0]) * (box[3] - box[1]) for box in inside)
        assert (chosen[2] - chosen[0]) * (chosen[3] - chosen[1]) == pytest.approx(area)
    assert browser.run("chosen.getAttribute('aria-live')") == "polite"
    assert all(url.startswith(("file:", "data:")) for url in browser.requests)


def test_points_follow_the_pixel_the_object_and_the_head(shown, browser):
    file = shown["deformable"] / "attention.html"
    browser.open(file)
    browser.run("image.decode()")
    held = page_data(file)
    assert browser.run("pointPanels.length") == 4
    left, top, width, height = middle(browser, "picture")
    browser.click(left + 0.3 * width, top + 0.6 * height)
    assert browser.run("where.textContent") == "Query: pixel (180, 135) of 300 rows and 451 columns"
    # The finest map has 16×32 cells, of which the page stores 12×12; the picture fills three quarters of the width.
    level = held["points"][0]["levels"][0]
    row, column = level["rows"][int(0.6 * 12)], level["columns"][int(0.3 * 0.75 * 12)]
    assert browser.run("pointPanels[0].text.textContent").startswith(f"query ({row}, {column}) of 16×32: 128 points")
    before = browser.run("pointPanels[0].canvas.toDataURL()")
    browser.run("picture.focus()")
    browser.key("ArrowDown")
    assert browser.run("pointPanels[0].canvas.toDataURL()") != before
    assert browser.run("objectPanels[0].text.textContent").startswith("128 points")
    browser.run("(() => { headSelect.value = '3'; headSelect.dispatchEvent(new Event('change')); })()")
    assert browser.run("objectPanels[0].text.textContent").startswith("16 points")
    assert browser.run("pointPanels[2].text.textContent").split(": ")[1].startswith("16 points")
    before = browser.run("objectPanels[0].canvas.toDataURL()")
    browser.run("found.focus()")
    browser.key("ArrowLeft")
    assert browser.run("chosenObject") == 3
    assert browser.run("objectPanels[0].canvas.toDataURL()") != before
    where = browser.run("pointsOf(data.objects.points[0], data.objects.points[0], 2).map(p => p.head)")
    assert sorted(where) == sorted(list(range(8)) * 16)


def test_a_page_of_objects_alone(configs, photograph, tmp_path, browser):
    arguments = [configs["deformable"], str(photograph), "--output", str(tmp_path), "--layers", "decoder.*"]
    assert main([*arguments, "--least-score", "0"]) == 0
    browser.open(tmp_path / "attention.html")
    browser.run("image.decode()")
    assert browser.run("[picture, found, headLabel, opacity].map(n => n.checkVisibility())") == [
        False, True, True, True
    ]  # fmt: skip
    assert browser.run("objectPanels.map(p => p.text.textContent.split(' ')[0])") == ["128", "128"]


def test_the_page_works_by_keyboard_and_on_a_narrow_screen(shown, browser):
    browser.send("Emulation.setDeviceMetricsOverride", width=360, height=700, deviceScaleFactor=1, mobile=True)
    browser.open(shown["deformable"] / "attention.html")
    browser.run("image.decode()")
    assert browser.run("document.documentElement.scrollWidth") <= 360
    order = []
    for _ in range(10):
        browser.send("Input.dispatchKeyEvent", type="rawKeyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        order.append(browser.run("document.activeElement.id || document.activeElement.className"))
        assert browser.run("getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert order == ["picture", "layer", "head", "opacity", *["head"] * 4, "found", "object"]
    browser.send("Emulation.clearDeviceMetricsOverride")
