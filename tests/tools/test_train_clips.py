"""The classifier's trainer on folders of clips."""

from __future__ import annotations

import shutil
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("timm")
pytest.importorskip("sklearn")
pytest.importorskip("skimage")

from PIL import Image

from tools.clips import open_clip, read_whole, sampled, segments, strided
from tools.datasets import moving_digits
from tools.pictures import BadPicture
from tools.train.__main__ import main
from tools.train.config import Config, ConfigError, load
from tools.train.data import ClipTransform, Transformed, datasets, training_transform
from tools.train.model import create_model, draw_parameters

CONFIGS = sorted((Path(__file__).parents[2] / "configs/timm").glob("*.yaml"))
TINY = [
    "--model", "timesformer_small_patch16_224", "--epochs", "1", "--batch-size", "4",
    "--set", "model_args={'embed_dim': 32, 'depth': 1, 'num_heads': 2}", "--set", "dataset=clips",
    "--set", "input_size=[32, 48]", "--set", "frames=4", "--set", "crop=none", "--set", "hflip=0", "--set", "workers=0",
]  # fmt: skip


@pytest.fixture(scope="module", params=["png", "mp4"])
def made(request, tmp_path_factory) -> Path:
    if request.param == "mp4":
        pytest.importorskip("cv2")
    folder = tmp_path_factory.mktemp("clips") / request.param
    moving_digits.build(
        folder, moving_digits.Recipe(8, 4, frames=8, width=48, speed=(0.06, 0.08), format=request.param)
    )
    return folder


@pytest.fixture
def clips(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / made.name))


def train(data: Path, output: Path, *arguments: str) -> int:
    return main(["--data", str(data), "--output", str(output), *TINY, *arguments])


def break_clip(clips: Path) -> str:
    """Corrupt one training clip and return its name."""
    clip = sorted((clips / "train/left").iterdir())[0]
    file = clip / "001.png" if clip.is_dir() else clip
    file.write_bytes(file.read_bytes()[:200])
    return clip.relative_to(clips).as_posix()


# --- reading ----------------------------------------------------------------------------------------------------------


def test_frames_are_spread_over_the_clip(clips):
    assert sampled(8, 8) == list(range(8))
    assert sampled(100, 4) == [12, 37, 62, 87]
    assert sampled(3, 5) == [0, 0, 1, 2, 2]
    clip = sorted((clips / "train/up").iterdir())[0]
    whole = [np.asarray(frame) for frame in open_clip(clip, 8)]
    assert [frame.shape for frame in whole] == [(32, 48, 3)] * 8
    assert not any(np.array_equal(a, b) for a, b in pairwise(whole))
    for frame, expected in zip(open_clip(clip, 4), whole[1::2]):
        assert np.array_equal(frame, expected)
    assert len(open_clip(clip, 12)) == 12


def test_a_random_frame_of_each_part():
    torch.manual_seed(0)
    drawn = [segments(12, 4) for _ in range(200)]
    for part in range(4):
        assert {frames[part] for frames in drawn} == set(range(3 * part, 3 * part + 3))
    assert segments(4, 4) == [0, 1, 2, 3]
    assert segments(2, 5) == [0, 0, 0, 1, 1]
    assert {frames[3] for frames in (segments(10, 4) for _ in range(100))} == {7, 8, 9}


def test_frames_at_a_random_distance():
    torch.manual_seed(0)
    drawn = [strided(16, 4) for _ in range(500)]
    strides = [{b - a for a, b in pairwise(frames)} for frames in drawn]
    assert all(len(steps) == 1 for steps in strides)
    assert set.union(*strides) == {1, 2, 3, 4, 5}
    assert {frames[0] for frames, steps in zip(drawn, strides) if steps == {5}} == {0}
    assert {frames[0] for frames, steps in zip(drawn, strides) if steps == {4}} == {0, 1, 2, 3}
    assert max(frames[-1] for frames in drawn) == 15
    assert strided(4, 4) == [0, 1, 2, 3]
    assert strided(2, 4) == sampled(2, 4)
    assert {tuple(strided(3, 1)) for _ in range(50)} == {(0,), (1,), (2,)}


