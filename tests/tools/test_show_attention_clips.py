"""Attention of TimeSformer on a clip: weights, the command, and the page in a browser."""

from __future__ import annotations

import base64
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

timm = pytest.importorskip("timm")

from attn_plugins.modules.space_time_attention import STEPS  # noqa: E402
from tests.tools.show_attention_helpers import page_data, painted  # noqa: E402
from tools.attention_view import clips, page, space_time  # noqa: E402
from tools.show_attention import main  # noqa: E402
from tools.train.checkpoint import save_weights  # noqa: E402
from tools.train.config import Config  # noqa: E402

NAME = "timesformer_small_patch16_224"
SMALL = dict(img_size=(48, 64), embed_dim=32, depth=2, num_heads=2, num_frames=4)
CLIP = (4, 3, 4)  # frames, and rows and columns of patches; 3 makes groups that differ in size
PATTERNS = list(STEPS)


def build(pattern: str = "divided", **options) -> nn.Module:
    """Build a small model without zero parameters, whose weights are far from uniform."""
    torch.manual_seed(0)
    model = timm.create_model(NAME, pattern=pattern, **{**SMALL, **options}).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def seen_by(model: nn.Module, x: Tensor) -> tuple[dict[str, space_time.ClipMaps], dict[str, Tensor]]:
    """Return the captured weights, and the outputs of every step."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, _: nn.Module, inputs: tuple, output: Tensor) -> None:
        outputs[name] = output

    hooks = [n.register_forward_hook(partial(keep, name)) for name, n in space_time.step_layers(model).items()]
    with torch.no_grad(), space_time.capture_clip(model) as captured:
        model(x)
    for hook in hooks:
        hook.remove()
    return captured, outputs


def is_key(region: str, query: tuple[int, int, int], key: tuple[int, int, int]) -> bool:
    """Return True if a patch is among a query's keys, by the definition of the pattern."""
    (t, y, x), (s, v, u) = query, key
    _, H, W = CLIP
    return dict(
        joint=True,
        space=s == t,
        time=(v, u) == (y, x),
        width=(s, v) == (t, y),
        height=(s, u) == (t, x),
        local=(v < -(-H // 2)) == (y < -(-H // 2)) and (u < -(-W // 2)) == (x < -(-W // 2)),
        **{"global": all((a - b) % 2 == 0 for a, b in zip(query, key))},
    )[region]


def defined_weights(layer: nn.Module, x: Tensor, P: int) -> np.ndarray:
    """Compute the weights (M, P + N, P + N) of one clip's tokens in plain loops; a frame is a clip of one frame."""
    M = layer.num_heads
    q, k, _ = layer.qkv(x[0]).double().view(len(x[0]), 3, M, -1).permute(1, 2, 0, 3)
    logits = (q @ k.mT / q.shape[-1] ** 0.5).exp().numpy()
    places = list(product(*(range(n) for n in CLIP)))[: len(x[0]) - P]
    groups = {frozenset(n for n, key in enumerate(places) if is_key(layer.region, place, key)) for place in places}
    weights = np.zeros_like(logits)
    for group in groups:
        members = [*range(P), *(P + n for n in group)]
        for m in range(M):
            for i in members:
                total = sum(logits[m, i, j] for j in members)
                for j in members:
                    weights[m, i, j] += logits[m, i, j] / total / (len(groups) if i < P else 1)
    return weights


# --- the numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, dict(reg_tokens=2), dict(class_token=False, global_pool="avg")], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_steps_weights_are_the_definitions_and_give_its_output(pattern, options):
    model = build(pattern, **options)
    captured, outputs = seen_by(model, torch.randn(1, 4, 3, 48, 64))
    names = [f"blocks.{n}.{step}attn" for n in range(2) for step, _ in STEPS[pattern]]
    assert list(captured) == list(outputs) == list(space_time.step_layers(model)) == names
    prefix = [*["cls"][: "class_token" not in options], *["registers"] * options.get("reg_tokens", 0)]
    for name, found in captured.items():
        layer, x = model.get_submodule(name), found.x
        last = name.endswith(".attn")
        assert (found.clip, found.size, found.prefix) == (CLIP, (6, 8), prefix if last else [])
        weights = found.weights()[0]
        with torch.no_grad():
            value = layer.qkv(x).unflatten(2, (3, 2, -1))[:, :, 2].flatten(0, 1).transpose(0, 1)  # (M, tokens, d)
            expected = layer.proj((weights @ value).transpose(0, 1).reshape(x.shape))
            torch.testing.assert_close(expected, outputs[name], rtol=1e-3, atol=1e-4)
            slow = [defined_weights(layer, frame[None], len(found.prefix)) for frame in x]
        T = x.shape[1]
        for n, own in enumerate(slow):
            block = weights[:, n * T : (n + 1) * T]
            np.testing.assert_allclose(block[:, :, n * T : (n + 1) * T], own, rtol=1e-3, atol=1e-6)
            np.testing.assert_allclose(block.sum(-1), 1, rtol=1e-5)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_from_a_patch_and_from_the_cls_token(pattern):
    captured, _ = seen_by(build(pattern, reg_tokens=1), torch.randn(1, 4, 3, 48, 64))
    for layer in captured.values():
        weights, P, (T, H, W) = layer.weights()[0], len(layer.prefix), CLIP
        S = 4 if pattern == "space" else 1
        weights = weights.unflatten(2, (S, -1))
        places: list[space_time.Place] = [(2, 1, 3), (0, 2, 0)] + (["cls"] if P else [])
        found = layer.attended(places)
        assert found.names == ["mean of heads", "head 1", "head 2"]
        assert found.maps.shape == (3, len(places), T, H, W)
        for q, place in enumerate(places):
            if place == "cls":
                rows = weights.unflatten(1, (S, -1))[:, :, 0].mean(1)
            else:
                number = (place[0] * H + place[1]) * W + place[2]
                rows = weights[:, number + P * (place[0] + 1 if S > 1 else 1)]
            torch.testing.assert_close(found.maps[1:, q], rows[:, :, P:].reshape(2, T, H, W))
            torch.testing.assert_close(found.maps[0, q], rows[:, :, P:].reshape(2, T, H, W).mean(0))
            if P:
                torch.testing.assert_close(found.elsewhere[1:, q], rows[:, :, :P].sum((1, 2)))
            keys = np.array([place == "cls" or is_key(layer.region, place, key) for key in product(*map(range, CLIP))])
            assert np.array_equal(found.keys[q].flatten(), keys)
            tokens = keys.sum() + P * (S if place == "cls" else 1)
            np.testing.assert_allclose(found.uniform[q], 1 / tokens, rtol=1e-6)


def test_a_mosaic():
    assert [space_time.layout(n) for n in (1, 2, 4, 6, 7, 8, 12, 16, 96)] == [
        (1, 1), (1, 2), (2, 2), (2, 3), (1, 7), (2, 4), (3, 4), (4, 4), (8, 12)
    ]  # fmt: skip
    frames = torch.arange(6).view(6, 1, 1) * torch.ones(2, 3)
    assert space_time.mosaic(frames)[::2, ::3].tolist() == [[0, 1, 2], [3, 4, 5]]
    captured, _ = seen_by(build(), torch.randn(1, 4, 3, 48, 64))
    layer = captured["blocks.1.attn"]
    seen, found = layer.look([(5, 2), (0, 4), "cls"]), layer.attended([(2, 2, 2), (1, 0, 0), "cls"])
    torch.testing.assert_close(seen.maps, space_time.mosaic(found.maps))
    torch.testing.assert_close(seen.maps[:, 1, :3, 4:], found.maps[:, 1, 1])
    with pytest.raises(ValueError, match=r"blocks.1.temporal_attn has no cls token"):
        captured["blocks.1.temporal_attn"].look(["cls"])


@pytest.mark.parametrize("pattern", ["divided", "axial", "space"])
def test_rollout_by_matrices(pattern):
    """Multiply every step's mean over heads plus identity; prefix tokens pass through the added steps."""
    model = build(pattern, reg_tokens=1)
    captured, _ = seen_by(model, torch.randn(1, 4, 3, 48, 64))
    (found,) = space_time.clip_rollouts(model, captured).values()
    T, total = 50, None
    if pattern == "space":
        T = 4 * 14
    for layer in captured.values():
        own, mixed = layer.weights()[0].double().mean(0).numpy(), np.eye(T)
        first = T - len(own)
        mixed[first:, first:] = (mixed[first:, first:] + own) / 2
        total = mixed if total is None else mixed @ total
    np.testing.assert_allclose(found.weights()[0, 0], total, rtol=1e-4, atol=1e-6)
    looked = found.attended([(2, 1, 3), "cls"])
    assert looked.names == ["rollout"]
    np.testing.assert_allclose(looked.maps.sum((0, 2, 3, 4)) + looked.elsewhere[0], 1, rtol=1e-5)
    assert looked.keys[1].all()
    assert looked.keys[0].all() == (pattern != "space")


def test_a_picture_is_a_clip_of_one_frame():
    captured, outputs = seen_by(build("joint"), torch.randn(1, 3, 48, 64))
    assert captured["blocks.0.attn"].clip == (1, 3, 4)


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clips") / "walk"
    folder.mkdir()
    noise = np.random.default_rng(0)
    for number in range(8):
        Image.fromarray(noise.integers(0, 255, (96, 160, 3), np.uint8)).save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("checkpoint") / "best.safetensors"
    options = {key: SMALL[key] for key in ("embed_dim", "depth", "num_heads")}
    config = Config(NAME, model_args=options, dataset="clips", frames=4, input_size=(48, 64))
    save_weights(file, build(num_classes=3), config, ["a", "b", "c"])
    return file


@pytest.fixture(scope="module")
def shown(clip, checkpoint, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("shown")
    arguments = ["--checkpoint", str(checkpoint), "--output", str(output), "--rollout"]
    assert main([NAME, str(clip), *arguments]) == 0
    return output


def test_a_row_of_frames_for_every_step_and_query(shown):
    places, layers = ["cls", "2-48-80"], ["blocks.1.temporal_attn", "blocks.1.attn", "rollout"]
    names = {f"{layer}_{place}.png" for layer in layers for place in places} - {"blocks.1.temporal_attn_cls.png"}
    assert {f.name for f in shown.iterdir()} == {*names, "attention.html"}
    sizes = {name: Image.open(shown / name).size for name in names}
    assert all(width > height for width, height in sizes.values())
    assert sizes["rollout_cls.png"][1] < sizes["blocks.1.attn_cls.png"][1]
    for name in names:
        picture = np.asarray(Image.open(shown / name).convert("RGB")).astype(int)
        red = (picture[..., 0] > 200) & (picture[..., 1] < 60) & (picture[..., 2] < 60)
        assert (red.sum() > 20) == ("cls" not in name), name


def test_the_page_holds_the_clip(shown):
    data = page_data(shown / "attention.html")
    assert (data["frames"], data["file"]) == ([2, 2], [192, 320])
    assert [(n["name"], n["queries"], n["keys"], n["cls"] is None) for n in data["layers"]] == [
        ("blocks.1.temporal_attn", [6, 8], [6, 8], True),
        ("blocks.1.attn", [6, 8], [6, 8], False),
        ("rollout", [6, 8], [6, 8], False),
    ]


def test_long_clips_are_thinned_alike_in_every_frame(monkeypatch):
    monkeypatch.setattr(page, "MOST_CLIP_QUERIES", 16)
    monkeypatch.setattr(page, "MOST_CLIP_KEYS", 24)
    captured, _ = seen_by(build(), torch.randn(1, 4, 3, 48, 64))
    layer = captured["blocks.1.attn"]
    found, notes = page.thinned(layer)
    assert notes == ["4×4 of 6×8 queries", "6×8 keys averaged to 4×6"]
    whole = layer.attended([(3, 0, 1)])
    expected = torch.nn.functional.adaptive_avg_pool2d(whole.maps.flatten(0, 1), (2, 3))
    torch.testing.assert_close(found.maps[:, 2, 2], space_time.mosaic(expected))


def test_checkpoints_say_how_many_frames(clip, checkpoint, tmp_path, capsys):
    arguments = [NAME, str(clip), "--checkpoint", str(checkpoint), "--output", str(tmp_path / "out")]
    assert main([*arguments, "--layers", "blocks.0.*", "--pixels", "3,0,159"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "input: 4 frames of 48×64 pixels, at which the checkpoint was trained"
    assert [Path(line).name for line in lines[1:]] == [
        "blocks.0.temporal_attn_3-0-159.png", "blocks.0.attn_3-0-159.png", "attention.html"
    ]  # fmt: skip
    assert main([NAME, "--checkpoint", str(checkpoint), "--list"]) == 0
    assert capsys.readouterr().out.split() == [f"blocks.{n}.{step}attn" for n in range(2) for step in ("temporal_", "")]


def test_of_many_frames_some(clip, tmp_path, monkeypatch):
    """Of many frames, a PNG shows some, including the query's."""
    monkeypatch.setattr(clips, "MOST_FRAMES", 4)
    model = build("space", num_frames=8, class_token=False, global_pool="avg")
    view = clips.view_clip(model, clips.open_frames(model, clip), [], (48, 64))
    assert view.frames.shape == (8, 48, 64, 3)
    assert view.place(view.maps[0], (7, 95, 80)) == (7, 2, 2)
    widths = []
    for query in ((7, 95, 80), (6, 95, 80)):  # 1, 3, 5 and 7, and the query's
        clips.draw_clip(view, view.maps[0], query, tmp_path / "some.png")
        widths.append(Image.open(tmp_path / "some.png").width)
    assert (widths[1] - widths[0]) / 180 == pytest.approx(1.3 * 64 / 48, abs=0.2)


ARGUMENTS = [f"--model-args={key}={list(n) if isinstance(n, tuple) else n}" for key, n in SMALL.items()]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--pixels", "4,0,0"], "--pixels must lie in the clip of 4 frames of 96×160 pixels, got '4,0,0'"),
        (["--pixels", "0,96,0"], "--pixels must lie in the clip of 4 frames of 96×160 pixels, got '0,96,0'"),
        (["--pixels", "3,4"], "--pixels must be FRAME,Y,X of a clip, frames counted from 0, or cls, got '3,4'"),
        (["--layers", "x"], "none is called 'x': blocks.0.temporal_attn, blocks.0.attn, "),
        (["--input-size", "64", "64"], "TimeSformer does not accept frames of 64×64 pixels: Input height (64)"),
        (
            ["--model-args=class_token=false", "--model-args=global_pool=avg", "--pixels", "cls"],
            "--pixels cls needs a model with a cls token: this one has none",
        ),
    ],
)
def test_bad_arguments(arguments, words, clip, tmp_path, capsys):
    assert main([NAME, str(clip), *ARGUMENTS, *arguments, "--output", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert not (tmp_path / "out").exists()


def test_clips_and_pictures_that_do_not_fit(clip, tmp_path, capsys):
    assert main(["aa_resnet34", str(clip), "--output", str(tmp_path / "out")]) == 2
    assert f"IMAGE must be a picture, for aa_resnet34 sees no clips, got {clip}" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main([NAME, str(tmp_path / "empty"), *ARGUMENTS]) == 2
    assert "cannot be read as a clip: it holds no picture" in capsys.readouterr().err
    assert main([NAME, str(clip / "0.png"), *ARGUMENTS, "--output", str(tmp_path / "one"), "--pixels", "cls"]) == 0
    assert capsys.readouterr().out.startswith("input: 1 frames of 48×64 pixels")


# --- the page in a browser ----------------------------------------------------------------------------------------


def test_a_place_of_a_frame_on_the_page(shown, browser):
    file = shown / "attention.html"
    browser.open(file)
    browser.run("image.decode()")
    browser.run("(() => { opacity.value = 0; opacity.dispatchEvent(new Event('input')); })()")
    assert browser.run("where.textContent") == "Query: the cls token"
    box = browser.run(
        "(() => { const b = picture.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
    )
    browser.click(box[0] + 0.9 * box[2], box[1] + 0.55 * box[3])  # frame 3: rows from 0.5, columns from 0.5
    assert browser.run("where.textContent") == "Query: frame 3, pixel (9, 128) of 96 rows and 160 columns"
    text = browser.run("panels[0].text.textContent")
    assert "% at frame " in text
    assert "row 1, column 4" in text  # the temporal step: the same place of every frame
    data = page_data(file)
    layer = data["layers"][0]
    table = np.frombuffer(base64.b64decode(data["colours"]), np.uint8).reshape(256, 3).astype(int)
    held = np.frombuffer(base64.b64decode(layer["maps"]), np.uint8).reshape(3, 6, 8, 6, 8)[1, 3, 7]
    assert (held > 0).sum() <= 4
    found = np.array(painted(browser, 1))
    assert np.abs(found.reshape(6, 8, 3) - table[held])[held == 0].max() <= 2