@pytest.mark.parametrize("sampling", ["segments", "stride"])
def test_random_frames_are_of_training_alone(clips, sampling):
    config = Config("any", dataset="clips", frames=3, frame_sampling=sampling)
    training, validation, _ = datasets(config, clips)
    whole = [np.asarray(frame) for frame in read_whole(training.samples[0][0])]
    assert len(whole) == 8
    torch.manual_seed(0)
    seen = set()
    for _ in range(30):
        numbers = [[np.array_equal(frame, other) for other in whole].index(True) for frame in training[0][0]]
        assert numbers == sorted(set(numbers))
        seen.add(tuple(numbers))
    assert len(seen) > 5
    frames = [np.asarray(frame) for frame in validation[0][0]]
    assert all(
        np.array_equal(a, b)
        for a, b in zip(frames, map(np.asarray, open_clip(validation.samples[0][0], 3)), strict=True)
    )


def test_the_check_reads_every_frame_that_training_may_take(tmp_path, capsys):
    moving_digits.build(tmp_path / "clips", moving_digits.Recipe(4, 4, frames=8, speed=(0.06, 0.08)))
    clip = next((tmp_path / "clips/train/up").iterdir())
    (clip / "007.png").write_bytes(b"")
    check = ["--data", str(tmp_path / "clips"), "--check"]
    check += ["--set", "dataset=clips", "--set", "workers=0", "--set", "frames=2"]
    assert main(check) == 0
    assert main([*check, "--set", "frame_sampling=segments"]) == 1
    assert f"{clip}: " in capsys.readouterr().out


def test_colours_are_rgb(tmp_path):
    pytest.importorskip("cv2")
    red = np.zeros((4, 32, 48, 3), np.uint8)
    red[..., 0] = 250
    moving_digits.write_mp4(tmp_path / "red", red)
    frame = np.asarray(open_clip(tmp_path / "red.mp4", 2)[0]).mean((0, 1))
    assert frame[0] > 200
    assert max(frame[1:]) < 50


def test_what_is_no_clip(tmp_path):
    pytest.importorskip("cv2")
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "empty").mkdir()
    (tmp_path / "mixed").mkdir()
    for name, size in (("0.png", (8, 8)), ("1.png", (8, 9))):
        Image.new("RGB", size).save(tmp_path / "mixed" / name)
    for name, reason in (
        ("text.mp4", "it is no video that OpenCV decodes"), ("empty", "it holds no picture"),
        ("mixed", r"its pictures differ in size, \[\(8, 8\), \(8, 9\)\]"), ("none.mp4", "there is no such file"),
    ):  # fmt: skip
        with pytest.raises(BadPicture, match=f"{name} cannot be read as a clip: {reason}"):
            open_clip(tmp_path / name, 2)


def test_a_class_without_clips(clips, capsys):
    for path in (clips / "val/up").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert train(clips, clips / "out") == 2
    assert "val: no video and no folder of pictures for the class up" in capsys.readouterr().err


def test_videos_without_opencv(tmp_path, monkeypatch):
    """The error says what to install."""
    for split in ("train", "val"):
        (tmp_path / split / "one").mkdir(parents=True)
        (tmp_path / split / "one/0.mp4").touch()
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(SystemExit, match="not installed: cv2; pip install"):
        train(tmp_path, tmp_path / "out")


def test_all_frames_pass_the_same_random_transform():
    """Equal frames stay equal, clips differ, and random numbers outside continue."""
    data = dict(input_size=(3, 32, 48), interpolation="bilinear", mean=(0.5,) * 3, std=(0.5,) * 3)
    config = Config("any", dataset="clips", color_jitter=0.4, auto_augment="rand-m9-mstd0.5", erasing=0.5)
    transform = training_transform(config, data)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8))
    torch.manual_seed(0)
    clips = [ClipTransform(transform)([picture] * 3) for _ in range(4)]
    assert all(clip.shape == (3, 3, 32, 48) for clip in clips)
    assert all(torch.equal(clip[0], clip[2]) for clip in clips)
    assert not any(torch.equal(a, b) for a, b in pairwise(clips))
    (frames, label) = Transformed([([picture] * 2, 3)], transform)[0]
    assert (tuple(frames.shape), label) == ((2, 3, 32, 48), 3)


# --- training ---------------------------------------------------------------------------------------------------------


def test_training_resuming_and_evaluation(clips, tmp_path, capsys):
    assert train(clips, tmp_path / "out") == 0
    assert "4 classes, 32×48 pixels; 8 + 4 clips" in capsys.readouterr().out
    assert main(["--data", str(clips), "--output", str(tmp_path / "out"), "--resume"]) == 0
    assert "nothing is left to train: 1 of 1 epochs are done" in capsys.readouterr().out
    weights = str(tmp_path / "out/best.safetensors")
    assert train(clips, tmp_path / "other", "--evaluate", weights) == 0
    assert capsys.readouterr().out.startswith("top-1 ")
    resume = ["--data", str(clips), "--output", str(tmp_path / "out"), "--resume", "--set", "frames=8"]
    assert main(resume) == 2
    assert "was trained with frames = 4, but now it is 8" in capsys.readouterr().err


@pytest.mark.parametrize("config", [c for c in CONFIGS if load(c).dataset == "clips"], ids=lambda file: file.stem)
@pytest.mark.parametrize("pattern", ["divided", "space"])
def test_a_config_trains_and_infers(config, pattern, tmp_path, capsys):
    moving_digits.build(tmp_path / "clips", moving_digits.Recipe(8, 4))
    arguments = [str(config), "--data", str(tmp_path / "clips"), "--output", str(tmp_path / "out"), "--epochs", "1"]
    arguments += ["--set", f"model_args.pattern={pattern}"]
    blind = ["--set", "init_std={pos_embed: 0.5}"] * (pattern == "space")
    assert main([*arguments, *blind]) == 0
    assert "4 classes, 32×32 pixels; 8 + 4 clips" in capsys.readouterr().out
    assert main([*arguments, "--evaluate", str(tmp_path / "out/best.safetensors")]) == 0
    if pattern == "space":
        assert main([*arguments[:-4], "--epochs", "1", *arguments[-2:], "--output", str(tmp_path / "other")]) == 2
        assert "init_std must name parameters of the model, such as " in capsys.readouterr().err


def test_parameters_are_drawn_by_their_deviation():
    args = dict(embed_dim=32, depth=1, num_heads=2)
    config = Config("timesformer_small_patch16_224", args, dataset="clips", frames=8, input_size=(32, 48))
    model = create_model(config, 4)
    assert model.time_embed.shape[1] == 8
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    torch.manual_seed(0)
    draw_parameters(model, dict(time_embed=0.5, cls_token=0.0))
    assert float(model.time_embed.detach().std()) == pytest.approx(0.5, rel=0.15)
    assert not model.cls_token.any()
    assert all(name in ("time_embed", "cls_token") or p.equal(before[name]) for name, p in model.named_parameters())
    with pytest.raises(
        ConfigError, match=r"init_std must name parameters of the model, such as time_embed, .*'time_emb'"
    ):
        draw_parameters(model, dict(time_emb=0.5))


def test_broken_clips_are_named_and_skipped(clips, tmp_path, capsys):
    name = break_clip(clips)
    assert main(["--data", str(clips), "--check", "--set", "dataset=clips", "--set", "workers=0"]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{clips / name}: ")
    assert last == "1 of 12 images cannot be read"
    assert train(clips, tmp_path / "out", "--batch-size", "2") == 2
    error = capsys.readouterr().err
    assert name in error
    assert "--skip-broken trains without them" in error
    assert train(clips, tmp_path / "other", "--skip-broken") == 0
    assert f"left out 1 of 12 images, which cannot be read: {name} " in capsys.readouterr().out
    assert (tmp_path / "other/broken.txt").read_text().startswith(f"{name}\t")


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(cutmix=1.0), "dataset 'clips' does not support cutmix, got 1.0"),
        (dict(channels_last=True), "dataset 'clips' does not support channels_last, got True"),
        (dict(frame_sampling="random"), "frame_sampling must be one of uniform, segments, stride, got 'random'"),
        (dict(frames=0), "frames must be at least 1, got 0"),
        (dict(init_std=dict(time_embed=-1)), "init_std.time_embed must be a number of at least 0, got -1"),
        (dict(init_std=dict(time_embed="big")), "init_std.time_embed must be a number of at least 0, got 'big'"),
        (dict(init_std=dict(time_embed=True)), "init_std.time_embed must be a number of at least 0, got True"),
        (dict(), r"'clips' needs a model of clips, timesformer_base_.*, got aa_resnet34"),
    ],
)
def test_settings_that_clips_go_without(options, message):
    with pytest.raises(ConfigError, match=message):
        create_model(Config("aa_resnet34", dataset="clips", **options), 4)
